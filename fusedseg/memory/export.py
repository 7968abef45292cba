"""Writes a report to files: CSV, JSON, a Chrome trace, and a snapshot for PyTorch's memory visualiser."""

import csv
import io
import json
import pickle
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, BinaryIO

from .advice import findings, summary
from .record import Record
from .trace import Row
from .units import KEYS, MEBIBYTE

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


def microseconds(report: Record) -> list[float]:
    """The time of each event since the first event, in microseconds.

    On fake tensors time means nothing, so events are 1 µs apart.
    """
    if report.device == "fake":
        return [float(i) for i in range(len(report.events))]
    start = report.times[0] if report.times else 0
    return [(at - start) / 1e3 for at in report.times]


def chrome_trace(report: Record) -> dict[str, Any]:
    """A Chrome trace: the bytes of each kind as a counter, and the forward calls of modules as spans."""
    times = microseconds(report)
    common = {"pid": 0, "tid": 0}
    counted: Counter[str] = Counter(dict.fromkeys([s.kind for s in report.storages], 0))
    counted.update(report.resident_by_kind())
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": f"{report.label}: {report.model}"}}
    ]
    for number, at in zip(report.events, times, strict=True):
        storage = report.storages[number if number >= 0 else ~number]
        counted[storage.kind] += storage.nbytes if number >= 0 else -storage.nbytes
        args = {kind: nbytes / MEBIBYTE for kind, nbytes in counted.items()}
        events.append({"ph": "C", "name": "memory, MiB", "ts": at, "args": args, **common})
    for row in report.rows:
        if row.hook_type in ("pre", "fwd") and times:
            begins = row.hook_type == "pre"
            at = times[min(row.event, len(times) - 1)]
            events.append({"ph": "B" if begins else "E", "name": f"{row.name} ({row.layer_type})", "ts": at, **common})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_snapshot(report: Record, path: str | Path, overwrite: bool) -> None:
    with open_new(path, overwrite) as file:
        pickle.dump(snapshot(report), file)


def snapshot(report: Record) -> dict[str, Any]:
    """A snapshot in the format of ``torch.cuda.memory._snapshot()``; every allocation has its own address."""
    addresses, top = [], 0
    for storage in report.storages:
        addresses.append(top)
        # The visualiser would merge allocations of equal address, so an empty allocation takes a byte.
        top += max(storage.nbytes, 1)

    def entry(index: int, action: str, at: float) -> dict[str, Any]:
        storage = report.storages[index]
        what = f"{storage.kind} {tuple(storage.shape)} {storage.dtype}"
        frames = [
            {"name": what, "filename": storage.op or "before the step", "line": 0},
            {"name": storage.phase, "filename": storage.module, "line": 0},
        ]
        return {
            "action": action,
            "addr": addresses[index],
            "size": storage.nbytes,
            "stream": 0,
            "frames": frames,
            "time_us": int(at),
        }

    trace = [entry(i, "alloc", 0.0) for i, storage in enumerate(report.storages) if storage.born < 0]
    for number, at in zip(report.events, microseconds(report), strict=True):
        if number >= 0:
            trace.append(entry(number, "alloc", at))
        else:
            trace += [entry(~number, "free_requested", at), entry(~number, "free_completed", at)]
    return {"segments": [], "device_traces": [trace], "allocator_settings": {}, "external_annotations": []}
