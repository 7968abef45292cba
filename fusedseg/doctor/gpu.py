"""``fusedseg doctor --gpu`` tests and times the kernels on every kind of GPU of this machine, within a minute.

Another process runs the kernels (``worker.py``).  If a kernel kills it, the report names the kernel, and a new process
does the rest.  A test replaces the verdict that an earlier self-test has left on disk.
"""

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from .. import _backend
from ..cli.command import Refused
from ..ops.self_test import first_use, verdicts
from ..ops.self_test.checks import DTYPES
from ..progress import Progress
from .report import describe, devices, versions
from .speed import SPEEDS

# Seconds for all jobs together.  The process and PyTorch need a few more to start.
LIMIT = 55.0
# fp64 is left out, because hardly anybody trains in it.
TESTED = (torch.float16, torch.bfloat16, torch.float32)
WORKER = (sys.executable, "-m", "fusedseg.doctor.worker")
DIED, LATE = "process died", "no time was left"
# The format of the JSON file.
FORMAT = 1

Job = tuple[str, ...]


class Outcome(NamedTuple):
    """A job, and what the worker found: fields of a verdict with a traceback, or speeds."""

    job: Job
    found: dict[str, Any]

    @property
    def failed(self) -> bool:
        return bool(self.found.get("kind"))


def kinds_of_gpu() -> list[torch.device]:
    """The first GPU of each model, because GPUs of a model share their verdicts."""
    first: dict[tuple[str, str], torch.device] = {}
    for gpu in devices()[1:]:
        first.setdefault((torch.cuda.get_device_name(gpu), _backend.architecture(gpu)), gpu)
    return list(first.values())


def jobs_of(gpus: Sequence[torch.device]) -> list[Job]:
    """All jobs.  What decides most often comes first, because time may run out."""
    tests: list[Job] = [
        ("test", str(gpu), family, first_use.short(dtype))
        for gpu in gpus
        for dtype in TESTED
        for family, dtypes in DTYPES.items()
        if dtype in dtypes
    ]
    speeds: list[Job] = [("speed", str(gpu), what) for gpu in gpus for what in SPEEDS]
    per_dtype = sum(len(set(dtypes) & {TESTED[0]}) for dtypes in DTYPES.values()) * len(gpus)
    return tests[:per_dtype] + speeds + tests[per_dtype:]


def run(jobs: Sequence[Job], seconds: float) -> Iterator[Outcome]:
    """The outcome of every job, in order; jobs that the time did not suffice for have one too."""
    left, end = list(jobs), time.monotonic() + seconds
    while left:
        if time.monotonic() >= end:
            yield from (Outcome(job, {"kind": LATE, "text": f"{LIMIT:.0f} seconds were over"}) for job in left)
            return
        for outcome in _run_until_it_ends(left, end):
            assert outcome.job == left[0]
            del left[0]
            yield outcome


def _run_until_it_ends(jobs: Sequence[Job], end: float) -> Iterator[Outcome]:
    """The outcomes of at least one of the jobs, from one process."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with tempfile.TemporaryFile("w+") as errors:
        worker = subprocess.Popen(
            [*WORKER, json.dumps(jobs)], stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        )
        assert worker.stdout is not None
        events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        reader = threading.Thread(target=_read, args=(worker.stdout, events), daemon=True)
        reader.start()
        running, began = jobs[0], False
        try:
            while (event := events.get(timeout=max(0.0, end - time.monotonic()))) is not None:
                began = "began" in event
                running = tuple(event.get("began") or event["done"])
                if not began:
                    yield Outcome(running, event["found"])
            worker.wait()
            if worker.returncode or began:
                errors.seek(0)
                last = errors.read().strip().splitlines()[-1:] or ["it printed no error"]
                yield Outcome(running, {"kind": DIED, "text": f"exit status {worker.returncode}: {last[0]}"})
        except queue.Empty:
            pass
        finally:
            worker.kill()
            worker.wait()
            # A compiler that the worker has started may hold the pipe a little longer.
            reader.join(timeout=1.0)
            if not reader.is_alive():
                worker.stdout.close()


def _read(lines: IO[str], events: queue.Queue) -> None:
    """Passes on the worker's events, and None at their end.  Libraries may print lines of their own."""
    for line in lines:
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict) and ("began" in event or "done" in event):
                events.put(event)
    events.put(None)


