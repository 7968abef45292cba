"""Gathers results, prints the closing tables, and writes JSON files, which ``report.py`` reads."""

import functools
import json
import os
import platform
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from statistics import geometric_mean, median, quantiles
from typing import Any, TypeVar

import torch

from .harness import Result

# contender: its name in the head of the closing table.
RIVALS = {
    "compiled": "compile",
    "aggressive": "aggressive",
    "checkpoint": "checkpoint",
    "inplace_abn": "inplace_abn",
    "folded": "folded",
    "ours-triton": "triton",
    "ours-aten": "aten",
    "ours-exact": "BatchNormAct",
}
# The probe that copies the tensor of a case.
COPY = "copy"
# The contenders whose bytes the closing table shows.
SHOWN = ("eager", "compiled", "aggressive", "checkpoint", "ours")
# The passes over the tensor that a fused norm of a large tensor needs.  A copy makes two.
PASSES = {"forward": 3, "backward": 5, "step": 8}
COPY_PASSES = 2
# Medians that differ by less than this share count as equal.
NOISE = 0.02


AnySection = TypeVar("AnySection", bound="Section")


@functools.cache
def machine(device: torch.device) -> dict[str, Any]:
    """A description of the machine and the versions."""
    about: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version(), "commit": commit()}
    try:
        import triton

        about["triton"] = triton.__version__
    except ImportError:
        about["triton"] = None
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        about["gpu"] = properties.name
        about["multiprocessors"] = properties.multi_processor_count
        about["l2_bytes"] = properties.L2_cache_size
        about["driver"] = run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0]
        about["cuda"] = torch.version.cuda
        about["cudnn"] = torch.backends.cudnn.version()
        # Whether cuDNN chooses its convolution by trial.
        about["cudnn_benchmark"] = torch.backends.cudnn.benchmark
    else:
        about["cpu"] = platform.processor() or platform.machine()
        about["threads"] = torch.get_num_threads()
        # The number of processes that want a core.  If it is far above the threads, the machine was busy.
        about["load"] = round(os.getloadavg()[0], 1)
    return about


def run(*command: str) -> str:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def commit() -> str:
    """The measured commit; in a copy without git history, the value of ``BENCH_COMMIT``."""
    head = run("git", "rev-parse", "--short", "HEAD")
    if head == "unknown":
        return os.environ.get("BENCH_COMMIT", head)
    return head + (" with changes" if run("git", "status", "--porcelain", "--untracked-files=no") else "")


def default_directory(device: torch.device) -> Path:
    """The folder for results.  Those of a GPU belong to the repository; those of a CPU are ignored by git."""
    bench = Path(__file__).parent
    if device.type == "cuda":
        return bench / "results" / torch.cuda.get_device_name(device).lower().replace(" ", "-")
    return bench / "out"


def spread(seconds: list[float]) -> dict[str, float]:
    fifths = quantiles(seconds, n=5, method="inclusive")
    return {"median_ms": 1e3 * median(seconds), "p20_ms": 1e3 * fifths[0], "p80_ms": 1e3 * fifths[3]}


def as_json(result: Result, parts: tuple[str, ...], counts: tuple[str, ...], moved: dict[str, int]) -> dict[str, Any]:
    """The result for JSON.  ``moved`` has the least bytes that each part moves."""
    if result.missing or result.refused:
        return {"missing": result.missing, "refused": result.refused, "errors": result.errors}
    times = {part: spread(getattr(result, part)) for part in parts}
    for part, nbytes in moved.items():
        times[part]["gb_per_s"] = nbytes / 1e6 / times[part]["median_ms"]
    return {**times, **{f"{count}_bytes": getattr(result, count) for count in counts}, "errors": result.errors}


