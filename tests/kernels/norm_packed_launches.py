"""Launches of the norm kernels that write and read packed copies, for ``tests/tools/codegen.py``."""

import itertools
from functools import partial

import torch
from fusedseg.kernels.low_bit_tile import Codes
from fusedseg.kernels.norm_act import norm_act_fwd, norm_act_rebuild
from fusedseg.kernels.norm_act_bwd import norm_act_bwd

from fusedseg.ops.layout import layout_of
from fusedseg.ops.low_bit.spec import lines_of
from tests.kernels.norm_act_launches import DTYPES, FORMATS, SHAPES

LEAKY = ("leaky_relu", 0.01)
WIDE = {"fp64": torch.float64}


def codes_of(x, layout, bits, packs, key=-123456789):
    """Memory for the codes of a tensor like ``x``, filled with bytes and numbers that no kernel writes."""
    kinks = layout.I * layout.C if packs == "input" else 0
    lines = lines_of(x, kinks)
    groups = lines.I * lines.groups * lines.C
    codes = torch.full((lines.code_bytes(bits),), 255, dtype=torch.uint8, device=x.device)
    wide = torch.promote_types(x.dtype, torch.float32)
    ends = (torch.full((groups,), torch.nan, dtype=x.dtype, device=x.device) for _ in range(2))
    kink = torch.full((kinks,), torch.nan, dtype=wide, device=x.device) if kinks else None
    return Codes(codes, *ends, kink, bits, lines.row_bytes(bits), key), lines


def launch(shape, dtype, memory_format, bits, packs, groups=None, act=LEAKY):
    x = torch.empty(shape, dtype=dtype, memory_format=memory_format)
    wide = torch.promote_types(dtype, torch.float32)
    weight, bias = torch.ones(2, shape[1], dtype=wide)
    layout = layout_of(x).by_sample(shape[0], groups)
    codes, _ = codes_of(x, layout, bits, packs)
    mean, rstd, _ = norm_act_fwd(x, x, layout, weight, bias, None, None, True, 0.1, 1e-5, act, None, codes=codes,
                                 packs=packs)  # fmt: skip
    if layout.rows:
        # Backward reads no codes of rows.
        return
    if packs == "input":
        norm_act_rebuild(codes, x, layout, weight, bias, mean, rstd, act)
    norm_act_bwd(
        x, codes, layout, weight, bias, rstd, None, None, True, act, wide, mean=mean if packs == "input" else None
    )


def case(path, dtype, fmt, bits, packs, **options):
    return partial(launch, SHAPES[path], (DTYPES | WIDE)[dtype], FORMATS[fmt], bits, packs, **options)


def cases(*choices):
    return {"-".join(map(str, chosen)): case(*chosen) for chosen in itertools.product(*choices)}


CASES = cases(["split", "onchip"], DTYPES, FORMATS, [8, 4], ["output", "input"])
CASES |= {
    f"{stat}-{path}-{fmt}-{packs}": case(path, "fp16", fmt, 4, packs, groups=groups[path])
    for (stat, groups), path, fmt, packs in itertools.product(
        {"instance": {"split": 64, "onchip": 512}, "group": {"split": 8, "onchip": 32}}.items(),
        ("split", "onchip"), FORMATS, ("output", "input"),
    )
}  # fmt: skip
# Every run compiles these.
FEW = {
    name: CASES[name]
    for name in ("split-fp16-planes-4-output", "split-fp16-rows-4-input", "instance-onchip-planes-output")
}
