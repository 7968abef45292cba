"""Launches of the kernels that pack and unpack, for ``tests/tools/codegen.py``."""

import itertools
from functools import partial
from typing import Any

import torch
from fusedseg.kernels.low_bit import low_bit_kink, low_bit_pack, low_bit_unpack

from fusedseg.ops.low_bit.spec import lines_of
from tests.tools.codegen import Access, Kernels

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
SHAPE = (2, 64, 128, 128)


def launch(dtype, rows, bits, has_kink):
    t = torch.empty(SHAPE, dtype=dtype, memory_format=torch.channels_last if rows else torch.contiguous_format)
    kink = torch.empty(SHAPE[1], dtype=torch.promote_types(dtype, torch.float32)) if has_kink else None
    lines, flat = lines_of(t, "batch"), t.as_strided((t.numel(),), (1,))
    if kink is not None:
        low_bit_kink(kink, kink, kink, kink, torch.empty_like(kink))
    packed = low_bit_pack(flat, lines, bits, 1, kink)
    low_bit_unpack(*packed, kink, lines, bits, flat)


def case(dtype, fmt, bits, kink):
    return partial(launch, DTYPES[dtype], fmt == "rows", bits, kink == "kink")


def cases(*choices):
    return {"-".join(map(str, chosen)): case(*chosen) for chosen in itertools.product(*choices)}


CASES = cases(DTYPES, ["planes", "rows"], [8, 4, 2], ["plain", "kink"])
# Every run compiles these.
FEW = cases(["fp16"], ["planes", "rows"], [4], ["kink"])


def accesses(of: dict[str, Any]) -> dict[Access, str]:
    """Codes are a half to a sixteenth as wide as values."""
    kinds = {"low_bit_pack_kernel": "load", "low_bit_unpack_kernel": "store"}
    return {("x_ptr", kind): "16" for kernel, kind in kinds.items() if kernel == of["kernel"]}


KERNELS = Kernels({f"low_bit_{name}_kernel" for name in ("pack", "unpack", "kink")}, accesses)
