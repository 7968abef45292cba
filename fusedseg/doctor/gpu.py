"""Tests the kernels on every kind of GPU of this machine, within a minute, for ``fusedseg doctor --gpu``.

Another process runs the kernels: ``python -m fusedseg.doctor.gpu JOBS``.  JOBS is a list in JSON of jobs (device,
family, dtype).  The process prints a line of JSON after each job, and ends early if a job has left the GPU unusable.
If a kernel kills the process, the report names the kernel, and a new process does the rest.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from .. import _backend
from ..cli.command import first_line
from ..ops.self_test import first_use
from ..ops.self_test.checks import DTYPES, runs_on

# Seconds for all jobs together.  The process and PyTorch need a few more to start.
LIMIT = 55.0
# fp64 is left out, because hardly anybody trains in it.
TESTED = (torch.float16, torch.bfloat16, torch.float32)
WORKER = (sys.executable, "-m", "fusedseg.doctor.gpu")
DIED, LATE = "process died", "no time was left"


class Job(NamedTuple):
    """A family of kernels to test."""

    device: str
    family: str
    dtype: str


class Outcome(NamedTuple):
    """A job, and what the worker found: the fields of a ``SelfTestResult``, with a traceback."""

    job: Job
    found: dict[str, Any]

    @property
    def failed(self) -> bool:
        return bool(self.found["kind"]) and not self.late

    @property
    def late(self) -> bool:
        return self.found["kind"] == LATE

    def __str__(self) -> str:
        name, found = " ".join(self.job), self.found
        if self.late:
            return f"{name}: not tried, because {found['kind']}: {found['text']}"
        if self.failed:
            return f"{name}: PROBLEM: {found['kind']}: {found['text']}"
        return f"{name}: passed ({found['seconds']:.1f} s)"


def kinds_of_gpu() -> list[torch.device]:
    """The first GPU of each model, because kernels are right on all GPUs of a model or on none."""
    first: dict[tuple[str, str], torch.device] = {}
    for gpu in (torch.device("cuda", i) for i in range(torch.cuda.device_count())):
        first.setdefault((torch.cuda.get_device_name(gpu), _backend.architecture(gpu)), gpu)
    return list(first.values())


def outcomes(gpus: Sequence[torch.device]) -> Iterator[Outcome]:
    """Tests every family in every dtype."""
    jobs = [
        Job(str(gpu), family, first_use.short(dtype))
        for dtype in TESTED
        for gpu in gpus
        for family, dtypes in DTYPES.items()
        if dtype in dtypes and runs_on(family, gpu)
    ]
    yield from run(jobs, LIMIT)


def run(jobs: Sequence[Job], seconds: float) -> Iterator[Outcome]:
    """The outcome of every job, in order; jobs that the time did not suffice for have one too."""
    end = time.monotonic() + seconds
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    left = list(jobs)
    while left:
        try:
            worker = subprocess.run(
                [*WORKER, json.dumps(left)], env=environment, capture_output=True, check=False,
                timeout=max(end - time.monotonic(), 0.0),
            )  # fmt: skip
            found = list(_results(worker.stdout))
            if worker.returncode or not found:
                last = worker.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["it printed no error"]
                found.append({"kind": DIED, "text": f"exit status {worker.returncode}: {last[0]}"})
        except subprocess.TimeoutExpired as error:
            found = list(_results(error.stdout or b""))
            found += [{"kind": LATE, "text": f"{LIMIT:.0f} seconds were over"}] * (len(left) - len(found))
        yield from map(Outcome, left, found)
        del left[: len(found)]


def _results(printed: bytes) -> Iterator[dict[str, Any]]:
    """What the worker has found.  Libraries may print lines of their own."""
    for line in printed.splitlines():
        with contextlib.suppress(ValueError):
            result = json.loads(line)
            if isinstance(result, dict) and "kind" in result:
                yield result


def worker(jobs: Sequence[Sequence[str]]) -> None:
    """Tests families of kernels."""
    for where, family, dtype in jobs:
        device, of = torch.device(where), getattr(torch, dtype)
        try:
            result, trace = first_use.test_now(family, of, device)
        # There may be no memory for the test, for example.
        except Exception as error:
            result, trace = first_use.SelfTestResult("error", first_line(error)), ""
        print(json.dumps({**result._asdict(), "traceback": trace}), flush=True)
        if result.kind and not first_use.answers(device):
            return


if __name__ == "__main__":
    worker(json.loads(sys.argv[1]))
