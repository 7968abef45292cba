"""Times variants of launch constants beside the default in one process.  Each variant states a prediction beforehand.

    Variant("8-programs", "8 programs on each multiprocessor hide more latency: forward 5 % faster.",
            {"fusedseg.kernels.launch": {"PROGRAMS_PER_SM": 8}})

A constant must be overridden in the module that reads it: a module that imports it by name has its own copy.
"""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from ..harness import Job, Missing, Result, Timing, compete
from ..results import COPY, COPY_PASSES, Section, aligned, spread, two_digits
from .precompile import precompile

DEFAULT = "default"
# The name of a module, and the new values of its constants by name.
Overrides = Mapping[str, Mapping[str, Any]]


class Variant(NamedTuple):
    """Other values of launch constants.  ``prediction`` says in one line what should change and why."""

    name: str
    prediction: str
    overrides: Overrides


class Work(NamedTuple):
    """The work of a part of a case: ``amount`` bytes if ``unit`` is "GB/s", operations if it is "TFLOP/s"."""

    amount: int
    unit: str

    def rate(self, seconds: float) -> float:
        return self.amount / seconds / {"GB/s": 1e9, "TFLOP/s": 1e12}[self.unit]


@contextlib.contextmanager
def applied(overrides: Overrides) -> Iterator[None]:
    """A context in which constants of modules have other values.

    Raises:
        AttributeError: a module has no constant of that name.
    """
    from fusedseg.kernels.launcher import forget_plans

    modules = {name: importlib.import_module(name) for name in overrides}
    before = {name: {key: getattr(modules[name], key) for key in constants} for name, constants in overrides.items()}

    def assign(values: Overrides) -> None:
        for name, constants in values.items():
            for key, value in constants.items():
                setattr(modules[name], key, value)
        if values:
            forget_plans()

    try:
        assign(overrides)
        yield
    finally:
        assign(before)


class Overridden:
    """A job under a variant's constants.  An error in its first step becomes ``Missing``: the other jobs still run."""

    def __init__(self, job: Job, overrides: Overrides) -> None:
        self.job, self.overrides = job, overrides
        self.works = False

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        try:
            with applied(self.overrides):
                yield
        except Exception as error:
            if self.works:
                raise
            raise Missing(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}") from error

    def prepare(self) -> Any:
        return self.job.prepare()

    def forward(self, prepared: Any) -> Tensor:
        with self.applied():
            return self.job.forward(prepared)

    def backward(self, out: Tensor) -> tuple[Tensor, ...]:
        with self.applied():
            grads = self.job.backward(out)
        self.works = True
        return grads

    def results(self, out: Tensor, grads: tuple[Tensor, ...]) -> dict[str, Tensor]:
        return self.job.results(out, grads)

    def owned(self) -> Any:
        return self.job.owned()


@functools.cache
def compile_ahead(device: torch.device, launches: str) -> None:
    """Compiles all launches before a bench of variants, because compilers take longer than the timing.

    A launch that fails here fails again in the bench, which names it.  ``launches``: see ``precompile.py``.
    """
    if device.type != "cuda":
        pytest.skip("variants are those of launches on a GPU")
    precompile(launches)


def compete_variants(
    variants: tuple[Variant, ...],
    build: Callable[[], Job],
    expected: Callable[[], dict[str, Tensor]],
    tolerance: Mapping[str, float],
    device: torch.device,
    seconds: float,
    others: Mapping[str, Callable[[], Job]] | None = None,
    probes: Mapping[str, Any] | None = None,
) -> dict[str, Result]:
    """Checks the job and times its kernels, under the default and under each variant; see ``compete``.

    ``others`` are further contenders without overrides, such as the vendor's.  A probe named "copy" measures the
    bandwidth of a copy of the tensor.
    """

    def overridden(overrides: Overrides) -> Job:
        return Overridden(build(), overrides)

    contenders = {DEFAULT: functools.partial(overridden, {})}
    contenders |= {variant.name: functools.partial(overridden, variant.overrides) for variant in variants}
    return compete({**contenders, **(others or {})}, {"": expected}, tolerance,
                   Timing(device, seconds, ahead=True), probes=probes, baseline=DEFAULT)  # fmt: skip


@dataclass
class VariantSection(Section):
    """Adds the ``work`` of each part and the ``variants`` to each case."""

    parts: tuple[str, ...] = ("forward", "backward")
    counts: tuple[str, ...] = ("peak",)
    work: dict[str, dict[str, Work]] = field(default_factory=dict)
    variants: dict[str, tuple[Variant, ...]] = field(default_factory=dict)

    def add(
        self, case: str, variants: tuple[Variant, ...], results: dict[str, Result], work: dict[str, Work], nbytes: int
    ) -> None:
        """Adds a case; ``nbytes`` is the size of its tensor."""
        self.cases[case], self.variants[case] = results, variants
        self.work[case], self.tensor_bytes[case] = work, nbytes

    def wrong(self, case: str) -> dict[str, str]:
        """The contenders without times, and the reason for each."""
        return {name: why for name, result in self.cases[case].items() if (why := result.refused or result.missing)}

    def case_to_json(self, case: str) -> dict[str, Any]:
        content = super().case_to_json(case)
        for of in content["contenders"].values():
            for part, work in self.work[case].items():
                if part in of:
                    del of[part]["gb_per_s"]
                    of[part][work.unit] = work.rate(of[part]["median_ms"] / 1e3)
        content["predictions"] = {variant.name: variant.prediction for variant in self.variants[case]}
        return content

    def lines(self) -> list[str]:
        lines = [self.title]
        for case, results in self.cases.items():
            lines += ["", case + self.copied(case), *aligned(self.rows(case))]
            lines += [f"failed: {name}: {result.missing}" for name, result in results.items() if result.missing]
        # Cases of one kind share their variants.
        predictions = dict.fromkeys(f"{v.name}: {v.prediction}" for tried in self.variants.values() for v in tried)
        return [*lines, "", *predictions, *self.refusals()]

    def copy_rate(self, case: str) -> float | None:
        """Bytes that a copy of the case's tensor reads and writes in a second; None if it was not timed."""
        if COPY not in self.cases[case]:
            return None
        return COPY_PASSES * self.tensor_bytes[case] / median(self.cases[case][COPY].forward)

    def copied(self, case: str) -> str:
        rate = self.copy_rate(case)
        seconds = rate and COPY_PASSES * self.tensor_bytes[case] / rate
        return f": a copy takes {1e3 * seconds:.4f} ms, {rate / 1e9:.0f} GB/s" if rate and seconds else ""

    def rows(self, case: str) -> list[list[str]]:
        header = ["medians"]
        for part, work in self.work[case].items():
            header += [f"{part} ms", "p20", "p80", work.unit, *["of copy"] * (work.unit == "GB/s"), "of default"]
        return [header] + [
            [name, *(cell for part in self.work[case] for cell in self.cells(case, name, part))]
            for name in self.cases[case]
            if name != COPY and getattr(self.cases[case][name], self.parts[0])
        ]

    def cells(self, case: str, name: str, part: str) -> list[str]:
        work, results = self.work[case][part], self.cases[case]
        times, default = getattr(results[name], part), getattr(results[DEFAULT], part)
        seconds, copy = median(times), self.copy_rate(case)
        row = [*(f"{ms:.4f}" for ms in spread(times).values()), f"{work.rate(seconds):.0f}"]
        if work.unit == "GB/s":
            row.append(two_digits(copy and work.amount / seconds / copy))
        return [*row, f"{seconds / median(default):.3f}" if default else "-"]
