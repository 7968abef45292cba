"""Formats tables and sentences for terminals, and writes files that do not exist yet."""

import json
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

MEBIBYTE = 2**20
# The widest and the narrowest text.
WIDTH, NARROWEST = 110, 40


def mib(nbytes: float) -> str:
    return f"{nbytes / MEBIBYTE:,.1f}"


def table(head: Sequence[str], lines: Sequence[Sequence[str]], left: int = 1) -> str:
    """A table with aligned columns under a head; the first ``left`` columns are aligned to the left."""
    widths = [max(len(row[i]) for row in [head, *lines]) for i in range(len(head))]
    aligned = [
        "  ".join(f"{cell:<{width}}" if i < left else f"{cell:>{width}}" for i, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(row, widths, strict=True)) for row in [head, *lines])
    ]
    return "\n".join(line.rstrip() for line in [aligned[0], "─" * (sum(widths) + 2 * len(widths) - 2), *aligned[1:]])


def wrapped(text: str) -> str:
    """Breaks lines that are longer than ``WIDTH`` or wider than the terminal, and indents the lines of a list item."""
    # A file or a pipe has no width.
    width = min(WIDTH, max(shutil.get_terminal_size((WIDTH, 24)).columns - 1, NARROWEST))
    return "\n".join(
        textwrap.fill(line, width, subsequent_indent=" " * (len(line) - len(line.lstrip(" •"))))
        for line in text.splitlines()
    )


def open_new(path: str | Path, overwrite: bool) -> BinaryIO:
    """Opens a file for writing.  Raises FileExistsError if it exists and ``overwrite`` is False."""
    return Path(path).open("wb" if overwrite else "xb")


def write_json(found: object, path: str | Path, overwrite: bool) -> None:
    text = json.dumps(found, indent=2)
    with open_new(path, overwrite) as file:
        file.write(text.encode() + b"\n")