@dataclass
class Section:
    """The results of one bench: for each case those of the contenders, and the bytes of the case's tensor, if any.

    ``parts`` are the timed parts of a step, the whole step last.  ``counts`` are the kinds of bytes that are reported.
    """

    title: str
    parts: tuple[str, ...] = ("forward", "backward", "step")
    counts: tuple[str, ...] = ("kept", "peak")
    cases: dict[str, dict[str, Result]] = field(default_factory=dict)
    tensor_bytes: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {case: self.case_to_json(case) for case in self.cases}

    def case_to_json(self, case: str) -> dict[str, Any]:
        """The contenders of a case, and its other figures."""
        results, nbytes = self.cases[case], self.tensor_bytes.get(case)
        content: dict[str, Any] = {} if nbytes is None else {"tensor_bytes": nbytes}
        counts = (*self.counts, "reserved") if any(r.reserved for r in results.values()) else self.counts
        content["contenders"] = contenders = {}
        for name, result in results.items():
            # A probe runs forward only.
            parts, kinds, passes = (
                (("forward",), (), {"forward": COPY_PASSES}) if name == COPY else (self.parts, counts, PASSES)
            )
            moved = {part: passes[part] * nbytes for part in parts} if nbytes is not None else {}
            contenders[name] = as_json(result, parts, kinds, moved)
        return content

    def lines(self) -> list[str]:
        """The closing tables."""
        judged = {case: r for case, r in self.cases.items() if timed(r, "eager") and timed(r, "ours")}
        return [
            self.title,
            *aligned(self.time_rows(judged)),
            "",
            *aligned(byte_rows(judged, self.counts)),
            *self.refusals(),
        ]

    def refusals(self) -> list[str]:
        return [
            f"refused: {name}, {case}: {result.refused}"
            for case, results in self.cases.items()
            for name, result in results.items()
            if result.refused
        ]

    def whole(self, result: Result) -> float:
        """The median of the whole step, in seconds."""
        return median(getattr(result, self.parts[-1]))

    def time_rows(self, judged: dict[str, dict[str, Result]]) -> list[list[str]]:
        rivals = [name for name in RIVALS if any(timed(results, name) for results in judged.values())]
        copies = any(self.tensor_bytes.values())
        rows, ratios = [], []
        for case, results in judged.items():
            eager, ours = results["eager"], results["ours"]
            numbers = [
                *(median(getattr(ours, part)) / median(getattr(eager, part)) for part in self.parts),
                *(self.whole(ours) / self.whole(results[r]) if timed(results, r) else None for r in rivals),
            ]
            ratios.append(numbers)
            row = [case, *(f"{1e3 * self.whole(r):.2f}" for r in (eager, ours)), *map(two_digits, numbers)]
            if copies:
                nbytes = self.tensor_bytes[case]
                row.append(f"{PASSES[self.parts[-1]] * nbytes / self.whole(ours) / 1e9:.1f}")
                row.append(f"{COPY_PASSES * nbytes / median(results[COPY].forward) / 1e9:.1f}")
            rows.append(row)
        header = [f"{self.parts[-1]}, medians", "eager ms", "ours ms", f"ours/eager: {self.parts[0]}", *self.parts[1:]]
        header += [f"ours/{RIVALS[name]}" for name in rivals] + ["ours GB/s", "copy GB/s"] * copies
        return [header, *rows, *summary(ratios, before=2, after=2 * copies)]


def byte_rows(judged: dict[str, dict[str, Result]], counts: tuple[str, ...]) -> list[list[str]]:
    names = [name for name in SHOWN if any(timed(results, name) for results in judged.values())]
    rows, ratios = [], []
    for case, results in judged.items():
        row = [case]
        numbers: list[float | None] = []
        for what in counts:
            row += [mib(results, name, what) for name in names]
            ours, eager = (getattr(results[name], what) for name in ("ours", "eager"))
            numbers.append(ours / eager if eager else None)
            row.append(two_digits(numbers[-1]))
        ratios.append(numbers)
        rows.append(row)
    header = ["MiB"]
    for what in counts:
        # The first contender is eager, without which no case is judged.
        header += [f"{what}: {names[0]}", *names[1:], "ours/eager"] if names else [what]
    last = []
    for label, *reduced in summary(ratios, before=0, after=0):
        last.append([label])
        for ratio in reduced:
            last[-1] += [*[""] * len(names), ratio]
    return [header, *rows, *last]


def summary(ratios: list[list[float | None]], before: int, after: int) -> list[list[str]]:
    """Two rows: the geometric mean and the worst value of each column of ratios."""
    columns = [[value for value in column if value is not None] for column in zip(*ratios, strict=True)]
    return [
        [label, *[""] * before, *(two_digits(reduce(column)) for column in columns), *[""] * after]
        for label, reduce in (("geometric mean", geometric_mean), ("worst", max))
        if columns
    ]


def timed(results: dict[str, Result], name: str) -> bool:
    return name in results and bool(results[name].step)


def two_digits(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def mib(results: dict[str, Result], name: str, what: str) -> str:
    return f"{getattr(results[name], what) / 2**20:.1f}" if timed(results, name) else "-"


def aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]


class Report:
    """The sections of all benches of a session."""

    def __init__(self, device: torch.device, directory: Path) -> None:
        self.device = device
        self.directory = directory
        self.sections: dict[str, Section] = {}
        self.notes: list[str] = []

    def section(self, stem: str, empty: AnySection) -> AnySection:
        """The section of a stem: ``empty`` at the first call, and the same object later."""
        # All sections of a stem have one class.
        return self.sections.setdefault(stem, empty)  # type: ignore[return-value]

    def write_sections(self) -> None:
        """Writes the results so far, so that they exist even if the session is cut short."""
        for stem, section in self.sections.items():
            self.write(stem, section.to_json(), section.title)

    def write(self, stem: str, results: dict[str, Any], title: str = "") -> None:
        """Writes ``<directory>/<stem>.json``: the machine and the results."""
        self.directory.mkdir(parents=True, exist_ok=True)
        content = {"machine": machine(self.device), "title": title, "results": results}
        (self.directory / f"{stem}.json").write_text(json.dumps(content, indent=1) + "\n")
