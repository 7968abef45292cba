"""Tests the kernels and a compiled network on every kind of GPU of this machine, for ``fusedseg doctor --gpu``.

Another process runs the kernels: ``python -m fusedseg.doctor.gpu JOBS``.  JOBS is a list in JSON of jobs (device,
family, dtype, what FUSEDSEG_WITHOUT leaves out).  The process prints a line of JSON after each job, and ends early if a
job has left the GPU unusable.  If a kernel kills the process, the report names the kernel, and a new process does the
rest.

The family "network" is the network of ``network.py``.  Where its gradients are wrong, it runs again without each
rewrite in turn, and the report has the names to leave out.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import starmap
from typing import Any, NamedTuple

import torch

from .. import _backend
from ..cli.command import first_line
from ..ops.registry import FAMILIES
from ..ops.self_test import first_use

# Seconds for all kernels together, for the networks, and for those without a rewrite.
LIMIT, NETWORK_LIMIT, SEARCH_LIMIT = 55.0, 60.0, 180.0
NETWORK = "network"
# fp64 is left out, because hardly anybody trains in it.
TESTED = (torch.float16, torch.bfloat16, torch.float32)
WORKER = (sys.executable, "-m", "fusedseg.doctor.gpu")
DIED, LATE = "process died", "no time was left"


class Job(NamedTuple):
    """A family of kernels to test, or the network without the rewrites that ``without`` names."""

    device: str
    family: str
    dtype: str
    without: str = ""


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
        name, found = " ".join(self.job[:3]), self.found
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
    """Tests every family in every dtype, and then the network."""
    jobs = [
        Job(str(gpu), name, first_use.short(dtype))
        for dtype in TESTED
        for gpu in gpus
        for name, family in FAMILIES.items()
        if dtype in family.dtypes and family.runs_on(gpu)
    ]
    yield from run(jobs, LIMIT)
    # The compiler takes seconds to import.
    from ..compiler.settings import left_out

    networks = [Job(str(gpu), NETWORK, "float16", ",".join(sorted(left_out()))) for gpu in gpus]
    for outcome in run(networks, NETWORK_LIMIT):
        if outcome.failed:
            outcome.found["text"] += f". {advice(outcome.job)}"
        yield outcome


def advice(job: Job) -> str:
    """What to leave out of a network that is wrong."""
    from ..compiler.settings import OPTIONAL, WITHOUT

    before = {name for name in job.without.split(",") if name}
    names = [name for name in OPTIONAL if name not in before]
    one_less = [job._replace(without=",".join(sorted({*before, name}))) for name in names]
    tries = [*one_less, job._replace(without=",".join(OPTIONAL))]
    right = [outcome.job.without for outcome in run(tries, SEARCH_LIMIT) if not outcome.found["kind"]]
    if not right:
        return f"It is so without {','.join(OPTIONAL)} too"
    return f"It is right without {right[0]}: set {WITHOUT}={right[0]}, and please report it"


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
            found += [{"kind": LATE, "text": f"{seconds:.0f} seconds were over"}] * (len(left) - len(found))
        yield from map(Outcome, left, found)
        del left[: len(found)]


def _results(printed: bytes) -> Iterator[dict[str, Any]]:
    """What the worker has found.  Libraries may print lines of their own."""
    for line in printed.splitlines():
        with contextlib.suppress(ValueError):
            result = json.loads(line)
            if isinstance(result, dict) and "kind" in result:
                yield result


def worker(jobs: Iterable[Job]) -> None:
    """Tests families of kernels, and networks."""
    for job in jobs:
        device, of = torch.device(job.device), getattr(torch, job.dtype)
        try:
            if job.family == NETWORK:
                from . import network

                result, trace = network.test(device, of, job.without), ""
            else:
                result, trace = first_use.test_now(job.family, of, device)
        # There may be no memory for the test, for example.
        except Exception as error:
            result, trace = first_use.SelfTestResult("error", first_line(error)), ""
        print(json.dumps({**result._asdict(), "traceback": trace}), flush=True)
        if result.kind and not first_use.answers(device):
            return


if __name__ == "__main__":
    worker(starmap(Job, json.loads(sys.argv[1])))
