"""Random valid calls of each family of kernels: sizes, dtypes, formats and options, and values of extreme scales."""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from fusedseg.activation import TABLE, Activation
from fusedseg.functional import (
    argmax_labels,
    inplace_abn,
    inplace_group_norm_act,
    inplace_instance_norm_act,
    max_pool,
    norm_act,
    segmentation_sums,
    upsample,
)
from fusedseg.ops import concat
from fusedseg.ops.low_bit import graph as low_bit
from fusedseg.ops.norm import triton
from fusedseg.ops.norm.call import BackwardCall, Exchange, Norm, Operands
from fusedseg.ops.norm.stock import KINDS
from tests.reference import PARAMS
from tests.tools.tensors import channels_last

Of = TypeVar("Of")
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
SCALES: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "small": lambda x: x * 1e-4,
    "large": lambda x: x * 300,
    "denormal": lambda x: x * 1e-40,
    "denormal in fp16": lambda x: x * 1e-7,
    "large mean": lambda x: x + 1000,
    "digits of a mean": lambda x: x * 1e-2 + 3e4,
    "constant": lambda x: torch.full_like(x, 1 / 3),
    "zero": torch.zeros_like,
}


class Draw:
    """Random choices that a seed repeats."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.random, self.device = random.Random(seed), device
        self.generator = torch.Generator().manual_seed(seed)

    def one(self, of: Sequence[Of]) -> Of:
        return self.random.choice(of)

    def flip(self, probability: float = 0.5) -> bool:
        return self.random.random() < probability

    def vector(self, C: int, dtype: torch.dtype, scales: Sequence[float] = (1.0, 1e-3, 10.0)) -> Tensor:
        values = torch.randn(C, generator=self.generator) * self.one(scales)
        return values.to(self.device, dtype)

    def image(self, shape: Sequence[int], dtype: torch.dtype, rows: bool) -> Tensor:
        values = self.one(list(SCALES.values()))(torch.randn(*shape, generator=self.generator)).to(dtype)
        return (channels_last(values) if rows else values).to(self.device)

    def wild(self, shape: Sequence[int], dtype: torch.dtype, rows: bool) -> Tensor:
        """An image that may have values that are not finite, as gradients of a loss that is scaled too much have."""
        values = self.image(shape, dtype, rows)
        if self.flip(0.2):
            values.masked_fill_(values > self.one((0.0, 2.0)), self.one((torch.inf, -torch.inf, torch.nan)))
        return values

    def shape(self, channels: Sequence[int] = (1, 3, 4, 8, 17)) -> tuple[int, ...]:
        sizes = [self.one((1, 2, 5, 9)) for _ in range(self.one((2, 2, 2, 3)))]
        if math.prod(sizes) < 30:
            # A tile of 128 values does not hold it.
            sizes[-1] *= self.one((1, 1, 7))
        return (self.one((1, 2)), self.one(channels), *sizes)


def norm(draw: Draw) -> None:
    dtype, rows, kind, (N, C, *spatial) = (
        draw.one(DTYPES),
        draw.flip(),
        draw.one(("batch", "instance", "group")),
        draw.shape(),
    )
    # Statistics of one value are refused.
    shape = (N, C, *spatial, 2)
    of = torch.float32 if dtype != torch.float64 and draw.flip(0.7) else dtype
    x, dz = draw.image(shape, dtype, rows), draw.wild(shape, dtype, rows)
    residual = draw.image(shape, dtype, rows).requires_grad_() if draw.flip(0.4) else None
    weight, bias = draw.vector(C, of), draw.vector(C, of, (0.0, 1.0, 10.0))
    weight[0] *= draw.flip(0.8)
    running: list[Any] = [draw.vector(C, of), torch.rand(C, generator=draw.generator).to(draw.device, of) + 0.1]
    groups = draw.one([g for g in range(1, C + 1) if C % g == 0])
    own = kind != "batch" or draw.flip(0.8)
    for t in (x, weight, bias):
        t.requires_grad_()
    if draw.flip():
        row = TABLE[draw.one([name for name, row in TABLE.items() if not row.learned])]
        name, param = row.selected_by or (row.name, None)
        if draw.flip(0.3):
            act = Activation(row.name, PARAMS.get(row.name, 0.0))
            run_passes(draw, Operands(x, weight, bias, residual), act, kind, groups, dz)
        z = norm_act(
            x, *((None, None) if kind == "group" else running), weight, bias, own, activation=name,
            activation_param=param, norm=kind, num_groups=groups if kind == "group" else None, residual=residual,
        )  # fmt: skip
    else:
        options: dict[str, Any] = {
            "activation": draw.one([name for name, row in TABLE.items() if row.inverse is not None]),
            "residual": residual,
        }
        if kind == "batch":
            z = inplace_abn(x * 1, *running, weight, bias, own, **options)
        elif kind == "instance":
            z = inplace_instance_norm_act(x * 1, *running, weight, bias, **options)
        else:
            z = inplace_group_norm_act(x * 1, groups, weight, bias, **options)
    z.backward(dz)


def run_passes(draw: Draw, given: Operands, act: Activation, kind: str, groups: int, dz: Tensor) -> None:
    """What compiled graphs and several processes call: an output computed again, a second gradient, and sums."""
    given = Operands(*(t if t is None else t.detach() for t in given))
    x, of = given.x, Norm("input", act, 1e-5, 0.1, over=KINDS[kind].over(groups))
    _, stats = triton.forward(given, of, None, None)
    triton.recompute(given, stats, of, None)
    triton.moments(x)
    needs = (True, True, True, given.residual is not None, False)
    also = torch.empty_like(x).copy_(draw.image(x.shape, x.dtype, rows=False))
    triton.backward(BackwardCall(dz, given, stats, of, None, needs, None, also, draw.flip()))
    if kind == "batch":
        twice = Exchange(lambda s1, s2: (2 * s1, 2 * s2))
        triton.backward(BackwardCall(dz, given, stats, of, None, needs, exchange=twice))


def pool(draw: Draw) -> None:
    dtype, rows, (N, C, *spatial) = draw.one(DTYPES), draw.flip(), draw.shape()
    x = draw.image((N, C, *(n + 4 for n in spatial)), dtype, rows)
    # Equal values, and windows without a finite one.
    x = x.round() if draw.flip(0.3) else torch.where(x > 0.5, -torch.inf, x) if draw.flip(0.3) else x
    kernel = draw.one((2, 3, 5))
    z = max_pool(x.requires_grad_(), kernel, draw.one((1, 2, 3)), draw.one((0, kernel // 2)))
    z.backward(draw.wild(z.shape, dtype, rows))


def enlarge(draw: Draw) -> None:
    dtype, rows, (N, C, *spatial) = draw.one(DTYPES), draw.flip(), draw.shape((1, 3, 8))
    # The interpreter computes a volume line by line.
    shape = (N, C, *(min(n, 5) if len(spatial) == 3 else n for n in spatial))
    x = draw.wild(shape, dtype, rows).requires_grad_()
    if draw.flip():
        y = upsample(x, [draw.one((1, 3, 8, 18)) for _ in shape[2:]], align_corners=draw.flip())
    else:
        y = upsample(x, scale_factor=draw.one((2.0, 1.5, 1.3, 3.0, 2.71)), align_corners=draw.flip())
    y.backward(draw.wild(y.shape, dtype, rows))


def join(draw: Draw) -> None:
    dtype, (N, _, *spatial) = draw.one(DTYPES), draw.shape()
    fmt = torch.channels_last if len(spatial) == 2 else torch.channels_last_3d
    sources = []
    for _ in range(draw.one((1, 2, 5))):
        image = draw.wild((N, draw.one((2, 3, 8, 70)), *spatial), dtype, True)
        sources.append(image.contiguous(memory_format=fmt))
    wide = dtype if dtype == torch.float64 else torch.float32
    biases = [draw.vector(x.shape[1], draw.one((dtype, wide))) if draw.flip() else None for x in sources]
    concat.concat(sources, 1, biases if draw.flip() else ())
    concat.dense(sources[0][:, :-1])


def pack(draw: Draw) -> None:
    dtype, rows, (N, C, *spatial) = draw.one(DTYPES), draw.flip(), draw.shape()
    x = draw.image((N, C, *spatial, 16), dtype, rows)
    x[0, 0] = draw.one((0.0, 0.0, 1.0, torch.nan)) if draw.flip(0.2) else x[0, 0]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    values = x.transpose(0, 1).flatten(1).to(wide)
    mean, rstd = values.mean(1), (values.var(1, correction=0) + 1e-5).rsqrt()
    weight, bias = draw.vector(C, wide), draw.vector(C, wide, (0.0, 1.0, 30.0))
    weight[0] = draw.one((0.0, 1e-20, 1e-40, 1.0))
    affine = (t if draw.flip(0.7) else None for t in (weight, bias))
    kink = low_bit.kink_of(x, mean, rstd, *affine, False).nan_to_num() if draw.flip(0.7) else None
    # Kinks are those of channels, so that groups must not mix them.
    bits, unit = draw.one((8, 4, 2)), "" if kink is None else "plane"
    codes = low_bit.pack(x, kink, bits, unit, draw.random.randrange(2**31))
    low_bit.unpack(codes, kink, bits, unit, x.shape, x.stride())


def sums(draw: Draw) -> None:
    dtype, rows, shape = draw.one(DTYPES), draw.flip(), draw.shape()
    N, K, *spatial = shape
    x = draw.image(shape, dtype, rows) * draw.one((1, 30))
    x[:, 0] = -torch.inf if draw.flip(0.1) else x[:, 0]
    argmax_labels(x.round() if draw.flip() else x)
    probability = draw.one(("softmax", "sigmoid", "identity", "none", "argmax", "positive"))
    hard = probability in ("argmax", "positive")
    likelihood = "none" if hard else draw.one(("softmax", "smoothed", "sigmoid", "none"))
    if probability == "positive" or draw.flip(0.4):
        soft = torch.rand(shape, generator=draw.generator)
        target = draw.one((soft, soft.to(dtype), soft.round().byte(), soft > 0.5))
    else:
        target = torch.randint(K, (N, *spatial), generator=draw.generator).to(
            draw.one((torch.uint8, torch.int16, torch.int64))
        )
    mask = torch.rand(N, *spatial, generator=draw.generator)
    found = segmentation_sums(
        x.requires_grad_(), target.to(draw.device), draw.one((None, mask.to(draw.device), mask.to(draw.device) > 0.3)),
        probability=probability, likelihood=likelihood, ignore_index=draw.one((None, 0)), squared=draw.flip(0.3),
        minimum=draw.flip(0.3), gamma=draw.one((0.0, 2.0, 0.5, 1.0)) if likelihood in ("softmax", "sigmoid") else 0.0,
    )  # fmt: skip
    terms = [
        (t * torch.randn_like(t) * draw.one((1e-3, 1.0, 100.0, torch.inf))).sum()
        for t in found
        if t is not None and t.requires_grad
    ]
    if terms:
        torch.stack(terms).sum().backward()


FAMILIES: dict[str, Callable[[Draw], None]] = {
    "norm": norm, "pool": pool, "upsample": enlarge, "concat": join, "low_bit": pack, "sums": sums,
}  # fmt: skip
# Calls of a seed; the interpreter takes a second or two for them.
COUNTS = {"norm": 32, "pool": 8, "upsample": 8, "concat": 16, "low_bit": 12, "sums": 24}
