"""Launches of the convolution with BatchNorm that are compiled for GPUs: the convolutions of real U-Nets."""

from functools import partial

import torch
from fusedseg.kernels.conv_abn import launch_conv

from fusedseg.ops.layout import layout_of
from tests.kernels.conv_abn_cases import Conv
from tests.tools.tensors import empty

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
# A batch has 8 images, or 2 volumes.
CONVS = {
    "3x3-3-64": Conv((8, 3, 256, 256), (64, 3, 3, 3), padding=1),
    "3x3-5-64": Conv((8, 5, 256, 256), (64, 5, 3, 3), padding=1),
    "3x3-64-64": Conv((8, 64, 256, 256), (64, 64, 3, 3), padding=1),
    "3x3-128-128": Conv((8, 128, 128, 128), (128, 128, 3, 3), padding=1),
    "3x3-512-512": Conv((8, 512, 32, 32), (512, 512, 3, 3), padding=1),
    "3x3-1024-1024": Conv((8, 1024, 16, 16), (1024, 1024, 3, 3), padding=1),
    "1x1-2048-1024": Conv((8, 2048, 32, 32), (1024, 2048, 1, 1)),
    "1x1-128-3": Conv((8, 128, 256, 256), (3, 128, 1, 1)),
    "1x1-64-64": Conv((8, 64, 256, 256), (64, 64, 1, 1)),
    "3x3x3-64-64": Conv((2, 64, 320, 150, 26), (64, 64, 3, 3, 3), padding=1),
    "3x3x3-256-256": Conv((2, 256, 80, 37, 6), (256, 256, 3, 3, 3), padding=1),
    "3x3x3-512-512": Conv((2, 512, 40, 18, 3), (512, 512, 3, 3, 3), padding=1),
    "1x1x1-64-5": Conv((2, 64, 320, 150, 26), (5, 64, 1, 1, 1)),
}
# Offsets in a sample need 64 bits; sizes of 1 are constants for the compiler.
HUGE = Conv((1, 64, 512, 512, 256), (64, 64, 3, 3, 3), padding=1)
TINY = Conv((8, 64, 1, 1), (64, 64, 3, 3), padding=1)


def launch(conv, dtype, rows=True, epilogue="stats", tf32=True):
    K = conv.w[0]
    x, w, out = (empty(shape, dtype, rows) for shape in (conv.x, conv.w, conv.out))
    norm = torch.ones(5, K).unbind()
    affine = {"conv_bias": torch.ones(K), "norm": norm, "eps": 1e-5, "act": ("leaky_relu", 0.01)}
    # The op asks for TF32 of fp32 tensors alone.
    tf32 = tf32 and dtype == torch.float32
    launch_conv(
        x, w, out, layout_of(x), layout_of(out), conv.geometry, epilogue, tf32, **affine if epilogue == "norm" else {}
    )


def case(name, dtype, *options, rows=True):
    return partial(launch, CONVS[name], DTYPES[dtype], rows, *options)


CASES = {
    f"{name}-fp16": case(name, "fp16")
    for name in ("3x3-5-64", "3x3-64-64", "3x3-512-512", "3x3-1024-1024", "1x1-2048-1024", "1x1-128-3", "3x3x3-64-64")
}
CASES |= {
    "3x3-128-128-bf16": case("3x3-128-128", "bf16"),
    "3x3-64-64-fp16-norm": case("3x3-64-64", "fp16", "norm"),
    "3x3-64-64-tf32": case("3x3-64-64", "fp32"),
    "3x3-64-64-fp32": case("3x3-64-64", "fp32", "stats", False),
    "1x1-64-64-fp16-planes": case("1x1-64-64", "fp16", rows=False),
}
# One or several taps, half precision or tf32, training or inference, and planes: every run compiles these.
FEW = {
    name: CASES[name]
    for name in ("3x3-64-64-fp16", "1x1-128-3-fp16", "3x3-64-64-fp16-norm", "3x3-64-64-tf32", "1x1-64-64-fp16-planes")
}
# Of AMD's GPUs, only gfx942 has TF32.
WITHOUT_TF32 = {name: case for name, case in FEW.items() if "tf32" not in name}
# Both kinds of products.
FEWER = {name: CASES[name] for name in ("3x3-64-64-fp16", "3x3-64-64-tf32")}
# The launch that needs the most shared memory: 128 output channels, and rows of 64 input channels.
MOST = {"3x3-512-512-fp16": CASES["3x3-512-512-fp16"]}
# All convolutions of the networks, in training and inference, and one in bf16, whose code is that of fp16.
MORE = {"3x3-128-128-bf16": CASES["3x3-128-128-bf16"]}
for epilogue in ("stats", "norm"):
    MORE |= {f"{name}-fp16-{epilogue}": case(name, "fp16", epilogue) for name in CONVS}
    MORE |= {f"{name}-tf32-{epilogue}": case(name, "fp32", epilogue) for name in CONVS}
    MORE |= {f"{name}-fp32-{epilogue}": case(name, "fp32", epilogue, False) for name in CONVS}
    pointwise = [name for name in CONVS if name.startswith("1x1")]
    MORE |= {f"{name}-fp16-planes-{epilogue}": case(name, "fp16", epilogue, rows=False) for name in pointwise}
MORE |= {
    "3x3x3-64-64-fp16-planes-huge": partial(launch, HUGE, torch.float16, False),
    "3x3-64-64-fp16-tiny": partial(launch, TINY, torch.float16),
}
