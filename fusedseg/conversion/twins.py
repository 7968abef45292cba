"""Finds the fused module for stock modules, and turns a module into its fused form in place.

A module stays the same object and changes its class.  Therefore every name under which it is registered, its
parameters, buffers, hooks and mode, and all references to it from elsewhere stay valid.
"""

import math
from typing import NamedTuple

from torch import nn

from .._module_hooks import has_hooks, is_observed
from ..activation import OF_MODULE, is_invertible
from ..nn import MaxPool2d, MaxPool3d
from .norms import NORM_OF_CONV, STORE_INPUT, STORE_OUTPUT

POOLS: dict[type, type] = {nn.MaxPool2d: MaxPool2d, nn.MaxPool3d: MaxPool3d}
STOCK = "_fusedseg_stock"


class ActivationArguments(NamedTuple):
    """An activation as the arguments of a fused module."""

    name: str
    param: float | str | None

    def __str__(self) -> str:
        return self.name if self.param is None else f"{self.name}({self.param})"

    @property
    def invertible(self) -> bool:
        return is_invertible(self.name, self.param)


class Refused(Exception):
    """Raised if a module cannot be replaced; the message says why, in words for the report."""


def activation_of(act: nn.Module) -> ActivationArguments:
    """The activation of a stock module; raises Refused if no fused norm has such an activation."""
    row = OF_MODULE.get(type(act))
    if row is None:
        raise Refused(f"there is no fused norm with {type(act).__name__}")
    if row.learned:
        raise Refused(
            f"followed by {type(act).__name__}, whose slope is learned: a fused module would keep as much as the scope "
            "does"
        )
    for attribute, value in row.fixed:
        found = getattr(act, attribute)
        if found != value:
            raise Refused(f"the {attribute} of its activation is {found!r}, and fused norms support only {value!r}")
    if row.parameter is None:
        return ActivationArguments(row.name, None)
    value = getattr(act, row.parameter.attribute)
    return ActivationArguments(row.name, value if row.parameter.choices else _number(row.parameter.name, value))


def _number(what: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise Refused(f"the {what} of its activation is {value!r}, which is not a finite number")
    return float(value)


def check_hooks(module: nn.Module) -> None:
    if has_hooks(module):
        raise Refused(f"{type(module).__name__} has hooks, which would see other tensors")


def check_forward(module: nn.Module) -> None:
    if is_observed(module):
        raise Refused(f"the forward of its {type(module).__name__} was replaced")


def twin_of(norm: nn.Module, activation: ActivationArguments, inplace: bool, of_conv: bool) -> nn.Module:
    """A fused module with the settings of ``norm``, without parameters and buffers.

    ``of_conv`` says that the convolution before the norm may do the norm's work.
    """
    cls = (NORM_OF_CONV if of_conv else STORE_OUTPUT if inplace else STORE_INPUT)[type(norm)]
    act = {"activation": activation.name, "activation_param": activation.param}
    if isinstance(norm, nn.GroupNorm):
        return cls(norm.num_groups, norm.num_channels, norm.eps, False, **act)
    return cls(norm.num_features, norm.eps, norm.momentum, False, False, **act)


class Stock(NamedTuple):
    """The class that a module had, and what was added: attributes, and (holder, name) of parameters and buffers."""

    cls: type
    added: tuple[str, ...]
    slots: tuple[tuple[str, str], ...]


def become(module: nn.Module, twin: nn.Module) -> None:
    """Changes the class of ``module`` to that of ``twin``, and adds the attributes of ``twin`` that the module lacks.

    Parameters and buffers that the module lacks are added as None.
    """
    new = {name: value for name, value in twin.__dict__.items() if name not in module.__dict__}
    slots = tuple(
        (holder, name)
        for holder in ("_parameters", "_buffers")
        for name in twin.__dict__[holder]
        if name not in module.__dict__[holder]
    )
    for holder, name in slots:
        module.__dict__[holder][name] = None
    new[STOCK] = Stock(type(module), (*new, STOCK), slots)
    module.__class__ = type(twin)
    # `__setstate__` completes an object that the class has not made, as after unpickling.
    module.__setstate__(new)


def become_stock(module: nn.Module) -> None:
    """Gives the module back the class and the attributes that it had before ``become``."""
    stock = module.__dict__[STOCK]
    module.__class__ = stock.cls
    for name in stock.added:
        module.__dict__.pop(name, None)
    for holder, name in stock.slots:
        module.__dict__[holder].pop(name, None)
