"""Cases, jobs and variants for the kernels of a norm and its activation under other launch constants."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fusedseg.ops.layout

from ..contenders import SLOPE
from ..data import DTYPES, memory_format_of
from ..norm_layers import NormCase
from .variants import Variant, Work, applied

ACT = ("leaky_relu", SLOPE)
LAUNCH, STATS, FORWARD, BACKWARD = (
    f"fusedseg.kernels.{name}" for name in ("launch", "norm_stats", "norm_act", "norm_act_bwd")
)

CASES = {
    # Several programs share a channel, in two launches or three.
    "split": [
        NormCase("batch", (8, 64, 512, 512), "bf16"),
        NormCase("batch", (8, 64, 512, 512), "bf16", True),
        NormCase("batch", (8, 256, 128, 128), "bf16"),
        NormCase("batch", (8, 256, 128, 128), "bf16", True),
        NormCase("instance", (2, 32, 128, 128, 128), "fp16"),
        NormCase("instance", (2, 32, 128, 128, 128), "fp16", True),
    ],
    # The slab of a program fits on chip, or nearly so.
    "slab": [
        NormCase("batch", (8, 1024, 32, 32), "bf16"),
        NormCase("batch", (8, 1024, 32, 32), "bf16", True),
        NormCase("batch", (8, 64, 16, 16), "bf16"),
        NormCase("batch", (8, 64, 16, 16), "bf16", True),
    ],
}
# Predictions are for an H200.  Its 132 multiprocessors move 33 GB/s each if all together reach 4.3 TB/s.  A load takes
# 0.8 us, so at least 26 KB must be under way in each multiprocessor.
VARIANTS: dict[str, tuple[Variant, ...]] = {
    "split": (
        Variant(
            "2-programs",
            "Half as many bytes are under way, 32 KB in the reductions of forward and of backward: 0 to 10 % slower.",
            {LAUNCH: {"PROGRAMS_PER_SM": 2, "ROWS_PER_SM": 2}},
        ),
        Variant(
            "6-programs",
            "Registers let 3 programs of rows be resident, and 4 to 8 of planes.  Rows take a second wave that "
            "does not fill the GPU: 15 to 30 % slower.  Planes have 32 registers in the apply kernels: within 3 %.",
            {LAUNCH: {"PROGRAMS_PER_SM": 6, "ROWS_PER_SM": 6}},
        ),
        Variant(
            "stats-8-KiB",
            "Two loads are under way instead of four, and an element takes 10 instructions instead of 7, of the "
            "13.7 that the machine issues meanwhile: forward 3 to 6 % slower.",
            {LAUNCH: {"STATS_TILE_BYTES": 8192}},
        ),
        Variant(
            "16-KiB",
            "Four loads of each tensor are under way, which takes more registers.  Backward of planes 2 % faster; "
            "of rows slower, because fewer programs are resident.",
            {LAUNCH: {"TILE_BYTES": 16384}},
        ),
        Variant(
            "512-threads",
            "A thread makes one load of each tensor.  It takes fewer registers, and as many bytes are under way: "
            "within 3 %.",
            {LAUNCH: {"THREADS": 512, "PROGRAMS_PER_SM": 2, "ROWS_PER_SM": 2}},
        ),
        Variant(
            "2-stages",
            "The next tile is copied to shared memory while this one is computed: reductions 0 to 5 % faster.  The "
            "apply kernels are slower, because their data passes through shared memory.",
            {LAUNCH: {"STAGES": 2}},
        ),
        Variant(
            "3-stages",
            "Two tiles are copied ahead: as fast as 2-stages.",
            {LAUNCH: {"STAGES": 3}},
        ),
        Variant(
            "evict",
            "The first pass's input stays in L2, and the output does not take its place.  Of 256 MiB some 40 MB stay: "
            "forward 4 %, backward 2 % faster.  At 64 MiB 10 % faster.",
            {LAUNCH: {"FIRST_PASS_EVICTION": "evict_last", "OUTPUT_EVICTION": "evict_first"}},
        ),
        Variant(
            "output-evict-first",
            "Half of what evict gives, and no lines stay in L2 past the layer.",
            {LAUNCH: {"OUTPUT_EVICTION": "evict_first"}},
        ),
        Variant(
            "rows-256-bytes",
            "Runs in memory are longer where there are over 64 channels (rows of 256: 2 % faster); otherwise no "
            "change.",
            {LAUNCH: {"ROW_BYTES": 256}},
        ),
    ),
    "slab": (
        Variant(
            "slab-8-a-thread",
            "More threads have fewer registers each: 5 % faster where programs are few, slower where they are many.",
            {LAUNCH: {"PER_THREAD": 8}},
        ),
        Variant(
            "slab-32-a-thread",
            "Half as many threads: more programs of 16 KB slabs are resident, so 1024 planes are 5 % faster.  Small"
            " tensors are slower.",
            {LAUNCH: {"PER_THREAD": 32}},
        ),
        Variant(
            "no-slabs",
            "Planes take two launches: 2 us longer for small tensors; 20 % longer at 16 MiB, which L2 holds.",
            {FORWARD: {"ONCHIP_FWD": 0}, BACKWARD: {"ONCHIP_BWD": 0}},
        ),
        Variant(
            "merging-launch",
            "Rows take three launches, and each of them fills the GPU: 2 us longer.",
            {LAUNCH: {"FEW_BYTES": 0}},
        ),
        Variant(
            "32-partials",
            "At 16 MiB the reduction has twice as many programs without a third launch: rows 5 % faster.",
            {LAUNCH: {"MAX_PARTIALS": 32}, STATS: {"MAX_PARTIALS": 32}},
        ),
    ),
}


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

        _, self.rstd, _ = norm_act_fwd(
            prepared, prepared, self.layout, weight=self.weight, bias=self.bias, running_mean=None, running_var=None,
            training=True, momentum=0.1, eps=1e-5, act=ACT, kept=None,
        )  # fmt: skip
        return prepared

    def backward(self, out: Tensor) -> tuple[Tensor, ...]:
        from fusedseg.kernels.norm_act_bwd import norm_act_bwd

        return norm_act_bwd(
            self.dz, out, self.layout, weight=self.weight, bias=self.bias, rstd=self.rstd, xhat_kept=None, kept=None,
            training=True, act=ACT, dparam_dtype=torch.float32,
        )  # fmt: skip

    def results(self, out: Tensor, grads: tuple[Tensor, ...]) -> dict[str, Tensor]:
        return {"z": out, **dict(zip(("dx", "dweight", "dbias"), grads, strict=True))}

    def owned(self) -> list[Tensor]:
        return [self.weight, self.bias, self.dz]


def nbytes(case: NormCase) -> int:
    return torch.Size(case.shape).numel() * DTYPES[case.dtype].itemsize


def work(case: NormCase, kind: str) -> dict[str, Work]:
    """Bytes of the passes that it takes: a tensor that fits on chip, or in L2, is read once.

    "Passes over memory" in docs/design.md has the numbers of passes.
    """
    forward, backward = (2, 3) if kind == "slab" else (3, 5)
    return {"forward": Work(forward * nbytes(case), "GB/s"), "backward": Work(backward * nbytes(case), "GB/s")}


def launch(case: NormCase, overrides: Any) -> None:
    """Launches both directions on CPU tensors that no kernel touches, for ``bench.gpu.precompile``."""
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
