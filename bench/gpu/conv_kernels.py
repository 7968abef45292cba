"""Jobs and table for the convolution of ``conv_abn`` alone, with the statistics of its output.

Triton's kernel computes the statistics in its epilogue.  Its rival is the vendor's convolution, followed by the
statistics kernel of ``norm_act``.  Triton's kernel may be slower than the vendor's convolution by as much as that
second kernel takes: with r = vendor / (vendor + statistics), in seconds, it wins above r times the vendor's TFLOP/s.
"""

from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedseg.ops.conv import choice, conv_abn
from fusedseg.ops.conv.convolution import Geometry, convolve, output_format
from fusedseg.ops.layout import Layout, layout_of

from ..harness import Result
from ..results import Section, aligned, summary, timed, two_digits

VENDOR, VENDOR_STATS, TRITON = "vendor", "vendor+statistics", "triton"


class KernelJob:
    """The vendor's convolution, y = conv(x, w)."""

    def __init__(self, x: Tensor, w: Tensor, geometry: Geometry) -> None:
        self.x, self.w, self.geometry = x.detach(), w.detach(), geometry
        # (count, mean, M2) of each part of y, as one tensor of shape (3, parts, K)
        self.partial: Tensor | None = None

    def prepare(self) -> None:
        pass

    def forward(self, prepared: None) -> Tensor:
        return convolve(self.x, self.w, None, self.geometry)

    def backward(self, out: Tensor) -> tuple[Tensor, ...]:
        return ()

    def results(self, out: Tensor, grads: tuple[Tensor, ...]) -> dict[str, Tensor]:
        if self.partial is None:
            return {"y": out}
        mean, var = merged(self.partial)
        return {"y": out, "mean": mean, "var": var}

    def owned(self) -> list[Tensor]:
        return [self.x, self.w]


class VendorStatsJob(KernelJob):
    """The vendor's convolution, then the first of the two launches that ``norm_act_fwd`` makes for a large tensor."""

    def forward(self, prepared: None) -> Tensor:
        from fusedseg.kernels.norm_stats import norm_stats

        y = super().forward(prepared)
        with torch.cuda.device_of(y):
            self.partial = norm_stats(y, layout_of_dense(y))
        return y


class TritonJob(KernelJob):
    """Our convolution kernel, which computes the statistics in its epilogue."""

    def forward(self, prepared: None) -> Tensor:
        from fusedseg.kernels.conv_abn import launch_conv

        x, w, geometry = self.x, self.w, self.geometry
        shape = geometry.output_shape(x.shape, w.shape)
        y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=output_format(x, w))
        tf32 = x.dtype == torch.float32 and choice.tf32_allowed()
        with torch.cuda.device_of(x):
            self.partial = launch_conv(
                x, w, y, layout_of_dense(x), layout_of_dense(y), geometry, "stats", tf32
            )  # fmt: skip
        return y


# The vendor's convolution comes first: the other kernels may round as much as it does.
KERNELS = {VENDOR: KernelJob, VENDOR_STATS: VendorStatsJob, TRITON: TritonJob}


def layout_of_dense(t: Tensor) -> Layout:
    layout = layout_of(t)
    assert layout is not None
    return layout


def merged(partial: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of all of y, merged from its parts."""
    count, mean, m2 = partial.double()
    n = count.sum(0)
    whole = (count * mean).sum(0) / n
    return whole, (m2 + count * (mean - whole).square()).sum(0) / n


class Choice(NamedTuple):
    """The backend that "auto" chooses in training; ``why`` says whether a rule or a measurement decided."""

    name: str
    why: str


def choice_of(x: Tensor, w: Tensor, geometry: Geometry) -> Choice:
    """The choice of "auto" for a convolution.  A training step must have run before, in which "auto" measures both."""
    if not choice.could_win(x, layout_of(x), w, geometry):
        return Choice("aten", "rule")

    def not_measured(name: str) -> Tensor:
        raise RuntimeError(f"{tuple(x.shape)} by {tuple(w.shape)} was not measured before")

    shape = geometry.output_shape(x.shape, w.shape)
    positions = shape.numel() // shape[1]
    name = choice.choose(conv_abn.OP, "auto", x, w, geometry, True, positions, not_measured)
    return Choice(name, "measured")


def flops(x: Tensor, w: Tensor, geometry: Geometry) -> int:
    """Counts a multiplication and an addition for each output element and weight of its channel, padding included."""
    return 2 * geometry.output_shape(x.shape, w.shape).numel() * w[0].numel()


@dataclass
class KernelSection(Section):
    """Adds each case's floating-point operations and the choice of "auto" to the times."""

    parts: tuple[str, ...] = ("forward",)
    counts: tuple[str, ...] = ()
    flops: dict[str, int] = field(default_factory=dict)
    choices: dict[str, Choice] = field(default_factory=dict)

    def case_to_json(self, case: str) -> dict[str, Any]:
        judged = self.judged()
        return {
            **super().case_to_json(case),
            "flops": self.flops[case],
            **({"tflops": tera(self.flops[case], judged[case])} if case in judged else {}),
            "auto": self.choices[case]._asdict(),
        }

    def judged(self) -> dict[str, dict[str, Result]]:
        return {case: r for case, r in self.cases.items() if all(timed(r, name) for name in KERNELS)}

    def lines(self) -> list[str]:
        rows: list[list[str]] = []
        ratios: list[list[float | None]] = []
        for case, results in self.judged().items():
            vendor, both, triton = (self.whole(results[name]) for name in KERNELS)
            tflops = tera(self.flops[case], results)
            numbers: list[float | None] = [triton / both]
            ratios.append(numbers)
            rows.append(
                [
                    case,
                    f"{self.flops[case] / 1e9:.1f}",
                    *(f"{1e3 * seconds:.3f}" for seconds in (vendor, both, triton)),
                    *(f"{tflops[name]:.0f}" for name in (VENDOR, TRITON)),
                    two_digits(vendor / triton),
                    two_digits(vendor / both),
                    *map(two_digits, numbers),
                    *self.choices[case],
                ]
            )
        header = ["medians", "GFLOP", "vendor ms", "+ statistics", "triton ms", "vendor TFLOP/s", "triton TFLOP/s"]
        header += ["speed: triton/vendor", "breaks even", "time: triton/(vendor + statistics)", "auto", "by"]
        return [self.title, *aligned([header, *rows, *summary(ratios, before=8, after=2)]), *self.refusals()]


def tera(operations: int, results: dict[str, Result]) -> dict[str, float]:
    """TFLOP/s of the convolution.  The time of Triton's kernel includes its statistics."""
    return {name: operations / median(results[name].forward) / 1e12 for name in (VENDOR, TRITON)}
