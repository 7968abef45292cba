"""The base class of all norm modules: the forward pass, and the conversion from a stock norm and back."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .._module_hooks import has_backward_hooks
from ..activation import Activation
from ..ops.check import check_dtype, check_tensor
from ..ops.norm.call import Norm, Operands
from ..ops.norm.checks import check
from ..ops.norm.eager import normalise
from ..ops.norm.kept import Kept
from .norm_statistics import COUNTED
from .unscriptable import Unscriptable


class StockNorm(Unscriptable, nn.Module):
    """The base class of all norm modules.

    It stands before a class of ``norm_statistics.py`` and before the stock norm, which brings parameters, buffers and
    settings.
    """

    # The name of the module in errors, and the tensor that it keeps: the "output" or the "input".
    OP: str
    KEEP: str
    # The number of channels, the least and the largest number of dimensions of x, the words for them in errors, and
    # whether x must have that number of channels.
    _channels: int
    DIMS: tuple[int, int]
    SPATIAL: str
    channels_matter: bool
    # The classes of the stock norms.  If there are several, they are in the order of their spatial dimensions.
    stock: Any

    weight: Any
    bias: Any
    eps: float
    _act: Activation
    # The call of the norm op for x and a residual.
    _call: Callable[[Tensor, Tensor | None], tuple[Operands, Norm]]

    def __init__(self, *stock: object, bias: bool = True, dtype: torch.dtype | None = None, **options: object) -> None:
        """``stock`` and ``options`` are arguments of the stock norm."""
        if dtype is not None:
            check_dtype(self.OP, "dtype", dtype)
        if not bias:
            # The stock norms of older PyTorch versions do not have this argument.
            options["bias"] = False
        super().__init__(*stock, dtype=dtype, **options)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        self._check_shape(x)
        given, norm = self._call(x, residual)
        if norm.keep == "output" and not torch.compiler.is_compiling() and x._is_view() and has_backward_hooks(self):
            # Nobody may write over a view that a backward hook has made.
            given = given.with_x(x.clone())
        check(self.OP, given, norm)
        return normalise(given, norm, self._kept_now(given.weight, given.bias, x.dtype, residual is not None))

    def _kept_now(self, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype, residual: bool) -> Kept | None:
        """The kept channels of an output of this dtype; None for a module that keeps its input."""
        return None

    def _check_shape(self, x: Tensor) -> None:
        """Raises an error.  It only warns if the channels are wrong and do not matter, as the stock norms do."""
        check_tensor(self.OP, x)
        fits = self.DIMS[0] <= x.dim() <= self.DIMS[1]
        if fits and x.shape[1] == self._channels:
            return
        text = f"{self.OP}: x must have shape (N, {self._channels}) {self.SPATIAL}, got {tuple(x.shape)}"
        if not fits or self.channels_matter:
            raise ValueError(text)
        # The caller of the module is five frames above.
        warnings.warn(f"{text}; the number of channels makes no difference, since affine is False", stacklevel=5)

    @classmethod
    def _from_stock(cls, norm: nn.Module, **options: Any) -> Any:
        """Makes a module of this class with these options that shares the parameters and buffers of ``norm``."""
        if type(norm) not in cls.stock:
            names = ", ".join(f"nn.{c.__name__}" for c in cls.stock)
            raise TypeError(f"{cls.OP}.from_norm: norm must be one of {names}, got {type(norm).__name__}")
        made = cls(*_arguments(norm), **options)
        _adopt(made, norm)
        return made

    def to_norm(self, dims: int = 2) -> nn.Module:
        """Makes the stock norm for ``dims`` spatial dimensions, which shares this module's parameters and buffers.

        The activation is not part of it, and must follow it.

        Raises:
            ValueError: ``dims`` is not 1, 2 or 3.
        """
        if dims not in (1, 2, 3):
            raise ValueError(f"{self.OP}.to_norm: dims must be 1, 2 or 3, got {dims!r}")
        norm = self.stock[min(dims, len(self.stock)) - 1](*_arguments(self))
        _adopt(norm, self)
        return norm


def _arguments(norm: nn.Module) -> tuple:
    """The constructor's arguments for a norm without parameters and buffers, which then adopts those of ``norm``."""
    if isinstance(norm, nn.GroupNorm):
        return norm.num_groups, norm.num_channels, norm.eps, False
    return norm.num_features, norm.eps, norm.momentum, False, False


def _adopt(norm: nn.Module, other: nn.Module) -> None:
    norm.affine, norm.weight, norm.bias = other.affine, other.weight, other.bias
    if not isinstance(norm, nn.GroupNorm):
        norm.track_running_stats = other.track_running_stats
        for name in COUNTED:
            # Without this, a buffer that was registered as None would take another place in the state dict.
            delattr(norm, name)
            norm.register_buffer(name, other._buffers[name])
    norm.train(other.training)
