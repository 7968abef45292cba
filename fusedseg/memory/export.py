"""Writes a report to files: CSV and JSON."""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, BinaryIO

from .advice import findings, summary
from .record import Record
from .trace import Row
from .units import KEYS

# The columns of the rows.  The number of an event means nothing to a reader of the file.
COLUMNS = [column.name for column in fields(Row) if column.name != "event"]


def open_new(path: str | Path, overwrite: bool) -> BinaryIO:
    """Opens a file for writing.  Raises FileExistsError if it exists and ``overwrite`` is False."""
    return Path(path).open("wb" if overwrite else "xb")


def write_csv(rows: Sequence[Row], path: str | Path, overwrite: bool) -> None:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore")
    writer.writeheader()
    writer.writerows(map(asdict, rows))
    with open_new(path, overwrite) as file:
        file.write(text.getvalue().encode())


def write_json(found: object, path: str | Path, overwrite: bool) -> None:
    text = json.dumps(found, indent=2)
    with open_new(path, overwrite) as file:
        file.write(text.encode() + b"\n")


def to_dict(report: Record) -> dict[str, Any]:
    return {
        "label": report.label,
        "model": report.model,
        "device": report.device,
        "parameters": report.parameters,
        "resident_bytes": report.resident,
        "resident_by_kind": report.resident_by_kind(),
        "saved_bytes": report.saved,
        "peak_bytes": report.peak,
        "total_bytes": report.total,
        "allocator_peak_bytes": report.allocator_peak,
        "peak_phase": report.peak_phase,
        "saved_by": {by: report.saved_by(by) for by in KEYS},
        "alive_at_peak_by": {by: report.peak_by(by) for by in ("kind", "module", "dtype")},
        "convolutions": report.convolutions,
        "flops": report.flops,
        "findings": [asdict(finding) | {"text": str(finding)} for finding in findings(report)],
        "summary": summary(report),
        "notes": report.notes,
        "rows": [{column: value for column, value in asdict(row).items() if column in COLUMNS} for row in report.rows],
    }
