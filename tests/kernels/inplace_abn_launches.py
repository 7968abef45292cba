"""Launches of the InPlaceABN kernels, to be compiled for a GPU: shapes of real U-Net stages, aligned to 16 bytes.

``tests.tools.codegen`` reads CASES.  The tensors are never touched, so their size costs nothing.
"""

import itertools
from functools import partial

import torch
from fusedseg.kernels.inplace_abn import inplace_abn_bwd, inplace_abn_fwd

from fusedseg.ops.layout import layout_of

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
FORMATS = {"planes": torch.contiguous_format, "rows": torch.channels_last}
# 4 GiB in fp32: offsets and the tensors' sizes need 64 bits, as compilers see by the arguments
SHAPES = {"split": (8, 64, 512, 512), "huge": (16, 64, 1024, 1024), "onchip": (4, 512, 16, 16)}


def launch(shape, dtype, memory_format, act=("leaky_relu", 0.01), training=True, kept=False):
    x = torch.empty(shape, dtype=dtype, memory_format=memory_format)
    C = shape[1]
    weight, bias, mean, var = torch.ones(4, C)
    slots = (torch.full((C,), -1, dtype=torch.int32), 1) if kept else None
    layout = layout_of(x)
    *_, rstd, xhat = inplace_abn_fwd(x, x, layout, weight, bias, mean, var, training, 0.1, 1e-5, act, slots)
    inplace_abn_bwd(x, x, layout, weight, bias, rstd, xhat, slots, training, act, torch.float32)


def case(shape, dtype, fmt, **options):
    return partial(launch, SHAPES[shape], DTYPES[dtype], FORMATS[fmt], **options)


CASES = {"-".join(names): case(*names) for names in itertools.product(("split", "onchip"), DTYPES, FORMATS)}
# the rest once each, in the dtype of training
CASES |= {f"huge-fp16-{fmt}": case("huge", "fp16", fmt) for fmt in FORMATS}
CASES |= {f"kept-fp16-{fmt}": case("split", "fp16", fmt, kept=True) for fmt in FORMATS}
CASES |= {f"elu-fp16-{fmt}": case("split", "fp16", fmt, act=("elu", 1.0)) for fmt in FORMATS}
CASES |= {f"eval-fp16-{fmt}": case("split", "fp16", fmt, training=False) for fmt in FORMATS}
