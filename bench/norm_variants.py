"""Kernels of a norm and its activation under other launch constants: cases, jobs and the variants that compete."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fusedseg.ops.layout

from .contenders import SLOPE
from .data import DTYPES, memory_format_of
from .norm_layers import NormCase
from .variants import Variant, Work, applied

ACT = ("leaky_relu", SLOPE)
LAUNCH, FORWARD, BACKWARD = (f"fusedseg.kernels.{name}" for name in ("launch", "norm_act", "norm_act_bwd"))

LARGE = [
    NormCase("batch", (8, 64, 512, 512), "bf16"),
    NormCase("batch", (8, 64, 512, 512), "bf16", True),
]
SMALL = [
    NormCase("batch", (8, 64, 16, 16), "bf16"),
    NormCase("batch", (8, 64, 16, 16), "bf16", True),
]

VARIANTS: dict[str, tuple[Variant, ...]] = {
    "large": (
        Variant(
            "8-programs",
            "twice as many programs a multiprocessor: the same bytes in flight once all are resident; no change",
            {LAUNCH: {"PROGRAMS_PER_SM": 8}},
        ),
    ),
    "small": (),
}
CASES = {"large": LARGE, "small": SMALL}


class KernelJob:
    """Forward and backward launches of a norm that stores its output, without autograd."""

    def __init__(self, case: NormCase, data: dict[str, Tensor]) -> None:
        self.x, self.dz, self.weight, self.bias = (data[name].detach() for name in ("x", "dz", "weight", "bias"))
        layout = fusedseg.ops.layout.layout_of(self.x)
        assert layout is not None
        self.layout = layout.by_sample(case.shape[0], case.groups)
        self.rstd: Tensor | None = None

    def prepare(self) -> Tensor:
        return self.x.clone()

    def forward(self, prepared: Tensor) -> Tensor:
        from fusedseg.kernels.norm_act import norm_act_fwd

        affine = self.weight, self.bias
        _, self.rstd, _ = norm_act_fwd(prepared, prepared, self.layout, *affine, None, None, True, 0.1, 1e-5, ACT, None)
        return prepared

    def backward(self, out: Tensor) -> tuple[Tensor, ...]:
        from fusedseg.kernels.norm_act_bwd import norm_act_bwd

        return norm_act_bwd(
            self.dz, out, self.layout, self.weight, self.bias, self.rstd, None, None, True, ACT, torch.float32
        )  # fmt: skip

    def results(self, out: Tensor, grads: tuple[Tensor, ...]) -> dict[str, Tensor]:
        return {"z": out, **dict(zip(("dx", "dweight", "dbias"), grads, strict=True))}

    def owned(self) -> list[Tensor]:
        return [self.weight, self.bias, self.dz]


def nbytes(case: NormCase) -> int:
    return torch.Size(case.shape).numel() * DTYPES[case.dtype].itemsize


def work(case: NormCase, kind: str) -> dict[str, Work]:
    """Bytes of the passes that it takes (section 6 of the design): a slab that fits on chip is read once."""
    forward, backward = (2, 3) if kind == "small" else (3, 5)
    return {"forward": Work(forward * nbytes(case), "GB/s"), "backward": Work(backward * nbytes(case), "GB/s")}


def launch(case: NormCase, overrides: Any) -> None:
    """Both launches on tensors that nobody touches, for ``bench.precompile``."""
    memory_format = memory_format_of(len(case.shape), case.channels_last)
    x = torch.empty(case.shape, dtype=DTYPES[case.dtype], memory_format=memory_format)
    job = KernelJob(case, {"x": x, "dz": x, **dict.fromkeys(("weight", "bias"), torch.empty(case.shape[1]))})
    with applied(overrides):
        job.backward(job.forward(x))


LAUNCHES: dict[str, Callable[[], None]] = {
    f"{case} {name}": partial(launch, case, overrides)
    for kind, cases in CASES.items()
    for case in cases
    for name, overrides in (("default", {}), *((v.name, v.overrides) for v in VARIANTS[kind]))
}
