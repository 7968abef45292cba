"""Every op and module of the package, for the tests of what PyTorch asks of each of them (``test_contract.py``)."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusedseg
from fusedseg.activation import Activation
from fusedseg.functional import (
    ConvLogits,
    Interpolated,
    conv_abn,
    inplace_abn,
    inplace_group_norm_act,
    join_conv,
    max_pool,
    norm_act,
    segmentation_sums,
    upsample,
)
from fusedseg.ops import avg_pool, concat
from fusedseg.ops import upsample as interpolation
from fusedseg.ops.conv import norm_conv
from fusedseg.ops.conv.geometry import Geometry
from fusedseg.ops.conv.norm_conv import NormConv
from fusedseg.ops.low_bit import graph as low_bit
from fusedseg.ops.max_pool import pool as pool
from fusedseg.ops.norm.call import Norm
from fusedseg.ops.norm.graph import GradientCall, NormCall, norm_backward_op, norm_op
from fusedseg.ops.norm.stock import KINDS
from fusedseg.ops.segmentation import positions, sums
from tests.tools.tensors import channels_last

IMAGE, C = (2, 3, 4, 5), 3


class Op(NamedTuple):
    """A function of tensors that autograd differentiates.

    Attributes:
        call: the function; an op that overwrites its input gets a copy.
        stock: the functions of PyTorch that it stands for.
        shapes: those of its tensors; a tensor of more than two dimensions whose first size is 2 is a batch.
        name: what its errors begin with; empty if it can be differentiated twice.
        kept: the tensor that must not change before backward: "input", "output", or neither.
        autocast: whether autocast gives it half precision.
    """

    call: Callable[..., Tensor]
    stock: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    name: str = ""
    kept: str = ""
    autocast: bool = False


def _loss(logits: Any) -> Tensor:
    labels = torch.arange(40, device=logits.device).view(2, 4, 5)[: logits.shape[0]] % 3
    found = segmentation_sums(logits, labels, likelihood="smoothed")
    return torch.stack([found.overlap, found.prediction, found.nll, found.other_nll])


def _stock_loss(logits: Tensor) -> Tensor:
    labels = torch.arange(40, device=logits.device).view(2, 4, 5)[: logits.shape[0]] % 3
    y = F.one_hot(labels, 3).movedim(-1, 1)
    p, nll = logits.softmax(1), -logits.log_softmax(1)
    return torch.stack([(p * y).sum((2, 3)), p.sum((2, 3)), (y * nll).sum((2, 3)), nll.sum((2, 3))])


def _batch_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    # PyTorch's refuses a batch without samples.
    return F.batch_norm(x, None, None, weight, bias, True) if x.numel() else x * weight.sum() * bias.sum()


# Weights are about 1, so that no channel keeps its input.
OPS = {
    "norm_act": Op(
        lambda x, w, b, r: norm_act(x, None, None, w + 1, b, True, activation="silu", residual=r),
        lambda x, w, b, r: F.silu(_batch_norm(x, w + 1, b) + r),
        (IMAGE, (C,), (C,), IMAGE), "fusedseg.norm_act", "input",
    ),
    "inplace_abn": Op(
        lambda x, w, b: inplace_abn(x * 1, None, None, w + 1, b, True),
        lambda x, w, b: F.leaky_relu(_batch_norm(x, w + 1, b), 0.01),
        (IMAGE, (C,), (C,)), "fusedseg.inplace_abn", "output",
    ),
    "inplace_group_norm_act": Op(
        lambda x: inplace_group_norm_act(x * 1, 1, activation="elu", activation_param=1.0),
        lambda x: F.elu(F.group_norm(x, 1)), (IMAGE,), "fusedseg.inplace_abn", "output",
    ),
    "conv_abn": Op(
        lambda x, k, kb, w, b: conv_abn(x, k, kb, None, None, w + 1, b, training=True, padding=1),
        lambda x, k, kb, w, b: F.leaky_relu(_batch_norm(F.conv2d(x, k, kb, padding=1), w + 1, b), 0.01),
        (IMAGE, (4, C, 3, 3), (4,), (4,), (4,)), "fusedseg.(conv|inplace)_abn", "input", True,
    ),
    "join_conv": Op(
        lambda a, b, k: join_conv((a, Interpolated(b, (4, 5), "bilinear")), k, padding=1),
        lambda a, b, k: F.conv2d(torch.cat([a, F.interpolate(b, (4, 5), mode="bilinear")], 1), k, padding=1),
        (IMAGE, (2, 2, 3, 2), (4, 5, 3, 3)), "fusedseg.join_conv", "input", True,
    ),
    "max_pool": Op(lambda x: max_pool(x, 3, 2, 1) * 1.5, lambda x: F.max_pool2d(x, 3, 2, 1) * 1.5, (IMAGE,)),
    "max_pool of volumes": Op(lambda x: max_pool(x, 3, 2, 1), lambda x: F.max_pool3d(x, 3, 2, 1), ((2, 2, 3, 4, 3),)),
    "upsample": Op(
        lambda x: upsample(x, scale_factor=2), lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), (IMAGE,)
    ),
    "segmentation_sums": Op(_loss, _stock_loss, (IMAGE,), "fusedseg.segmentation_sums", "input"),
    "ConvLogits": Op(
        lambda h, w, b: _loss(ConvLogits(h, w, b)),
        lambda h, w, b: _stock_loss(F.conv2d(h, w[:, :, None, None], b)),
        ((2, 6, 4, 5), (C, 6), (C,)), "fusedseg.segmentation_sums", "input",
    ),
}  # fmt: skip


def _norms(kind: str) -> list[tuple[Any, tuple]]:
    """Calls of the op of a norm and of its gradient: what is kept, a residual, slopes, and kept channels."""
    found: list[tuple[Any, tuple]] = []
    for keep, act, rows in (
        ("input", Activation("prelu", 0.25), True),
        ("output", Activation("leaky_relu", 0.01), False),
    ):
        x, residual = (torch.randn(IMAGE, dtype=torch.float64) for _ in range(2))
        x = channels_last(x) if rows else x
        weight, bias = (torch.linspace(*ends, C, dtype=x.dtype) for ends in ((0.5, 1.5), (-0.5, 0.5)))
        slope = torch.full((C,), 0.2, dtype=x.dtype) if keep == "input" else None
        slots = torch.tensor([-1, 0, -1], dtype=torch.int32) if keep == "output" else None
        spec = Norm(keep, act, over=KINDS[kind].over(1))
        leaves = [None if t is None else t.requires_grad_() for t in (x, weight, bias, residual, slope)]
        x, weight, bias, residual, slope = leaves
        call = NormCall(spec, x, weight, bias, residual, slope=slope, slots=slots, kept_count=int(keep == "output"))
        found.append((norm_op, call.arguments))
        if kind == "batch":
            running = torch.zeros(C, dtype=x.dtype), torch.ones(C, dtype=x.dtype)
            call = call._replace(norm=spec._replace(own=False), running_mean=running[0], running_var=running[1])
            found.append((norm_op, call.arguments))
    # With its statistics, a norm gives the same.
    plain = NormCall(spec._replace(keep="input", act=act._replace(name="silu")), *(t.detach() for t in leaves[:4]))
    _, mean, rstd, *_ = norm_op(*plain.arguments)
    found.append((norm_op, plain._replace(mean=mean, rstd=rstd).arguments))
    call = GradientCall(plain.norm, True, True, torch.randn(IMAGE, dtype=torch.float64), *plain[1:5], mean, rstd)
    return [*found, (norm_backward_op, call.arguments)]


def _convolutions(x: Tensor) -> dict[str, list[tuple[Any, tuple]]]:
    """A convolution between two norms, without any, and its gradients."""
    ones, four, w, ways = torch.ones(C), torch.ones(4), torch.randn(4, C, 3, 3), (1, 1)
    of = norm_conv.norm_of("relu", 0.0, False), Geometry(ways, ways, ways, 1)
    after = norm_conv.norm_of("identity", 0.0, False, 1e-5, 0.1)
    before = NormConv(x.detach(), ones, ones, torch.zeros(C), ones, w, *of)
    call = before._replace(conv_bias=four, running_mean=four, running_var=four.clone(), after=after)
    plain = NormConv(x.detach(), None, None, None, None, w, *of)
    gradient = before._replace(dy=torch.randn(2, 4, 4, 5), wanted=(True, True, True))
    return {
        "norm_conv": [(norm_conv.norm_conv_op, of.arguments) for of in (call, plain)],
        "norm_conv_backward": [(norm_conv.norm_conv_backward_op, gradient.arguments)],
    }


@functools.cache
def samples() -> dict[str, list[tuple[Any, tuple]]]:
    """The ops that graphs hold, by the name of an op and a case: the op, and its arguments, to be copied."""
    x, rows, volume = torch.randn(IMAGE), channels_last(torch.randn(IMAGE)), torch.randn(1, 2, 4, 4, 4)
    window, labels = ([3, 3], [2, 2], [1, 1], [1, 1], False), torch.randint(C, (2, 4, 5))
    z, codes = pool.max_pool_op(x, *window, True)
    dx, dz = (torch.randn_like(t).requires_grad_() for t in (x, z))
    head, form = (torch.randn(2, 6, 3, 4), torch.randn(C, 6), torch.randn(C)), ([4, 5], False, torch.float32)
    spec, dsums = ("softmax", "smoothed", 1, False, False, False), torch.randn(5, 2, C)
    needs, key = [True, False, False], torch.tensor(1)
    ones, half = torch.ones(C), ([2] * 3, [], [0] * 3, False, True, None)
    packed = low_bit.pack(rows, None, 8, "", 1)
    cubes = volume.contiguous(memory_format=torch.channels_last_3d)
    sizes = [8, 10], None, "bilinear", False
    masks, pooled = rows.detach() > 0, avg_pool.avg_pool3d_op(cubes, *half)
    found = {f"norm of a {kind}": _norms(kind) for kind in ("batch", "instance", "group")} | _convolutions(x)
    return found | {
        "max_pool": [(pool.max_pool_op, (of.requires_grad_(), *window, True)) for of in (x, rows)],
        "max_pool without codes": [(pool.max_pool_op, (x.detach(), *window, False))],
        "max_pool_backward": [(pool.max_pool_backward_op, (dz, codes, [4, 5], False, *window))],
        "max_pool_pick": [(pool.max_pool_pick_op, (dx, codes, [4, 5], False, *window))],
        "segmentation_sums": [
            (sums.sums_op, (x, None, None, labels, labels > 0, *sums.NO_CONV, *spec)),
            (sums.sums_op, (*(t.requires_grad_() for t in head), labels, None, *form, *spec)),
            (sums.sums_op, (rows.detach(), None, None, rows.detach() > 0, None, *sums.NO_CONV, *spec[:-1], True)),
        ],
        "segmentation_sums_backward": [
            (sums.sums_backward_op, (dsums, needs, rows.detach(), None, None, labels, None, *sums.NO_CONV, *spec)),
            (sums.sums_backward_op, (dsums, needs, *(t.detach() for t in head), labels, None, *form, *spec)),
        ],
        "conv_argmax": [(positions.conv_argmax_op, (*(t.detach() for t in head), *form, torch.uint8))],
        "interpolate": [(interpolation.interpolate_op, (of.detach().requires_grad_(), *sizes)) for of in (x, rows)],
        "interpolate_backward": [
            (interpolation.interpolate_backward_op, (torch.randn(2, 3, 8, 10), [8, 10], list(IMAGE), *sizes[1:])),
        ],
        "avg_pool3d": [(avg_pool.avg_pool3d_op, (cubes, *half))],
        "avg_pool3d_backward": [(avg_pool.avg_pool3d_backward_op, (pooled, cubes, *half))],
        "concat_biased": [(concat.concat_biased_op, ([rows.detach(), rows.detach()], [None, ones]))],
        "low_bit_round": [(low_bit.round_op, (rows.detach(), 4, key, 0, ones, "batch", list(rows.stride())))],
        "low_bit_unpack": [(low_bit.unpack_op, (*packed, None, 8, "", list(IMAGE), list(rows.stride())))],
        "bits_pack": [(low_bit.bits_pack, (masks, 1, list(rows.stride())))],
        "bits_unpack": [
            (low_bit.bits_unpack, (low_bit.bits_pack(masks, 1, rows.stride()), 1, torch.bool, IMAGE, rows.stride()))
        ],
        "norm_kink": [(low_bit.norm_kink, (x.detach(), ones, ones, ones, ones, False))],
    }  # fmt: skip


# A module of 4 channels, its class's name, and the number of spatial dimensions of its input.
MODULES: dict[str, Callable[..., nn.Module]] = {
    "InPlaceABN": lambda **options: fusedseg.InPlaceABN(4, **options),
    "InPlaceInstanceNormAct": lambda **options: fusedseg.InPlaceInstanceNormAct(
        4, affine=True, track_running_stats=True, **options
    ),
    "InPlaceGroupNormAct": lambda **options: fusedseg.InPlaceGroupNormAct(2, 4, activation="elu", **options),
    "BatchNormAct": lambda **options: fusedseg.BatchNormAct(4, activation="prelu", num_slopes=4, **options),
    "InstanceNormAct": lambda **options: fusedseg.InstanceNormAct(4, affine=True, **options),
    "GroupNormAct": lambda **options: fusedseg.GroupNormAct(2, 4, activation="silu", **options),
    "ConvABN2d": lambda **options: fusedseg.ConvABN2d(4, 4, 3, padding=1, **options),
    "ConvABN3d": lambda **options: fusedseg.ConvABN3d(4, 4, 1, **options),
    "JoinConv2d": lambda **options: fusedseg.nn.JoinConv2d(4, 4, 3, padding=1, **options),
    "MaxPool2d": lambda **options: fusedseg.MaxPool2d(2),
    "MaxPool3d": lambda **options: fusedseg.MaxPool3d(2),
}


class Everything(nn.Module):
    """Each module in one network; norms that keep their output follow a convolution, and add a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: make() for name, make in MODULES.items() if not name.endswith("3d")})
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(6))
        self.strided = fusedseg.ConvABN2d(
            4, 4, 3, stride=2, groups=2, bias=False, activation="elu", activation_param=1.0
        )

    def forward(self, x: Tensor) -> Tensor:
        norms = [part for name, part in self.parts.items() if "Norm" in name or name == "InPlaceABN"]
        for conv, part in zip(self.convs, norms, strict=True):
            x = part(conv(x), x)
        low = self.parts["ConvABN2d"](self.parts["MaxPool2d"](x))
        enlarged = Interpolated(low[:, 1:], x.shape[2:], "bilinear")
        return self.strided(self.parts["JoinConv2d"]([x[:, :1], enlarged]))
