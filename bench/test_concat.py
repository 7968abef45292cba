"""Times concatenations in channels_last alone, and the copy of the part of their gradient that a convolution reads.

A copy of the concatenation moves as many bytes.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fusedseg.ops.concat import concat, dense

from .data import FORMATS, Source
from .harness import Timing, compete, copy_of
from .results import COPY

SECONDS = {"cpu": 0.3, "cuda": 0.6}


def stock_dense(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=FORMATS[x.dim()])


# The concatenation, and the copy of a slice of channels.
CONTENDERS: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor], Tensor]]] = {
    "eager": (torch.cat, stock_dense),
    "ours": (concat, dense),
}


class Case(NamedTuple):
    """The batch and the positions, the channels of the sources, and the dtype."""

    size: tuple[int, ...]
    channels: tuple[int, ...]
    dtype: str = "bf16"

    def __str__(self) -> str:
        channels = "+".join(map(str, self.channels))
        return f"{self.size[0]}x({channels})x{'x'.join(map(str, self.size[1:]))} {self.dtype} nhwc"


CASES = {
    "cpu": [Case((2, 128, 128), (32, 32), "fp32"), Case((1, 32, 48, 48), (16, 16), "fp32")],
    "cuda": [
        Case((8, 512, 512), (64, 64)), Case((2, 128, 128, 128), (32, 32)), Case((2, 64, 64, 64), (64, 64)),
        Case((8, 128, 128), (256, 256)), Case((8, 32, 32), (512, 512)),
    ],
}  # fmt: skip
MORE = {
    "cpu": [Case((2, 128, 128), (32, 16, 16), "bf16")],
    "cuda": [
        Case((8, 512, 512), (64, 64, 64)), Case((8, 256, 256), (24, 40), "fp16"), Case((8, 256, 256), (64, 3), "fp16"),
        Case((8, 256, 256), (64, 64), "fp32"),
    ],
}  # fmt: skip


class ConcatJob:
    """Forward is the concatenation, backward the copy of the last source's part of a gradient."""

    def __init__(self, name: str, parts: list[Tensor], dy: Tensor) -> None:
        self.concat, self.dense = CONTENDERS[name]
        self.parts, self.dy = parts, dy

    def prepare(self) -> list[Tensor]:
        return self.parts

    def forward(self, prepared: list[Tensor]) -> Tensor:
        return self.concat(prepared, 1)

    def backward(self, out: Tensor) -> tuple[Tensor, ...]:
        return (self.dense(self.dy[:, -self.parts[-1].shape[1] :]),)

    def results(self, out: Tensor, grads: tuple[Tensor, ...]) -> dict[str, Tensor]:
        return {"y": out, "dx": grads[0]}

    def owned(self) -> list[Tensor]:
        return self.parts


def test_step(case, device, report):
    source = Source(device)
    parts = [source.normal((case.size[0], C, *case.size[1:]), case.dtype, True) for C in case.channels]
    y = torch.cat(parts, 1)
    dy = torch.randn_like(y)

    def expected() -> dict[str, Tensor]:
        return {"y": y.double(), "dx": dy[:, -case.channels[-1] :].double()}

    results = compete(
        CONTENDERS,
        lambda name: ConcatJob(name, parts, dy),
        expected,
        # A concatenation copies.
        {"y": 0.0, "dx": 0.0},
        Timing(device, SECONDS[device.type], ahead=device.type == "cuda"),
        probes={COPY: copy_of(y)},
    )
    report.add("concat", "Concatenation, and the copy of a part of its gradient", str(case), results)