def line_of(outcome: Outcome) -> str:
    _, device, *what = outcome.job
    found, name = outcome.found, f"  {device} {' '.join(what)}"
    if found.get("kind") == LATE:
        return f"{name}: not tried, because {found['kind']}: {found['text']}"
    if outcome.failed:
        return f"{name}: PROBLEM: {found['kind']}: {found['text']}"
    if "speeds" in found:
        return "\n".join(
            f"  {device} {of['what']}: {of['seconds'] * 1e3:.3f} ms, {of['rate']:.0f} {of['unit']}"
            for of in found["speeds"]
        )
    return f"{name}: passed ({found['seconds']:.1f} s)"


def check_path(path: Path | None, overwrite: bool) -> None:
    """Raises Refused if the report cannot be written.  The tests take a minute, so this is asked before."""
    if path is None:
        return
    if path.exists() and not overwrite:
        raise Refused(f"{path} exists: choose another path, or pass --overwrite")
    if not path.absolute().parent.is_dir():
        raise Refused(f"{path}: there is no folder {path.parent}")


def doctor_gpu(path: Path | None = None, overwrite: bool = False) -> int:
    """Prints the table, and writes it to ``path``.  Returns 1 if a kernel fails, and 2 if nothing could be tested."""
    try:
        check_path(path, overwrite)
        if not torch.cuda.is_available():
            raise Refused("torch sees no GPU here; `fusedseg doctor --compile` compiles the kernels without one")
        if not _backend._has_triton():
            raise Refused("triton is not installed, so there are no kernels to test")
    except Refused as refusal:
        print(f"fusedseg doctor --gpu: {refusal}", file=sys.stderr)
        return 2
    start, found = time.monotonic(), list(versions())
    print("\n".join(found))
    gpus, used = kinds_of_gpu(), {}
    print("\nbackend")
    for gpu in gpus:
        used[str(gpu)] = _backend.explain(gpu)
        print(f"  {describe(gpu)}: {' ('.join(used[str(gpu)])})")
    print("\nkernels")
    outcomes: list[Outcome] = []
    jobs = jobs_of(gpus)
    with Progress("fusedseg doctor --gpu") as progress:
        progress.update(" ".join(jobs[0][1:]))
        for outcome in run(jobs, LIMIT):
            outcomes.append(outcome)
            print(line_of(outcome), flush=True)
            if outcome.found.get("kind") == DIED and outcome.job[0] == "test":
                _remember(outcome)
    failed = [of for of in outcomes if of.failed and of.found["kind"] != LATE]
    late = sum(of.failed for of in outcomes) - len(failed)
    verdict = _verdict(len(failed), late, [reason for backend, reason in used.values() if backend != "triton"])
    print(f"\n{verdict}")
    if path is not None:
        content = {
            "format": FORMAT, "versions": found, "verdict": verdict, "seconds": round(time.monotonic() - start, 1),
            "gpus": [_described(gpu, used[str(gpu)]) for gpu in gpus],
            "jobs": [{"job": of.job, **of.found} for of in outcomes],
        }  # fmt: skip
        path.write_text(json.dumps(content, indent=1) + "\n")
        print(f"The report is in {path}: please attach it when you report a problem.")
    return min(len(failed), 1)


def _remember(outcome: Outcome) -> None:
    """Keeps the verdict about kernels that killed their process, which could not write it."""
    _, device, family, dtype = outcome.job
    verdict = verdicts.Verdict(outcome.found["kind"], outcome.found["text"])
    first_use.record(family, getattr(torch, dtype), torch.device(device), verdict)


def _described(gpu: torch.device, used: tuple[str, str]) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(gpu)
    backend, reason = used
    return {
        "device": str(gpu), "backend": backend, "reason": reason, "memory": properties.total_memory,
        "multiprocessors": properties.multi_processor_count, **verdicts.environment(gpu)._asdict(),
    }  # fmt: skip


def _verdict(failed: int, late: int, unused: Sequence[str]) -> str:
    untried = f" For {late} of them no time was left." if late else ""
    if failed:
        return f"Something is wrong: see the lines with PROBLEM above.{untried} PyTorch's own ops take over there."
    if unused:
        return f"Every kernel that was tried is right here, but fusedseg does not use them: {unused[0]}.{untried}"
    return f"All is well: every kernel that was tried agrees with PyTorch in float64.{untried}"
