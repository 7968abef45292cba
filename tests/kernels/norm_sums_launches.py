"""Launches of the kernel that makes statistics of sums, which are compiled for GPUs, aligned to 16 bytes."""

from functools import partial
from typing import Any

import torch
from fusedseg.kernels.norm_sums import norm_of_sums

from fusedseg.ops.layout import FORMATS, layout_of
from tests.tools.codegen import Access, Kernels


def launch(shape, dtype, of_samples=False):
    y = torch.empty(shape, dtype=dtype, memory_format=FORMATS[len(shape)])
    layout = layout_of(y)
    layout = layout.by_sample(shape[0], shape[1]) if of_samples else layout
    wide = torch.promote_types(dtype, torch.float32)
    running = (None, None) if of_samples else (torch.empty(shape[1]), torch.empty(shape[1]))
    norm_of_sums(y, torch.empty(2, layout.I * layout.C, dtype=wide), layout, *running, momentum=0.1, eps=1e-5, far=64.0)


CASES = {
    "image-bf16": partial(launch, (8, 64, 512, 512), torch.bfloat16),
    "wide-bf16": partial(launch, (128, 2048, 7, 7), torch.bfloat16),
    "volume-fp16": partial(launch, (2, 32, 128, 128, 128), torch.float16, True),
    "fp64": partial(launch, (8, 64, 64, 64), torch.float64),
}
FEW = {name: CASES[name] for name in ("image-bf16", "volume-fp16")}


def accesses(of: dict[str, Any]) -> dict[Access, str]:
    return {("y_ptr", "load"): "16"}


KERNELS = Kernels({"norm_of_sums_kernel"}, accesses)
