"""Cases and variants for the convolution kernel of ``conv_abn`` under other launch constants.

Predictions are for an H200 with 132 multiprocessors at 1.75 GHz.  Each of them gets 19 bytes a cycle from memory
(4.3 TB/s), about 28 from L2 (6.5 TB/s) and 128 from shared memory, and multiplies 2048 numbers of half precision a
cycle.  A step of the 128 x 64 tile covers 64 channels of one tap.  It takes 256 cycles of the tensor cores, 448 of
shared memory, 232 to issue its instructions, and 880 of L2.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..data import DTYPES, memory_format_of
from ..test_conv_abn import Case
from .conv_kernels import TritonJob, flops
from .variants import Variant, Work, applied

CONV, CONV_ABN = "fusedseg.kernels.conv", "fusedseg.kernels.conv_abn"


class Blocks(dict):
    """Stands in for ``conv_blocks``: overrides constants, warps and stages, and derives the grid from them."""

    def __call__(self, M, C, K, groups, dtype, *rest):
        from fusedseg.kernels import conv

        chosen = conv.conv_blocks(M, C, K, groups, dtype, *rest)
        _, device, *_ = rest
        return conv.dealt(M, C, K, groups, device, chosen.meta | self)


def variant(name: str, prediction: str, **values: Any) -> Variant:
    return Variant(name, prediction, {CONV_ABN: {"conv_blocks": Blocks(values)}})


PROGRAMS = Variant(
    "2-programs",
    "One wave of long runs replaces four waves.  There are fewer partial results, but the slowest program decides: "
    "within 2 %.",
    {CONV: {"PROGRAMS_PER_SM": 2}},
)
ROWS_256 = variant(
    "256-rows",
    "Weights are read half as often, so a step reads 20 KB from L2 instead of 24.  But there is one program of 16 "
    "warps, and nothing hides its epilogue: 5 % faster.",
    BLOCK_M=256,
    num_warps=16,
)
FOUR_STAGES = variant("4-stages", "Three stages already cover the latency of L2: no change.", num_stages=4)
CASES = {
    # The loop over channels and taps has one step, so the loop over tiles is pipelined.
    "pointwise": [Case((8, 64, 512, 512), 64, 1, "bf16", rows) for rows in (True, False)],
    "pointwise-deep": [
        Case(shape, out, 1, "bf16", rows)
        for shape, out in (((8, 128, 256, 256), 64), ((8, 512, 64, 64), 256))
        for rows in (True, False)
    ],
    # A row of an image is two or four tiles of 128 positions.
    "images": [Case((8, channels, 512, 512), 64, 3, "bf16", True) for channels in (64, 128)],
    "images-128": [Case((8, 128, 256, 256), 128, 3, "bf16", True)],
    "volumes": [Case((2, 64, 320, 150, 26), 64, 3, "fp16", True)],
}
VARIANTS: dict[str, tuple[Variant, ...]] = {
    "pointwise": (
        variant(
            "64-rows",
            "Four programs of 4 warps replace two of 8.  They load as many bytes ahead in smaller turns: 0 to 5 % "
            "faster.",
            BLOCK_M=64,
            num_warps=4,
        ),
        variant(
            "4-stages",
            "140 registers allow one program, which loads 48 KB ahead instead of 64, and nothing hides its epilogue: "
            "5 % slower.",
            num_stages=4,
        ),
        PROGRAMS,
    ),
    "pointwise-deep": (
        variant(
            "whole-steps",
            "A step has 128 channels.  With 128 channels in all, tiles are pipelined: 5 % faster.  With 512 there "
            "are half as many barriers: no change.",
            BLOCK_C=128,
        ),
        variant(
            "whole-steps-64-rows",
            "As whole-steps, in three programs of 4 warps instead of one of 8.  With 128 channels 10 % faster.  "
            "With 512 a step reads 64 KB from L2 instead of 48: 30 % slower.",
            BLOCK_C=128,
            BLOCK_M=64,
            num_warps=4,
        ),
        variant(
            "128-registers",
            "128 contiguous channels take 149 registers.  With 128 registers, two programs instead of one hide the "
            "latency: 15 % faster.  No change for the others.",
            maxnreg=128,
        ),
        variant(
            "4-stages",
            "With 512 channels the pipeline of 8 steps drains once a tile, and now loads a third more ahead: 3 % "
            "faster.",
            num_stages=4,
        ),
        PROGRAMS,
    ),
    "images": (
        ROWS_256,
        FOUR_STAGES,
        PROGRAMS,
    ),
    # A step of a 128 x 128 tile takes 1170 cycles for 32 KB from L2, and 512 cycles of the tensor cores.
    "images-128": (
        variant(
            "64-channels",
            "124 registers let two programs hide each other's epilogues.  But x is read twice, 48 KB from L2 "
            "instead of 32: 30 % slower.",
            BLOCK_K=64,
        ),
        FOUR_STAGES,
    ),
    "volumes": (ROWS_256, FOUR_STAGES),
}


def work(case: Case) -> Work:
    """The work of a case: the bytes of x and y for a kernel of one tap, the operations for several taps."""
    x, y = (torch.Size((*case.shape[:1], channels, *case.shape[2:])) for channels in (case.shape[1], case.out_channels))
    if case.kernel == 1:
        return Work((x.numel() + y.numel()) * DTYPES[case.dtype].itemsize, "GB/s")
    return Work(flops(*(torch.empty(s, device="meta") for s in (x, case.weight_shape)), case.geometry), "TFLOP/s")


def launch(case: Case, overrides: Any) -> None:
    """Launches a case on CPU tensors that no kernel touches, for ``bench.gpu.precompile``."""
    dtype, memory_format = DTYPES[case.dtype], memory_format_of(len(case.shape), case.channels_last)
    x, w = (torch.empty(s, dtype=dtype, memory_format=memory_format) for s in (case.shape, case.weight_shape))
    with applied(overrides):
        TritonJob(x, w, case.geometry).forward(None)


LAUNCHES: dict[str, Callable[[], None]] = {
    f"{case} {name}": partial(launch, case, overrides)
    for kind, cases in CASES.items()
    for case in cases
    for name, overrides in (("default", {}), *((v.name, v.overrides) for v in VARIANTS[kind]))
}
