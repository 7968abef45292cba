"""Gathers results, writes them as JSON files, and reads these files."""

import datetime
import functools
import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import pytest
import torch

from . import harness
from .harness import Result

# The probe that copies the tensor of a case.
COPY = "copy"
PARTS = ("forward", "backward", "step")
# The passes over the tensor that a fused norm of a large tensor needs.  A copy makes two.
PASSES = {"forward": 3, "backward": 5, "step": 8}
COPY_PASSES = 2
# Medians that differ by less than this share count as equal.
NOISE = 0.02

# What a file of results holds for one case.
CaseResults = Mapping[str, Any]
# The contents of all files of a folder, by the stem of their names.
Files = Mapping[str, Mapping[str, Any]]


class ReportError(Exception):
    """A file cannot be read or written; the message is for the user."""


@functools.cache
def machine(device: torch.device) -> dict[str, Any]:
    """A description of the machine and the versions."""
    about: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version(), "commit": commit()}
    about["date"] = datetime.date.today().isoformat()
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


def two_digits(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def as_json(name: str, result: Result, tensor_bytes: int | None) -> dict[str, Any]:
    """The result of a contender for JSON.  A probe runs forward only."""
    if result.missing or result.refused:
        return {"missing": result.missing, "refused": result.refused, "errors": result.errors}
    content: dict[str, Any] = {"errors": result.errors}
    for part in ("forward",) if name == COPY else PARTS:
        if times := getattr(result, part):
            content[part] = spread(times)
            if tensor_bytes is not None:
                passes = COPY_PASSES if name == COPY else PASSES[part]
                content[part]["gb_per_s"] = passes * tensor_bytes / 1e6 / content[part]["median_ms"]
    counted = {"kept_bytes": result.kept, "peak_bytes": result.peak, "reserved_bytes": result.reserved}
    return content | {kind: nbytes for kind, nbytes in counted.items() if nbytes}


class Report:
    """The results of all benches of a session, and lines to print at its end."""

    def __init__(self, device: torch.device, directory: Path) -> None:
        self.device, self.directory = device, directory
        self.files: dict[str, dict[str, Any]] = {}
        self.notes: list[str] = []

    def add(
        self, stem: str, title: str, case: str, results: Mapping[str, Result], tensor_bytes: int | None = None
    ) -> None:
        """Adds the contenders of a case, and writes the file, so that it exists even if the session is cut short.

        The test fails if a contender has wrong results, and is skipped if none could run.  ``tensor_bytes`` is the size
        of the tensor that a layer passes over.
        """
        if harness.rehearsal:
            return
        content: dict[str, Any] = {} if tensor_bytes is None else {"tensor_bytes": tensor_bytes}
        content["contenders"] = {name: as_json(name, of, tensor_bytes) for name, of in results.items()}
        known = self.files[stem]["results"] if stem in self.files else {}
        self.write(stem, {**known, case: content}, title)
        if wrong := [f"{name}: {of.refused}" for name, of in results.items() if of.refused]:
            pytest.fail(f"{'; '.join(wrong)}, beside the float64 reference")
        if all(of.missing for of in results.values()):
            pytest.skip("; ".join(f"{name}: {of.missing}" for name, of in results.items()))

    def write(self, stem: str, results: Mapping[str, Any], title: str = "") -> None:
        """Writes ``<directory>/<stem>.json``: the machine and the results."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self.files[stem] = {"machine": machine(self.device), "title": title, "results": results}
        (self.directory / f"{stem}.json").write_text(json.dumps(self.files[stem], indent=1) + "\n")


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
