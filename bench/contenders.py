"""The stock layers that ours competes with, and how a module is treated before it runs."""

from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, nn

from fusedseg.memory import checkpoint_blocks

from .harness import Missing

Treat = Callable[[nn.Module], nn.Module]
SLOPE = 0.01


def inductor(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(graph, inputs)


class Compiled(nn.Module):
    """``torch.compile`` of a module; ``config`` has settings of the partitioner that differ from the defaults.

    Each instance has its own backend function, because dynamo caches by code object and backend.  An error of Inductor,
    for example without a C++ compiler, becomes ``Missing``.
    """

    def __init__(self, module: nn.Module, backend: Callable[..., Any] = inductor, **config: Any) -> None:
        super().__init__()
        self.module = module

        def own(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
            with torch._functorch.config.patch(**config):
                return backend(graph, inputs)

        # The shapes of a bench do not change.
        self.compiled = torch.compile(module, backend=own, dynamic=False)
        self.works = False

    def forward(self, x: Tensor) -> Tensor:
        if self.works:
            return self.compiled(x)
        try:
            out = self.compiled(x)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            # Dynamo's own error only says that the backend failed.
            cause = getattr(error, "inner_exception", error)
            first = next(iter(str(cause).strip().splitlines()), "")
            raise Missing(f"torch.compile failed: {type(cause).__name__}: {first}") from error
        self.works = True
        return out


class Foreign(nn.Module):
    """A layer of another package; what it does not take, for example a dtype, makes it ``Missing``."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.module(x)
        except (RuntimeError, NotImplementedError) as error:
            raise Missing(f"{type(self.module).__module__}: {str(error).partition(chr(10))[0]}") from error


def as_it_is(module: nn.Module) -> nn.Module:
    return module


def compiled(module: nn.Module) -> nn.Module:
    return Compiled(module)


def aggressive(module: nn.Module) -> nn.Module:
    return Compiled(module, aggressive_recomputation=True)


def checkpointed(module: nn.Module) -> nn.Module:
    """The network with blocks that keep only their inputs, and run again in backward."""
    checkpoint_blocks(module)
    return module


def batch_norm(dims: int, channels: int) -> nn.Module:
    return {2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[dims](channels)


def instance_norm(dims: int, channels: int) -> nn.Module:
    return {2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}[dims](channels, affine=True)


def leaky(dims: int, norm: Callable[[int, int], nn.Module] = batch_norm) -> Callable[[int], nn.Module]:
    """The module after a convolution of the stock networks, for a number of channels."""
    return lambda channels: nn.Sequential(norm(dims, channels), nn.LeakyReLU(SLOPE, inplace=True))


def relu(dims: int) -> Callable[[int], nn.Module]:
    return lambda channels: nn.Sequential(batch_norm(dims, channels), nn.ReLU(inplace=True))
