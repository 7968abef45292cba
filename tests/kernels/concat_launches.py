"""Launches of the concatenation kernel that are compiled for GPUs: those of real networks, aligned to 16 bytes."""

from functools import partial
from typing import Any

import torch
from fusedseg.kernels.concat import concat

from tests.tools.codegen import Access, Kernels


def launch(size, channels, dtype, gap=0):
    memory_format = torch.channels_last if len(size) == 3 else torch.channels_last_3d
    images = [torch.empty(size[0], C + gap, *size[1:], dtype=dtype, memory_format=memory_format) for C in channels]
    y = torch.empty(size[0], sum(channels), *size[1:], dtype=dtype, memory_format=memory_format)
    pitches = [C + gap for C in channels]
    concat([x[:, :C] for x, C in zip(images, channels, strict=True)], pitches, y, sum(channels))


CASES = {
    "unet-fp16": partial(launch, (8, 512, 512), (64, 64), torch.float16),
    "unet-fp32": partial(launch, (8, 512, 512), (64, 64), torch.float32),
    "volume-fp16": partial(launch, (2, 128, 128, 128), (32, 32), torch.float16),
    "dense-slice-fp16": partial(launch, (2, 128, 128, 128), (32,), torch.float16, 32),
    "nested-fp16": partial(launch, (8, 256, 256), (64, 64, 64, 128), torch.float16),
    "deep-fp16": partial(launch, (8, 32, 32), (320, 320), torch.float16),
    "eighths-fp16": partial(launch, (8, 256, 256), (24, 40), torch.float16),
}
FEW = {name: CASES[name] for name in ("volume-fp16", "dense-slice-fp16", "eighths-fp16")}


def accesses(of: dict[str, Any]) -> dict[Access, str]:
    sources = {(f"x{k}_ptr", "load"): "16" for k in range(4) if f"x{k}_ptr" in of["accesses"]}
    return {("y_ptr", "store"): "16"} | sources


KERNELS = Kernels({"concat_kernel"}, accesses)
