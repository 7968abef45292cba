"""Writes files that do not exist yet."""

import json
from pathlib import Path
from typing import BinaryIO


def open_new(path: str | Path, overwrite: bool) -> BinaryIO:
    """Opens a file for writing.  Raises FileExistsError if it exists and ``overwrite`` is False."""
    return Path(path).open("wb" if overwrite else "xb")


def write_json(found: object, path: str | Path, overwrite: bool) -> None:
    text = json.dumps(found, indent=2)
    with open_new(path, overwrite) as file:
        file.write(text.encode() + b"\n")
