"""What modules share that keep their output and invert the activation: which channels are kept beside it."""

from typing import Any

import torch
from torch import Tensor, nn

from ..activation import Activation, parse_invertible
from ..ops import unfused
from ..ops.check import check_dtype
from ..ops.norm.kept import Kept, KeptChannels, serve_compiled_code, watch
from .stock_norm import StockNorm


class Invertible(StockNorm):
    """Before a stock norm among the base classes, which brings ``weight`` and ``bias``."""

    KEEP = "output"
    # the module that errors name instead where an activation cannot be inverted
    EXACT: str

    @classmethod
    def _parse(cls, activation: str, activation_param: float, dtype: torch.dtype | None) -> Activation:
        if dtype is not None:
            check_dtype(cls.OP, "dtype", dtype)
        return parse_invertible(cls.OP, activation, activation_param, cls.EXACT)

    @classmethod
    def from_norm(cls, norm: nn.Module, activation: str = "leaky_relu", activation_param: float = 0.01) -> Any:
        """A module with the very parameters and buffers of the stock ``norm``.

        ``Sequential(norm, activation)`` and the result are the same function.  Optimizers of ``norm`` keep working.
        """
        return cls._from_stock(norm, activation=activation, activation_param=activation_param)

    def _invert(self, act: Activation) -> None:
        """Called at the end of ``__init__``."""
        self.activation = act.name
        self.activation_param = act.param
        self._act = act
        self._kept = KeptChannels()
        # what compiled code uses: it reads these two, and refresh_kept() sets them
        self._kept_count = 0
        self._kept_slots: Tensor | None = None
        # of which dtype the output is, and whether a residual is in it
        self._kept_as = torch.float32, False
        watch(self)

    def _kept_now(self, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype, residual: bool) -> Kept | None:
        """The kept channels of an output of this dtype, None where no backward will come."""
        if not torch.is_grad_enabled() or unfused.wanted():
            return None
        if not torch.compiler.is_compiling():
            return self._kept.refresh(weight, bias, self._act, dtype, residual)
        self._trace_kept(dtype, residual)
        return None if self._kept_slots is None else Kept(self._kept_slots, self._kept_count)

    @unfused.assume_constant_result
    def _trace_kept(self, dtype: torch.dtype, residual: bool) -> bool:
        """Runs once, while the forward is traced."""
        self._kept_as = dtype, residual
        serve_compiled_code()
        self.refresh_kept()
        return True

    def refresh_kept(self) -> None:
        """Finds the kept channels for compiled code, which does so by itself after an optimizer's step only: call this
        after changing the parameters of a compiled model in another way (loading a state dict does)."""
        kept = self._kept.refresh(self.weight, self.bias, self._act, *self._kept_as)
        self._kept_slots, self._kept_count = (None, 0) if kept is None else (kept.slots, kept.count)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self._parameters_replaced()
        return self

    def _load_from_state_dict(self, *args, **kwargs) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._parameters_replaced()

    def _parameters_replaced(self) -> None:
        self._kept.forget()
        self.refresh_kept()

    def __setstate__(self, state) -> None:
        super().__setstate__(state)
        watch(self)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self._act}"
