"""The base class of modules that keep their output and invert the activation: it finds the kept channels."""

from typing import Any

import torch
from torch import Tensor, nn

from ..activation import parse_invertible
from ..ops import unfused
from ..ops.norm.kept import Kept, KeptChannels, Refreshed, serve_compiled_code, watch
from .stock_norm import StockNorm


class Invertible(Refreshed, StockNorm):
    """A base class that stands before a stock norm, which brings ``weight`` and ``bias``."""

    KEEP = "output"
    # The module that errors recommend if an activation cannot be inverted.
    EXACT: str

    def __init__(self, *stock: object, activation: str, activation_param: float, **options: Any) -> None:
        act = parse_invertible(self.OP, activation, activation_param, self.EXACT)
        super().__init__(*stock, **options)
        self.activation = act.name
        self.activation_param = act.param
        self._act = act
        self._kept = KeptChannels()
        # Compiled code reads these two attributes, and refresh_kept() sets them.
        self._kept_count = 0
        self._kept_slots: Tensor | None = None
        # The dtype of the output, and whether a residual is added to it.
        self._kept_as = torch.float32, False
        watch(self)

    @classmethod
    def from_norm(cls, norm: nn.Module, activation: str = "leaky_relu", activation_param: float = 0.01) -> Any:
        """Makes a module that shares the parameters and buffers of the stock ``norm``.

        ``Sequential(norm, activation)`` and the result are the same function.  Optimizers of ``norm`` keep working.

        Raises:
            TypeError: ``norm`` is not one of the stock norms that the module stands for.
            ValueError: the activation cannot be inverted.
        """
        return cls._from_stock(norm, activation=activation, activation_param=activation_param)

    def _kept_now(self, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype, residual: bool) -> Kept | None:
        """The kept channels of an output of this dtype; None if there are none, or if no backward will follow."""
        if not torch.is_grad_enabled() or unfused.wanted():
            return None
        if not torch.compiler.is_compiling():
            return self._kept_eagerly(weight, bias, dtype, residual)
        self._trace_kept(dtype, residual)
        return None if self._kept_slots is None else Kept(self._kept_slots, self._kept_count)

    def _kept_eagerly(
        self, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype, residual: bool
    ) -> Kept | None:
        return self._kept.refresh(weight, bias, self._act, dtype, residual) if torch.is_grad_enabled() else None

    @unfused.assume_constant_result
    def _trace_kept(self, dtype: torch.dtype, residual: bool) -> bool:
        """Finds the kept channels for compiled code; it runs once, while the forward is traced."""
        self._kept_as = dtype, residual
        serve_compiled_code()
        self.refresh_kept()
        return True

    def refresh_kept(self) -> None:
        """Finds the kept channels for compiled code.

        After an optimizer's step, and after a state dict was loaded, this is called automatically.  Call it yourself
        after you change the parameters of a compiled model in another way.
        """
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
