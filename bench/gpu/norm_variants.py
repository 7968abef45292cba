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
# 0.8 us, so that at least 26 KB must be under way in each multiprocessor.
VARIANTS: dict[str, tuple[Variant, ...]] = {
    "split": (
        Variant(
            "2-programs",
            "half the bytes under way: reductions of forward 32 KB, of backward 32 KB; 0 to 10 % slower",
            {LAUNCH: {"PROGRAMS_PER_SM": 2, "ROWS_PER_SM": 2}},
        ),
        Variant(
            "6-programs",
            "more than are resident by registers (rows 3, planes 4 to 8): rows 15 to 30 % slower by a second wave that "
            "does not fill the GPU; planes within 3 %, apply kernels having 32 registers",
            {LAUNCH: {"PROGRAMS_PER_SM": 6, "ROWS_PER_SM": 6}},
        ),
        Variant(
            "stats-8-KiB",
            "two loads under way instead of four and 10 instructions an element instead of 7, of 13.7 that the machine "
            "issues meanwhile: forward 3 to 6 % slower",
            {LAUNCH: {"STATS_TILE_BYTES": 8192}},
        ),
        Variant(
            "16-KiB",
            "four loads of each tensor under way, at more registers: backward of planes 2 % faster, of rows slower, "
            "since fewer programs are resident",
            {LAUNCH: {"TILE_BYTES": 16384}},
        ),
        Variant(
            "512-threads",
            "one load of each tensor a thread, fewer registers, the same bytes under way: within 3 %",
            {LAUNCH: {"THREADS": 512, "PROGRAMS_PER_SM": 2, "ROWS_PER_SM": 2}},
        ),
        Variant(
            "2-stages",
            "the next tile is copied to shared memory while this one is computed: reductions 0 to 5 % faster; apply "
            "kernels slower by the way through shared memory",
            {LAUNCH: {"STAGES": 2}},
        ),
        Variant(
            "3-stages",
            "two tiles ahead: as 2-stages, no more",
            {LAUNCH: {"STAGES": 3}},
        ),
        Variant(
            "evict",
            "the first pass's input stays in L2 and the output does not take its place: at 256 MiB, of which some "
            "40 MB stay, forward 4 %, backward 2 % faster; at 64 MiB 10 %",
            {LAUNCH: {"FIRST_PASS_EVICTION": "evict_last", "OUTPUT_EVICTION": "evict_first"}},
        ),
        Variant(
            "output-evict-first",
            "half of what evict gives, without lines that stay past the layer",
            {LAUNCH: {"OUTPUT_EVICTION": "evict_first"}},
        ),
        Variant(
            "rows-256-bytes",
            "longer runs in memory where there are over 64 channels (rows of 256: 2 % faster); otherwise the same",
            {LAUNCH: {"ROW_BYTES": 256}},
        ),
    ),
    "slab": (
        Variant(
            "slab-8-a-thread",
            "more threads for fewer registers each: shorter by 5 % where programs are few, longer where they are many",
            {LAUNCH: {"PER_THREAD": 8}},
        ),
        Variant(
            "slab-32-a-thread",
            "half the threads: more programs resident of 16 KB slabs, 5 % faster at 1024 planes; small T slower",
            {LAUNCH: {"PER_THREAD": 32}},
        ),
        Variant(
            "no-slabs",
            "planes in two launches: 2 us longer at small T; at 16 MiB, which L2 holds, 20 % longer",
            {FORWARD: {"ONCHIP_FWD": 0}, BACKWARD: {"ONCHIP_BWD": 0}},
        ),
        Variant(
            "merging-launch",
            "rows in three launches, each of them filling the GPU: 2 us longer",
            {LAUNCH: {"FEW_BYTES": 0}},
        ),
        Variant(
            "32-partials",
            "at 16 MiB twice as many programs of the reduction without a third launch: rows 5 % faster",
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
