"""Reads the JSON files that the benches write."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

# What a file of results holds for one case.
CaseResults = Mapping[str, Any]
# The contents of all files of a folder, by the stem of their names.
Files = Mapping[str, Mapping[str, Any]]


class ReportError(Exception):
    """A file cannot be read or written; the message is for the user."""


def load(folder: Path) -> dict[str, dict[str, Any]]:
    """Reads every ``<stem>.json`` of a folder; returns the contents by stem.

    Raises:
        ReportError: the folder has no such file, or a file was not written by a bench.
    """
    files = {}
    for path in sorted(folder.glob("*.json")):
        try:
            content = json.loads(path.read_text())
        except ValueError as error:
            raise ReportError(f"{path}: not JSON: {error}") from error
        if not isinstance(content, dict) or not {"machine", "results"} <= content.keys():
            raise ReportError(f"{path}: expected an object with 'machine' and 'results', as the benches write it")
        files[path.stem] = content
    if not files:
        raise ReportError(f"{folder}: expected a folder with JSON files of the benches, found none")
    return files


def sections(files: Files) -> Iterator[tuple[str, str, Mapping[str, CaseResults]]]:
    """Yields (stem, title, cases) of every file that compares contenders."""
    for stem, content in files.items():
        cases = content["results"]
        if cases and all(isinstance(case, dict) and "contenders" in case for case in cases.values()):
            yield stem, content.get("title", stem), cases


def figure(case: CaseResults, name: str, key: str) -> float | None:
    """A contender's median milliseconds of a part, or its bytes; None if the figure is missing."""
    found = case["contenders"].get(name, {}).get(key)
    return found["median_ms"] if isinstance(found, dict) else found
