"""What all norm modules share: their forward pass, and the way from a stock norm and back to one."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from ..activation import Activation
from ..ops.norm.checks import check
from ..ops.norm.kept import Kept
from ..ops.norm.op import normalise
from ..ops.norm.spec import Passed, Spec
from ..ops.recompute.recipes import unwatched
from .leaf import Unscriptable, as_leaf
from .norm_statistics import Using, looked_up


class StockNorm(Unscriptable, nn.Module):
    """A base class before the stock norm whose parameters, buffers and settings a module has, and before the class of
    ``norm_statistics.py`` that belongs to it."""

    # How errors call the module, and what it keeps: the "output" or the "input".
    OP: str
    KEEP: str
    # Which statistics the norm has, and the attribute that counts its channels.
    KIND: str
    CHANNELS: str
    # The parameters in the order of ``Passed``, of which ``slope`` may be absent.
    VECTORS: tuple[str, ...] = "weight", "bias"
    # the classes of the stock norms, in the order of their spatial dimensions where there are several
    stock: Any

    weight: Any
    bias: Any
    eps: float
    _act: Activation
    _statistics: Callable[[], Using]

    @unwatched
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if isinstance(x, Proxy) or isinstance(residual, Proxy):
            return as_leaf(self, x, residual)
        self._check_shape(x)
        own, running_mean, running_var, momentum, batches, groups = self._statistics()
        weight, bias, *slope = looked_up(self, "_parameters", self.VECTORS)
        passed = Passed(
            x, weight=weight, bias=bias, residual=residual, slope=slope[0] if slope else None,
            running_mean=running_mean, running_var=running_var, batches=batches,
        )  # fmt: skip
        spec = Spec(
            self.KEEP, self._act, eps=self.eps, momentum=momentum, own=own, kind=self.KIND, groups=groups,
            process_group=self._others(),
        )  # fmt: skip
        check(self.OP, passed, spec)
        return normalise(passed, spec, self._kept_now(weight, bias, x.dtype, residual is not None))

    def _others(self) -> str | None:
        """The name of the process group with whose other members the statistics are shared, or None."""
        return None

    def _kept_now(self, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype, residual: bool) -> Kept | None:
        """The kept channels of an output of this dtype."""
        return None

    def _check_shape(self, x: Tensor) -> None:
        channels = getattr(self, self.CHANNELS)
        if not isinstance(x, Tensor) or not 2 <= x.dim() <= 5 or x.shape[1] != channels:
            raise self._wrong_shape(x, f"(N, {channels}) with up to three spatial dimensions after it")

    def _wrong_shape(self, x: Any, expected: str) -> ValueError:
        came = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        return ValueError(f"{self.OP}: input must have shape {expected}, got {came}")

    @classmethod
    def _from_stock(cls, norm: nn.Module, **options: Any) -> Any:
        """A module of this class with these options and the very parameters and buffers of ``norm``."""
        if type(norm) not in cls.stock:
            names = ", ".join(f"nn.{c.__name__}" for c in cls.stock)
            raise TypeError(f"{cls.OP}.from_norm: norm must be one of {names}, got {type(norm).__name__}")
        made = cls(*_arguments(norm), **options)
        _adopt(made, norm)
        return made

    def to_norm(self, dims: int = 2) -> nn.Module:
        """The stock norm, for ``dims`` spatial dimensions, with this module's very parameters and buffers; the
        activation comes after it."""
        if dims not in (1, 2, 3):
            raise ValueError(f"{self.OP}.to_norm: dims must be 1, 2 or 3, got {dims!r}")
        norm = self.stock[min(dims, len(self.stock)) - 1](*_arguments(self))
        _adopt(norm, self)
        return norm


def _arguments(norm: Any) -> tuple:
    """Of a norm without parameters or buffers, which it is to adopt."""
    if isinstance(norm, nn.GroupNorm):
        return norm.num_groups, norm.num_channels, norm.eps, False
    return norm.num_features, norm.eps, norm.momentum, False, False


def _adopt(norm: Any, other: Any) -> None:
    for flag in ("affine", "track_running_stats"):
        if hasattr(other, flag):
            setattr(norm, flag, getattr(other, flag))
    norm.weight, norm.bias = other.weight, other.bias
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        if hasattr(other, name):
            # buffers that were registered as None would otherwise stay out of the state dict's order
            delattr(norm, name)
            norm.register_buffer(name, getattr(other, name))
    norm.train(other.training)
