"""Launches of the upsampling kernels that are compiled for GPUs: decoders of real networks, aligned to 16 bytes."""

import itertools
from functools import partial
from typing import Any

import torch

from fusedseg.ops.upsample import Linear, _readable
from tests.tools.codegen import Access, Kernels
from tests.tools.tensors import empty

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
# Shape, enlarged size, and whether corners are aligned.
MAPS = {
    "image": ((8, 128, 256, 256), (512, 512), False),
    "deep": ((8, 1024, 32, 32), (64, 64), False),
    "corners": ((8, 128, 256, 256), (512, 512), True),
    "volume": ((2, 64, 64, 64, 64), (128, 128, 128), False),
    "volume-corners": ((2, 64, 64, 64, 64), (128, 128, 128), True),
    "by-8": ((8, 16, 64, 64), (512, 512), False),
}


def launch(shape, size, corners, dtype, rows):
    from fusedseg.kernels.upsample import upsample_bwd, upsample_fwd

    x, y = (empty((*shape[:2], *of), dtype, rows) for of in (shape[2:], size))
    axes, pitches = Linear(size, None, corners).axes(shape[2:]), _readable(x, y)[1]
    upsample_fwd(x, y, axes, pitches)
    upsample_bwd(y, x, axes, pitches)


def case(name, dtype, fmt):
    return partial(launch, *MAPS[name], DTYPES[dtype], fmt == "rows")


CASES = {"-".join(names): case(*names) for names in itertools.product(MAPS, ("fp16",), ("planes", "rows"))}
CASES |= {
    "-".join(names): case(*names) for names in itertools.product(("image",), ("bf16", "fp32"), ("planes", "rows"))
}
# Every run compiles these.
FEW = {
    name: CASES[name]
    for name in ("image-fp16-planes", "image-fp16-rows", "corners-fp16-rows", "volume-fp16-planes", "volume-fp16-rows")
}


def accesses(of: dict[str, Any]) -> dict[Access, str]:
    """Rows move 16 bytes at a time.  Planes store 16 bytes in forward and 8 in backward, and read single values."""
    rows, forward = of["case"].endswith("rows"), "fwd" in of["kernel"]
    read, written = ("x_ptr", "y_ptr") if forward else ("dy_ptr", "dx_ptr")
    return {(written, "store"): "16" if rows or forward else "8"} | ({(read, "load"): "16"} if rows else {})


# Four programs of 128 threads are resident at least.
KERNELS = Kernels({"upsample_fwd_kernel", "upsample_bwd_kernel"}, accesses, 128)
