"""Who competes: each contender's norm and activation, and what is done to the module that holds them."""

from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, nn

import fusedseg

from .harness import Missing

BATCH_NORM = {2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
SLOPE = 0.01


class Compiled(nn.Module):
    """``torch.compile`` of a module, by the default partitioner or the one that recomputes all it can.

    A backend of its own keeps the two apart: dynamo caches by code object and backend.  What Inductor raises without a
    C++ compiler becomes ``Missing``.
    """

    def __init__(self, module: nn.Module, aggressive: bool) -> None:
        super().__init__()
        self.module = module

        def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
            from torch._inductor.compile_fx import compile_fx

            with torch._functorch.config.patch(aggressive_recomputation=aggressive):
                return compile_fx(graph, inputs)

        # the shapes of a bench do not change
        self.compiled = torch.compile(module, backend=backend, dynamic=False)
        self.works = False

    def forward(self, x: Tensor) -> Tensor:
        if self.works:
            return self.compiled(x)
        try:
            out = self.compiled(x)
        except Exception as error:
            raise Missing(f"torch.compile failed: {type(error).__name__}: {str(error).splitlines()[0]}") from error
        self.works = True
        return out


def leaky(dims: int) -> Callable[[int], nn.Module]:
    return lambda channels: nn.Sequential(BATCH_NORM[dims](channels), nn.LeakyReLU(SLOPE, inplace=True))


def relu(dims: int) -> Callable[[int], nn.Module]:
    return lambda channels: nn.Sequential(BATCH_NORM[dims](channels), nn.ReLU(inplace=True))


def published(dims: int) -> Callable[[int], nn.Module]:
    try:
        from inplace_abn import InPlaceABN  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise Missing("the inplace_abn package is not installed") from error
    return InPlaceABN


def ours(dims: int) -> Callable[[int], nn.Module]:
    return fusedseg.InPlaceABN


def as_it_is(module: nn.Module) -> nn.Module:
    return module


def compiled(module: nn.Module) -> nn.Module:
    return Compiled(module, aggressive=False)


def aggressive(module: nn.Module) -> nn.Module:
    return Compiled(module, aggressive=True)


# name: (norm and activation for a number of dimensions, what is done to the module)
CONTENDERS = {
    "eager": (leaky, as_it_is),
    "relu": (relu, as_it_is),
    "compiled": (leaky, compiled),
    "aggressive": (leaky, aggressive),
    "inplace_abn": (published, as_it_is),
    "ours": (ours, as_it_is),
}
