"""The base class of all norm modules: the forward pass, and the conversion from a stock norm and back."""

import sys
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from .._module_hooks import has_backward_hooks
from ..activation import Activation
from ..ops.check import check_dtype, check_tensor
from ..ops.norm.call import Norm, Operands
from ..ops.norm.checks import check
from ..ops.norm.eager import normalise
from ..ops.norm.kept import Kept, recomputing
from ..ops.norm.stock import INSTANCE_NORM, Kind
from .unscriptable import Unscriptable

COUNTED = "running_mean", "running_var", "num_batches_tracked"


class StockNorm(Unscriptable, nn.Module):
    """The base class of all norm modules.

    It stands before the stock norm, which brings parameters, buffers and settings.
    """

    # The name of the module in errors, and the tensor that it keeps: the "output" or the "input".
    OP: str
    KEEP: str
    # The stock norms.
    KIND: Kind

    weight: Any
    bias: Any
    eps: float
    _act: Activation

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

    def _call(self, x: Tensor, residual: Tensor | None) -> tuple[Operands, Norm]:
        """The call of the norm op for x and a residual."""
        # A forward pass that is computed again moves no running statistics.
        moves = not self.training or not recomputing()
        return self.KIND.call(self, x, self._act, self.KEEP, residual, self._slope(), moves, self._others())

    def _slope(self) -> Tensor | None:
        """The slope of prelu."""
        return None

    def _others(self) -> str | None:
        """The name of the process group whose members share the statistics, or None."""
        return None

    def _kept_now(self, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype, residual: bool) -> Kept | None:
        """The kept channels of an output of this dtype; None for a module that keeps its input."""
        return None

    def _check_shape(self, x: Tensor) -> None:
        """Raises an error.  It only warns if the channels are wrong and do not matter, as the stock norms do."""
        check_tensor(self.OP, x)
        (least, most), channels = self.KIND.dims, getattr(self, self.KIND.channels)
        fits = least <= x.dim() <= most
        if fits and x.shape[1] == channels:
            return
        text = f"{self.OP}: x must have shape (N, {channels}) {self.KIND.spatial}, got {tuple(x.shape)}"
        # Without parameters and running statistics, an instance norm takes any number of channels.
        if not fits or self.KIND is not INSTANCE_NORM or self.affine or self.running_mean is not None:
            raise ValueError(text)
        # The caller of the module is five frames above.
        warnings.warn(f"{text}; the number of channels makes no difference, since affine is False", stacklevel=5)

    @classmethod
    def _from_stock(cls, norm: nn.Module, **options: Any) -> Any:
        """Makes a module of this class with these options that shares the parameters and buffers of ``norm``."""
        if type(norm) not in cls.KIND.modules:
            names = ", ".join(f"nn.{c.__name__}" for c in cls.KIND.modules)
            raise TypeError(f"{cls.OP}.from_norm: norm must be one of {names}, got {type(norm).__name__}")
        return _sharing(norm, cls.KIND, cls, **options)

    def to_norm(self, dims: int = 2) -> nn.Module:
        """Makes the stock norm for ``dims`` spatial dimensions, which shares this module's parameters and buffers.

        The activation is not part of it, and must follow it.

        Raises:
            ValueError: ``dims`` is not 1, 2 or 3.
        """
        if dims not in (1, 2, 3):
            raise ValueError(f"{self.OP}.to_norm: dims must be 1, 2 or 3, got {dims!r}")
        return _sharing(self, self.KIND, self.KIND.module(dims))


class OfBatch:
    """A base class of the modules that are a ``_BatchNorm``.

    Code that searches a model for BatchNorms, such as ``swa_utils.update_bn``, finds these modules.
    ``nn.SyncBatchNorm.convert_sync_batchnorm``, and functions of this name in other libraries, find them too, and would
    replace them by norms without an activation.  The property ``qconfig`` makes them raise an error.
    """

    @property
    def qconfig(self) -> Any:
        """The attribute that PyTorch's quantisation sets on modules.

        ``convert_sync_batchnorm`` of PyTorch asks for it by ``hasattr``, which lets every error pass except
        AttributeError, and so do the copies of this function in other libraries, such as timm.  No other attribute that
        they read could raise an error without harm to other code.  Only the frame of the caller shows who asks, because
        ``torch.ao.quantization.prepare`` asks every module for this attribute as well.
        """
        if sys._getframe(1).f_code.co_name == "convert_sync_batchnorm":
            name = f"fusedseg.{type(self).__name__}"
            raise RuntimeError(
                f"{name}: convert_sync_batchnorm would replace this module by a norm without its "
                "activation; call fusedseg.convert_sync(model) instead, which serves plain BatchNorms as well"
            )
        try:
            return self.__dict__["qconfig"]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} has no qconfig") from None

    @qconfig.setter
    def qconfig(self, value: object) -> None:
        self.__dict__["qconfig"] = value

    @qconfig.deleter
    def qconfig(self) -> None:
        del self.__dict__["qconfig"]


def _sharing(norm: Any, kind: Kind, cls: Any, **options: Any) -> Any:
    """Makes a module of a class with the settings of ``norm``, which shares its parameters and buffers."""
    if kind.own:
        options["track_running_stats"] = False
    made = cls(*kind.settings(norm), affine=False, **options)
    made.affine, made.weight, made.bias = norm.affine, norm.weight, norm.bias
    if kind.own:
        made.track_running_stats = norm.track_running_stats
        for name in COUNTED:
            # Without this, a buffer that was registered as None would take another place in the state dict.
            delattr(made, name)
            made.register_buffer(name, norm._buffers[name])
    return made.train(norm.training)
