"""Launches of the max-pool kernels that are compiled for GPUs: pools of real networks, aligned to 16 bytes."""

import itertools
from functools import partial
from typing import Any

import torch
from fusedseg.kernels.max_pool import max_pool_bwd, max_pool_fwd

from tests.tools.codegen import Access, Kernels

DTYPES = {"fp16": torch.float16, "fp32": torch.float32}
# Shape, window, stride and padding.
POOLS = {
    "unet": ((8, 64, 512, 512), 2, 2, 0),
    "resnet": ((128, 64, 112, 112), 3, 2, 1),
    "volume": ((2, 64, 320, 160, 32), 2, 2, 0),
    "volume-overlapping": ((2, 64, 64, 64, 64), 3, 2, 1),
}


def launch(shape, kernel, stride, padding, dtype, rows):
    dims = len(shape) - 2
    fmt = torch.contiguous_format
    if rows:
        fmt = torch.channels_last if dims == 2 else torch.channels_last_3d
    x = torch.empty(shape, dtype=dtype, memory_format=fmt)
    out = [(n + 2 * padding - kernel) // stride + 1 for n in shape[2:]]
    z = torch.empty(*shape[:2], *out, dtype=dtype, memory_format=fmt)
    codes = torch.empty_like(z, dtype=torch.uint8)
    geometry = ((stride,) * dims, (padding,) * dims, (1,) * dims, 1)
    max_pool_fwd(x, z, codes, rows, (kernel,) * dims, geometry)
    max_pool_bwd(z, codes, x, rows, (kernel,) * dims, geometry)


def case(pool, dtype, fmt):
    return partial(launch, *POOLS[pool], DTYPES[dtype], fmt == "rows")


CASES = {"-".join(names): case(*names) for names in itertools.product(("unet",), DTYPES, ("planes", "rows"))}
# Every other pool is compiled once, in the dtype of training.
others = itertools.product(("resnet", "volume", "volume-overlapping"), ("fp16",), ("planes", "rows"))
CASES |= {"-".join(names): case(*names) for names in others}
# Every run compiles these: separate and overlapping windows, in planes and in rows.
FEW = {name: CASES[name] for name in ("unet-fp16-planes", "unet-fp16-rows", "volume-overlapping-fp16-rows")}


def accesses(of: dict[str, Any]) -> dict[Access, str]:
    """x, z, dz and dx move 16 bytes at a time in rows, and in planes for windows of two columns.

    Codes are half or a quarter as wide.  Other windows in planes read every second element of x, and elements beyond a
    vector of dz, so only stores are wide.
    """
    pool, _, fmt = of["case"].rsplit("-", 2)
    wide = {("z_ptr", "store"), ("dx_ptr", "store")}
    if fmt == "rows" or pool in ("unet", "volume"):
        wide |= {("x_ptr", "load"), ("dz_ptr", "load")}
    if pool == "volume-overlapping" or (pool == "volume" and fmt == "rows"):
        # A thread loads half a vector of dz, the smallest tensor; a whole one would need too many positions of dx.
        wide -= {("dz_ptr", "load")}
    forward = {("x_ptr", "load"), ("z_ptr", "store")}
    return dict.fromkeys(wide & forward if "fwd" in of["kernel"] else wide - forward, "16")


KERNELS = Kernels({"max_pool_fwd_kernel", "max_pool_bwd_kernel"}, accesses)
