"""Which results of the norm kernels have other bits than those of another checkout, in Triton's interpreter.

    python -m tests.tools.bits > before.json                  in one checkout
    python -m tests.tools.bits --against before.json          in the other

Shapes are small, and take the same paths as those of ``bench/gpu/shapes.py``.  The interpreter rounds a fused multiply
and add twice, and a GPU once.
"""

import argparse
import hashlib
import json
import os
from pathlib import Path

os.environ |= {"FUSEDSEG_BACKEND": "triton", "TRITON_INTERPRET": "1"}

import torch

import fusedseg
from tests.tools import interpreter_speed
from tests.tools.interpreter import true_bfloat16

EXACT = {"batch": fusedseg.BatchNormAct, "instance": fusedseg.InstanceNormAct, "group": fusedseg.GroupNormAct}
IN_PLACE = {
    "batch": fusedseg.InPlaceABN,
    "instance": fusedseg.InPlaceInstanceNormAct,
    "group": fusedseg.InPlaceGroupNormAct,
}
# The last one is a slab in forward, and takes two launches in backward.
SHAPES = {
    "whole tiles": (2, 8, 256, 256),
    "cut tiles 56": (16, 8, 56, 56),
    "cut tiles 112": (4, 8, 112, 112),
    "odd planes": (2, 4, 513, 129),
    "slabs of 64 KB": (8, 8, 64, 64),
    "slabs of 16 KB": (8, 16, 32, 32),
    "216 positions": (2, 32, 6, 36),
    "16 x 16": (8, 64, 16, 16),
    "14 x 14": (128, 16, 14, 14),
}
SAMPLES = ("cut tiles 112", "216 positions")


def cases():
    """Name -> shape, statistics, whether the output is kept, activation, kept channels, dtype, whether in rows."""
    half = torch.float16
    for rows, end in ((False, ", planes"), (True, ", rows")):
        for name, shape in SHAPES.items():
            for kind in EXACT if name in SAMPLES else ("batch",):
                yield f"{name}, {kind}{end}", (shape, kind, True, "leaky_relu", 0, half, rows)
        wide = (2, 320, 48, 48) if rows else (1, 320, 184, 184)
        yield f"C = 320{end}", (wide, "batch", True, "leaky_relu", 0, half, rows)
        for dtype in (torch.float32, torch.bfloat16):
            yield f"{dtype}{end}", ((4, 8, 112, 112), "batch", True, "leaky_relu", 0, dtype, rows)
        for count in (1, 4, 8):
            yield f"{count} kept channels{end}", ((4, 16, 128, 128), "batch", True, "leaky_relu", count, half, rows)
        for act in ("relu", "silu", "gelu", "mish", "hardswish", "relu6", "softplus", "selu"):
            yield f"{act}, input kept{end}", ((4, 8, 128, 128), "batch", False, act, 0, half, rows)
        for act in ("elu", "selu", "identity"):
            yield f"{act}{end}", ((4, 8, 128, 128), "batch", True, act, 0, half, rows)


def results(shape, kind, in_place, act, kept, dtype, rows) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, dz = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    if rows:
        x, dz = (t.to(memory_format=torch.channels_last) for t in (x, dz))
    cls = (IN_PLACE if in_place else EXACT)[kind]
    given = (4, shape[1]) if kind == "group" else (shape[1],)
    norm = cls(*given, activation=act, **({"affine": True} if kind == "instance" else {}))
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5, generator=generator)
        norm.bias.uniform_(-0.5, 0.5, generator=generator)
        norm.weight[:kept] = 0
    leaf = x.requires_grad_()
    z = norm(leaf * 1)
    found = {"z": z.detach().clone()}
    z.backward(dz)
    found |= {"dx": leaf.grad, "dweight": norm.weight.grad, "dbias": norm.bias.grad}
    return found | {name: of for name, of in norm.named_buffers() if of.is_floating_point()}


def digest(t: torch.Tensor) -> str:
    return hashlib.sha256(t.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", metavar="FILE", help="what this command printed in the other checkout")
    given = parser.parse_args()
    with true_bfloat16(), interpreter_speed.fast():
        found = {name: {of: digest(t) for of, t in results(*case).items()} for name, case in cases()}
    if given.against is None:
        print(json.dumps(found))
        return
    before = json.loads(Path(given.against).read_text())
    for name, of in found.items():
        changed = [result for result in of if of[result] != before[name][result]]
        print(f"{name}: {', '.join(changed) or 'the same'}")


if __name__ == "__main__":
    main()
