"""Launches of the norm kernels that are compiled for GPUs: shapes of real U-Net stages, aligned to 16 bytes."""

import itertools
from functools import partial

import torch
from fusedseg.kernels.norm_act import norm_act_fwd, norm_act_rebuild
from fusedseg.kernels.norm_act_bwd import norm_act_bwd

from fusedseg.ops.layout import layout_of

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
FORMATS = {"planes": torch.contiguous_format, "rows": torch.channels_last}
# 4 GiB in fp32: offsets and sizes need 64 bits, which the compiler sees from the arguments.
SHAPES = {"split": (8, 64, 512, 512), "huge": (16, 64, 1024, 1024), "onchip": (4, 512, 16, 16)}


def launch(shape, dtype, memory_format, act=("leaky_relu", 0.01), training=True, kept=0, groups=None,
           residual=False, keep="output", joined=False):  # fmt: skip
    x = torch.empty(shape, dtype=dtype, memory_format=memory_format)
    C = shape[1]
    weight, bias, *running = torch.ones(4, C)
    if groups is not None:
        running = [None, None]
    slots = (torch.full((C,), -1, dtype=torch.int32), kept) if kept else None
    layout = layout_of(x).by_sample(shape[0], groups)
    r, dr = (torch.empty_like(x) if residual else None for _ in range(2))
    also, pitch = (x, C) if joined else (None, None)
    if joined is True and layout.rows:
        wide = torch.empty((shape[0], 2 * C, *shape[2:]), dtype=dtype, memory_format=memory_format)
        also, pitch = wide[:, C:], 2 * C
    mean, rstd, xhat = norm_act_fwd(x, x, layout, weight, bias, *running, training, 0.1, 1e-5, act, slots, residual=r)
    kept_mean = mean if keep == "input" else None
    norm_act_bwd(x, x, layout, weight, bias, rstd, xhat, slots, training, act, torch.float32, mean=kept_mean,
                 residual=r, dresidual=dr, also=also, pitch=pitch)  # fmt: skip
    if keep == "input":
        norm_act_rebuild(x, x, layout, weight, bias, mean, rstd, act, r)


def case(shape, dtype, fmt, **options):
    return partial(launch, SHAPES[shape], DTYPES[dtype], FORMATS[fmt], **options)


CASES = {"-".join(names): case(*names) for names in itertools.product(("split", "onchip"), DTYPES, FORMATS)}
# Every other case is compiled once, in the dtype of training.
CASES |= {f"huge-fp16-{fmt}": case("huge", "fp16", fmt) for fmt in FORMATS}
CASES |= {f"kept-fp16-{fmt}": case("split", "fp16", fmt, kept=1) for fmt in FORMATS}
CASES |= {f"elu-fp16-{fmt}": case("split", "fp16", fmt, act=("elu", 1.0)) for fmt in FORMATS}
CASES |= {f"selu-fp16-{fmt}": case("onchip", "fp16", fmt, act=("selu", 0.0)) for fmt in FORMATS}
CASES |= {f"eval-fp16-{fmt}": case("split", "fp16", fmt, training=False) for fmt in FORMATS}
# Two gradients of the output, in rows a slice of channels.
CASES |= {f"joined-fp16-{fmt}": case("split", "fp16", fmt, keep="input", joined=True) for fmt in FORMATS}
CASES |= {
    f"joined-residual-fp16-{fmt}": case("split", "fp16", fmt, keep="input", joined=True, residual=True)
    for fmt in FORMATS
}
# Statistics of samples, a kept input and a residual are each combined with each path.
SAMPLES = {"instance": {"split": 64, "onchip": 512}, "group": {"split": 8, "onchip": 32}}
for (stat, groups), path, fmt in itertools.product(SAMPLES.items(), ("split", "onchip"), FORMATS):
    keep = "input" if (stat == "group") == (path == "split") else "output"
    CASES[f"{stat}-{path}-{keep}-fp16-{fmt}"] = case(
        path, "fp16", fmt, groups=groups[path], keep=keep, residual=path == "split" or keep == "output"
    )
# Each activation of the kept input runs on one path.
EXACT = ("relu", "silu", "gelu", "gelu_tanh", "mish", "hardswish", "softplus", "selu", "relu6")
for act, (path, fmt) in zip(EXACT, itertools.cycle(itertools.product(("split", "onchip"), FORMATS))):
    CASES[f"{act}-{path}-fp16-{fmt}"] = case(path, "fp16", fmt, act=(act, 0.0), keep="input")
# 216 positions are a multiple of 16 bytes, but not of 16 elements.
CASES["instance-216-fp16-planes"] = partial(launch, (2, 256, 6, 36), torch.float16, FORMATS["planes"], groups=256)
# Planes of 513 x 513 positions begin at any address.
ODD = {"odd-fp16-planes": partial(launch, (8, 64, 513, 513), torch.float16, FORMATS["planes"])}

# Every run compiles these: each path, statistic and layout, and the launches that need the most registers.  `-m slow`
# compiles all.
FEW = {
    name: CASES[name]
    for name in (
        "split-fp16-planes",
        "split-fp16-rows",
        "joined-fp16-rows",
        "onchip-fp16-planes",
        "onchip-fp32-rows",
        "instance-split-output-fp16-rows",
        "group-split-input-fp16-planes",
        "group-onchip-output-fp16-rows",
        "instance-216-fp16-planes",
        "gelu_tanh-onchip-fp16-rows",
    )
}
# Each kernel, with a residual and with a kept input, once in planes and once in rows.
FEWER = {
    name: CASES[name] for name in ("split-fp16-rows", "group-split-input-fp16-planes", "group-onchip-output-fp16-rows")
}
