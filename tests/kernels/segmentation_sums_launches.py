"""Launches of the kernels of segmentation losses that are compiled for GPUs, aligned to 16 bytes."""

import itertools
from functools import partial
from typing import Any

import torch
from fusedseg.kernels.segmentation_sums import segmentation_sums_bwd, segmentation_sums_fwd

from fusedseg.ops.segmentation.spec import SumsSpec, sizes_of
from tests.tools.codegen import Access, Kernels

DTYPES = {"fp16": torch.float16, "fp32": torch.float32}
# The loss: its spec, and the dtype of its target.
LOSSES = {
    "dice_ce": (SumsSpec("softmax", "softmax"), torch.int16),
    "dice_ce_ignore": (SumsSpec("softmax", "smoothed", ignore=255), torch.uint8),
    "ce": (SumsSpec("none", "softmax", ignore=-100), torch.int64),
    "regions": (SumsSpec("sigmoid", "sigmoid", dense=True), torch.bool),
    "soft": (SumsSpec("softmax", "smoothed", minimum=True, dense=True), torch.float32),
    "squared": (SumsSpec("softmax", "softmax", squared=True), torch.int16),
    "focal": (SumsSpec("softmax", "softmax", gamma=2.0), torch.int16),
    "focal_sigmoid": (SumsSpec("softmax", "sigmoid", gamma=2.0), torch.int16),
}
SPATIAL = (128, 128, 128)


def launch(loss, K, dtype, rows):
    spec, target_dtype = LOSSES[loss]
    fmt = torch.channels_last_3d if rows else torch.contiguous_format
    x = torch.empty((2, K, *SPATIAL), dtype=dtype, memory_format=fmt)
    target = torch.empty((2, K if spec.dense else 1, *SPATIAL), dtype=target_dtype)
    if spec.dense and rows:
        target = target.to(memory_format=fmt)
    sums = torch.empty(5, 2, K)
    segmentation_sums_fwd(x, target, None, sizes_of(x), spec)
    segmentation_sums_bwd(sums, x, target, None, x, sizes_of(x), spec)


def case(loss, K, dtype, fmt):
    return partial(launch, loss, K, DTYPES[dtype], fmt == "rows")


def cases(losses, classes, dtypes, formats):
    return {
        f"{loss}-{K}-{dtype}-{fmt}": case(loss, K, dtype, fmt)
        for loss, K, dtype, fmt in itertools.product(losses, classes, dtypes, formats)
    }


CASES = cases(["dice_ce"], [2, 3, 4, 8, 14, 16, 50, 64, 118, 128, 256], DTYPES, ["planes"])
CASES |= cases(["dice_ce"], [8, 16, 64, 128, 256], DTYPES, ["rows"])
CASES |= cases(LOSSES, [14, 118, 512], ["fp16"], ["planes"])
# Every run compiles these.
FEW = {name: CASES[name] for name in ("dice_ce-3-fp16-planes", "dice_ce-118-fp16-planes", "dice_ce-16-fp16-rows")}
# The number of classes is no multiple of 8, and channels are adjacent: no access is wide.
NARROW = cases(["dice_ce"], [3, 105, 118], ["fp16"], ["rows"])


def accesses(of: dict[str, Any]) -> dict[Access, str]:
    """In planes and in rows of a multiple of 8 classes."""
    found = of["accesses"].keys() & {"x_ptr", "dx_ptr"}
    return {(name, "load" if name == "x_ptr" else "store"): "16" for name in found}


KERNELS = Kernels({"segmentation_sums_fwd_kernel", "segmentation_sums_bwd_kernel"}, accesses)
