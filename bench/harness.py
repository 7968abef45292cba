"""Runs the contenders of one job in one process: it checks their results, counts their bytes, and times them in turn.

Every round times each contender once, in a new random order, so that a drift of the machine affects all of them alike.
Inputs are prepared outside the timed region.  On CUDA, device events mark the region after a flush of the L2 cache, as
in ``triton.testing.do_bench``; the flush also hides part of the launch latency, for all contenders alike.  To time
kernels without their launches, the device sleeps until they are queued (``ahead``).
"""

import gc
import random
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fusedseg.memory import SavedBytes, allocator_peak

WARMUP_ROUNDS = 3
# A round of this many seconds has warmed everything up: each contender has also taken steps to be checked and counted.
LONG_ROUND = 0.3
MIN_ROUNDS, MAX_ROUNDS = 5, 100
# Set by the option --rehearse.
rehearsal = False
FLUSH_BYTES = 256 * 2**20
# About two milliseconds, in which the host queues a few launches.
AHEAD_CYCLES = 4_000_000


class Job(Protocol):
    """The way in which one contender does the job."""

    def prepare(self) -> Any:
        """Makes the argument of ``forward``; it is not timed."""

    def forward(self, prepared: Any) -> Tensor: ...

    def backward(self, out: Tensor) -> tuple[Tensor, ...]:
        """Returns the gradients."""

    def results(self, out: Tensor, grads: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """The results by name, for comparison with the reference."""

    def owned(self) -> Iterable[Tensor]:
        """Parameters and buffers."""


class Timing(NamedTuple):
    """How jobs are timed.

    device: the device of the jobs.  seconds: the approximate duration of the timing.  ahead: whether kernels are timed
    without the latency of their launches.
    """

    device: torch.device
    seconds: float
    ahead: bool = False


@dataclass
class Result:
    """Seconds of every round, bytes, and relative errors of one contender.

    ``refused`` says why wrong results have no times, and ``missing`` why the contender did not run.
    """

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    kept: int = 0
    peak: int = 0
    reserved: int = 0
    errors: dict[str, float] = field(default_factory=dict)
    refused: str = ""
    missing: str = ""


class Missing(Exception):
    """A contender cannot run here, for example because a package or a compiler is missing."""


class Probe:
    """Two calls that are timed instead of a contender; the second call gets the result of the first."""

    def __init__(self, forward: Callable[[], Any], backward: Callable[[Any], Any] = lambda out: ()) -> None:
        self._forward, self._backward = forward, backward

    def prepare(self) -> None:
        pass

    def forward(self, prepared: None) -> Any:
        return self._forward()

    def backward(self, out: Any) -> Any:
        return self._backward(out)


def copy_of(like: Tensor) -> Probe:
    """Copies a tensor, which shows the bandwidth of the machine."""
    return Probe(partial(torch.empty_like(like).copy_, like.detach().clone()))


def relative_error(got: Tensor, reference: Tensor) -> float:
    """As in tests/reference.py, but on the device, because moving gigabytes to the host takes too long."""
    norm = torch.linalg.vector_norm(reference).item()
    return torch.linalg.vector_norm(got.double() - reference).item() / (norm or 1.0)


def disagreement(errors: Mapping[str, float], eager: Mapping[str, float], tolerance: Mapping[str, float]) -> str:
    """Names the results whose error exceeds both the tolerance and twice eager's error; "" if there are none."""
    bounds = {name: max(tolerance[name], 2 * eager.get(name, 0.0)) for name in errors}
    # `not <=`, so that NaN is refused.
    wrong = [f"{name} off by {e:.1e} > {bounds[name]:.1e}" for name, e in errors.items() if not e <= bounds[name]]
    return ", ".join(wrong)


class Lap(NamedTuple):
    """The seconds of one forward, one backward, both, and the host's until it has queued both."""

    forward: float
    backward: float
    step: float
    host: float


def lap(job: Any, device: torch.device, flush: Tensor | None = None, ahead: bool = False) -> Lap:
    prepared = job.prepare()
    if device.type == "cuda":
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        if flush is not None:
            flush.zero_()
        if ahead:
            torch.cuda._sleep(AHEAD_CYCLES)
        start = time.perf_counter()
        marks[0].record()
        out = job.forward(prepared)
        marks[1].record()
        grads = job.backward(out)
        marks[2].record()
        host = time.perf_counter() - start
        torch.cuda.synchronize(device)
        del grads
        pairs = (marks[0], marks[1]), (marks[1], marks[2]), (marks[0], marks[2])
        return Lap(*(a.elapsed_time(b) / 1e3 for a, b in pairs), host)
    start = time.perf_counter()
    out = job.forward(prepared)
    middle = time.perf_counter()
    # named, so that freeing the gradients is not timed
    grads = job.backward(out)
    end = time.perf_counter()
    del grads
    return Lap(middle - start, end - middle, end - start, end - start)


def interleave(jobs: Mapping[str, Any], timing: Timing) -> dict[str, Result]:
    """Times all jobs in turn."""
    device, seconds, ahead = timing
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device) if device.type == "cuda" else None
    for _ in range(WARMUP_ROUNDS):
        begin = time.perf_counter()
        for job in jobs.values():
            lap(job, device, flush, ahead)
        round_seconds = time.perf_counter() - begin
        if round_seconds > LONG_ROUND:
            break
    rounds = min(max(int(seconds / round_seconds), MIN_ROUNDS), MAX_ROUNDS)
    results = {name: Result() for name in jobs}
    shuffle = random.Random(0).sample
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name in shuffle(sorted(jobs), len(jobs)):
                forward, backward, step, _ = lap(jobs[name], device, flush, ahead)
                results[name].forward.append(forward)
                results[name].backward.append(backward)
                results[name].step.append(step)
    finally:
        gc.enable()
    return results


