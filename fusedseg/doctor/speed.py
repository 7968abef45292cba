"""Times a copy, our norms, and the vendor's and our convolution on a GPU: the figures of ``doctor --gpu``.

The norms and the copy are given in GB/s over the bytes that they must move: a forward pass of a large tensor moves it
three times, a backward pass five times.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.conv.choice import cuda_seconds
from ..ops.layout import layout_of
from ..ops.self_test.checks import EPS, FORMATS, MOMENTUM, SLOPE

WARMUP, ROUNDS = 3, 10
# fp16 tensors of 256 MiB, which no cache holds, and a convolution of 64 to 64 channels with 3x3 taps.
NORM_SHAPE, CONV_SHAPE, CHANNELS = (8, 64, 512, 512), (8, 64, 256, 256), 64
DTYPE = torch.float16
ACT = ("leaky_relu", SLOPE)


class Speed(NamedTuple):
    """A measurement: the median of the seconds of a call, and a rate in a unit."""

    what: str
    seconds: float
    rate: float
    unit: str


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    def on_host(run: Callable[[], Any]) -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    clock = cuda_seconds if device.type == "cuda" else on_host
    taken = [clock(run) for _ in range(WARMUP + ROUNDS)]
    return statistics.median(taken[WARMUP:])


def _normal(shape: tuple[int, ...], device: torch.device, fmt: str = "contiguous") -> Tensor:
    return torch.empty(shape, dtype=DTYPE, device=device, memory_format=FORMATS[fmt]).normal_()


def _rate(what: str, nbytes: int, run: Callable[[], Any], device: torch.device) -> Speed:
    seconds = _seconds(run, device)
    return Speed(what, seconds, nbytes / seconds / 1e9, "GB/s")


def copy(device: torch.device) -> Iterator[Speed]:
    source = _normal(NORM_SHAPE, device)
    target = torch.empty_like(source)
    yield _rate("copy", 2 * source.nbytes, lambda: target.copy_(source), device)


def norm(device: torch.device) -> Iterator[Speed]:
    from ..kernels.norm_act import norm_act_fwd
    from ..kernels.norm_act_bwd import norm_act_bwd

    for fmt in FORMATS:
        x, dz = (_normal(NORM_SHAPE, device, fmt) for _ in range(2))
        z, layout = torch.empty_like(x), layout_of(x)
        weight, bias = torch.ones(x.shape[1], device=device), torch.zeros(x.shape[1], device=device)

        def forward(x=x, z=z, layout=layout, weight=weight, bias=bias) -> Tensor:
            _, rstd, _ = norm_act_fwd(
                x, z, layout, weight, bias, running_mean=None, running_var=None, training=True, momentum=MOMENTUM,
                eps=EPS, act=ACT, kept=None,
            )  # fmt: skip
            return rstd

        rstd = forward()

        def backward(x=x, z=z, dz=dz, layout=layout, weight=weight, bias=bias, rstd=rstd) -> None:
            # dx is written over x, which is not needed any more.
            norm_act_bwd(
                dz, z, layout, weight, bias, rstd, xhat_kept=None, kept=None, training=True, act=ACT,
                dparam_dtype=torch.float32, dx=x,
            )  # fmt: skip

        yield _rate(f"our norm, forward, {fmt}", 3 * x.nbytes, forward, device)
        yield _rate(f"our norm, backward, {fmt}", 5 * x.nbytes, backward, device)


def conv(device: torch.device) -> Iterator[Speed]:
    from ..kernels.conv_abn import conv_abn_fwd
    from ..kernels.norm_act import norm_act_fwd

    x = _normal(CONV_SHAPE, device, "channels_last")
    w = _normal((CHANNELS, CONV_SHAPE[1], 3, 3), device, "channels_last")
    z, layout = torch.empty_like(x), layout_of(x)
    weight, bias = torch.ones(CHANNELS, device=device), torch.zeros(CHANNELS, device=device)
    norm: dict[str, Any] = {
        "weight": weight, "bias": bias, "running_mean": None, "running_var": None, "training": True,
        "momentum": MOMENTUM, "eps": EPS, "act": ACT, "kept": None,
    }  # fmt: skip

    def vendors() -> Tensor:
        return torch.nn.functional.conv2d(x, w, padding=1)

    def then_norm() -> None:
        y = vendors()
        norm_act_fwd(y, y, layout_of(y), **norm)

    def ours() -> None:
        conv_abn_fwd(x, w, z, layout, layout, ((1, 1), (1, 1), (1, 1), 1), conv_bias=None, **norm, tf32=False)

    operations = 2 * z.numel() * math.prod(w.shape[1:])
    for what, run in (
        ("the vendor's convolution", vendors),
        ("the vendor's convolution and our norm", then_norm),
        ("our convolution with its norm", ours),
    ):
        seconds = _seconds(run, device)
        yield Speed(what, seconds, operations / seconds / 1e12, "TFLOP/s")


SPEEDS: dict[str, Callable[[torch.device], Iterator[Speed]]] = {"copy": copy, "norm": norm, "conv": conv}
