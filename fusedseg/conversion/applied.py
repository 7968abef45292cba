"""Modules that stand in for an activation whose work a fused norm does.

They are subclasses of the activations that they replace, so that code that looks for ``nn.LeakyReLU`` finds them.  If
such code replaces the module or sets its parameter, the next forward raises an error; the change does not go unnoticed.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..activation import OF_MODULE
from ..nn.stock_norm import Aside
from ..ops.unfused import assume_constant_result


def mark_applied(out: Tensor) -> Tensor:
    """Marks the output of a fused norm whose activation module is also called elsewhere: its work is done."""
    if torch.compiler.is_compiling():
        # The compiler follows attributes only of tensors that an op with a single output has made.
        out = out.view_as(out)
    # The attribute is set by name, because the compiler follows neither setattr() nor a deletion.
    out._fusedseg_applied = True  # type: ignore[attr-defined]
    return out


class _DoneByNorm(nn.Module):
    """The first base class of ``Applied`` and ``AppliedOnce``; the second one is the activation's stock class."""

    # The activation's class, and the name of its parameter.
    _stock: type[nn.Module]
    _parameter: str | None
    # The attributes that must have a certain value, as in the activation's row of the table.
    _fixed: tuple[tuple[str, Any], ...]
    # The value of the parameter that the norm applies, and the path at which the activation was found.
    _fusedseg_value: object
    _fusedseg_path: str
    # Shared with the norms that do the work.
    _fusedseg_aside: Aside

    def _check_parameter(self) -> None:
        if self._parameter is not None and getattr(self, self._parameter) != self._fusedseg_value:
            self._refuse()
        for attribute, value in self._fixed:
            if getattr(self, attribute) != value:
                self._refuse()

    # torch.compile cannot format a number, so it must not trace this method.
    @assume_constant_result
    def _refuse(self) -> NoReturn:
        expected = dict(self._fixed)
        if self._parameter is not None:
            expected[self._parameter] = self._fusedseg_value
        name, value = next((name, value) for name, value in expected.items() if getattr(self, name) != value)
        raise RuntimeError(
            f"fusedseg.convert: {name} of {self._fusedseg_path or 'the model'} was set to "
            f"{getattr(self, name)!r} after the model was converted, but the norm before it applies "
            f"{value!r}; call fusedseg.convert on the model again, or fusedseg.revert before such a "
            "change"
        )


class Applied(_DoneByNorm):
    """Stands in for an activation that fused norms apply before every call of it; returns its input."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        self._check_parameter()
        return super().forward(input) if self._fusedseg_aside.now else input

    def extra_repr(self) -> str:
        return f"{self._stock.__name__}, done by the norm before it"


class AppliedOnce(_DoneByNorm):
    """Stands in for an activation that fused norms apply before some of its calls; returns a marked input unchanged."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        self._check_parameter()
        if getattr(input, "_fusedseg_applied", False):
            input._fusedseg_applied = False  # type: ignore[attr-defined]
            return input
        return super().forward(input)

    def extra_repr(self) -> str:
        return f"{self._stock.__name__}, where no norm before it has done it"


def _subclasses(base: type[_DoneByNorm]) -> dict[type, Any]:
    """Makes a subclass of ``base`` and each known activation; returns the subclasses by the activation's class.

    They print as ``base`` does.  Pickle finds them in this module under names such as ``AppliedReLU``.
    """
    made: dict[type, Any] = {}
    for cls, row in OF_MODULE.items():
        if row.learned:
            # ``activation_of`` refuses this activation.
            continue
        qualname = base.__name__ + cls.__name__
        parameter = None if row.parameter is None else row.parameter.attribute
        names = {"__module__": __name__, "__qualname__": qualname, "_stock": cls, "_parameter": parameter}
        names["_fixed"] = row.fixed
        made[cls] = globals()[qualname] = type(base.__name__, (base, cls), names)
    return made


APPLIED, APPLIED_ONCE = _subclasses(Applied), _subclasses(AppliedOnce)


def applied(act: nn.Module, path: str, aside: Aside, once: bool) -> nn.Module:
    """The module that ``act`` becomes: an ``AppliedOnce`` if ``once``, otherwise an ``Applied``."""
    cls = (APPLIED_ONCE if once else APPLIED)[type(act)]
    twin = cls.__new__(cls)
    nn.Module.__init__(twin)
    twin._fusedseg_value = None if cls._parameter is None else getattr(act, cls._parameter)
    twin._fusedseg_path, twin._fusedseg_aside = path, aside
    return twin