def count_bytes(job: Job, device: torch.device) -> tuple[int, int, int]:
    """The kept, peak and reserved bytes of a step.

    Kept bytes are those kept for backward, and the output, which the next layer keeps.  The peak is the most that the
    allocator had handed out; reserved is, on CUDA, the most that it had taken from the device.
    """
    with SavedBytes(job.owned()) as saved:
        out = job.forward(job.prepare())
    saved.add(out)
    saved.add_attributes(out)
    kept = saved.nbytes
    del out, saved

    def step() -> None:
        job.backward(job.forward(job.prepare()))

    if device.type != "cuda":
        return kept, allocator_peak(step, device), 0
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    peak = allocator_peak(step, device)
    return kept, peak, torch.cuda.max_memory_reserved(device) - before


def compete(
    names: Iterable[str],
    build: Callable[[str], Job],
    reference: Callable[[], dict[str, Tensor]],
    tolerance: Mapping[str, float],
    timing: Timing,
    probes: Mapping[str, Any] | None = None,
) -> dict[str, Result]:
    """Checks, counts and times all contenders.  In a rehearsal it only takes the first step of each.

    Args:
        names: the contenders.  "eager" comes first.
        build: makes the job of a contender, and may raise ``Missing``.
        reference: computes the float64 results.
        tolerance: the relative error allowed for each result; twice eager's error is allowed too.
        timing: how they are timed.
        probes: jobs that are timed too, but neither checked nor counted.
    """
    torch._dynamo.reset()
    jobs: dict[str, Any] = {}
    outcome: dict[str, Result] = {}
    expected = {} if rehearsal else reference()
    for name in names:
        outcome[name] = result = Result()
        try:
            job = build(name)
            out = job.forward(job.prepare())
            grads = job.backward(out)
        except Missing as reason:
            result.missing = str(reason)
            continue
        if rehearsal:
            result.missing = "a rehearsal"
            continue
        result.errors = {key: relative_error(got, expected[key]) for key, got in job.results(out, grads).items()}
        result.refused = disagreement(result.errors, outcome["eager"].errors, tolerance)
        del out, grads
        if not result.refused:
            result.kept, result.peak, result.reserved = count_bytes(job, timing.device)
            jobs[name] = job
    del expected
    if rehearsal:
        return outcome
    timed = interleave({**jobs, **(probes or {})}, timing)
    for name, times in timed.items():
        result = outcome.setdefault(name, Result())
        result.forward, result.backward, result.step = times.forward, times.backward, times.step
    return outcome
