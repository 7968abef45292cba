"""Which fused module stands for which stock modules, and how a module becomes another in its place.

A module stays the object that it is and changes its class: every name under which it is registered, its parameters,
buffers, hooks and mode stay what they are by construction, and so do references to it from anywhere else.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import nn

from ..nn import MaxPool2d, MaxPool3d
from .norms import NORM_OF_CONV, STORE_INPUT, STORE_OUTPUT

POOLS: dict[type, type] = {nn.MaxPool2d: MaxPool2d, nn.MaxPool3d: MaxPool3d}
# z = phi(z): to call it once more changes nothing
IDEMPOTENT = ("relu", "relu6")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
STOCK = "_fusedseg_stock"


class Spec(NamedTuple):
    """An activation as the arguments of a fused module."""

    name: str
    param: float | str | None

    def __str__(self) -> str:
        return self.name if self.param is None else f"{self.name}({self.param})"

    @property
    def invertible(self) -> bool:
        return self.name in ("leaky_relu", "elu") and self.param > 0  # type: ignore[operator]


class Refused(Exception):
    """A module cannot be replaced; the message says why, in words for the report."""


def spec_of(act: nn.Module) -> Spec:
    """The activation of a stock module; raises Refused where the fused modules have none like it."""
    if type(act) is nn.LeakyReLU:
        return Spec("leaky_relu", _number("slope", act.negative_slope))
    if type(act) is nn.ELU:
        return Spec("elu", _number("alpha", act.alpha))
    if type(act) is nn.GELU:
        return Spec("gelu", act.approximate)
    names = {nn.ReLU: "relu", nn.SiLU: "silu", nn.Mish: "mish", nn.Hardswish: "hardswish", nn.ReLU6: "relu6"}
    if type(act) in names:
        return Spec(names[type(act)], None)
    if type(act) is nn.PReLU:
        # measured: as many bytes, 1 to 4 % more time on a CPU, and no kernel of our own on a GPU
        raise Refused("followed by PReLU, whose slope is learned: a fused module would keep as much as the scope does")
    raise Refused(f"there is no fused norm with {type(act).__name__}")


def _number(what: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise Refused(f"the {what} of its activation is {value!r}, no finite number")
    return float(value)


def check_hooks(module: nn.Module) -> None:
    if any(getattr(module, hooks) for hooks in HOOKS):
        raise Refused(f"{type(module).__name__} has hooks, which would see other tensors")
    if "forward" in module.__dict__:
        raise Refused(f"the forward of its {type(module).__name__} was replaced")


def twin_of(norm: Any, spec: Spec, inplace: bool, of_conv: bool) -> nn.Module:
    """A fused module with the settings of ``norm``, without parameters and buffers.  ``of_conv``: the convolution
    before it may do its work."""
    cls = (NORM_OF_CONV if of_conv else STORE_OUTPUT if inplace else STORE_INPUT)[type(norm)]
    act = {"activation": spec.name, "activation_param": spec.param}
    if isinstance(norm, nn.GroupNorm):
        return cls(norm.num_groups, norm.num_channels, norm.eps, False, **act)
    return cls(norm.num_features, norm.eps, norm.momentum, False, False, **act)


class Stock(NamedTuple):
    """What a module was before, and what was added to it: attributes, and names of parameters and buffers."""

    cls: type
    added: tuple[str, ...]
    slots: tuple[tuple[str, str], ...]


def become(module: nn.Module, twin: nn.Module) -> None:
    """Changes the class to that of ``twin``, and takes over those attributes of it that the module does not have; so
    with parameters and buffers, all of them None."""
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
    # as after unpickling: what a class does for an object that it has not made
    module.__setstate__(new)


def become_stock(module: nn.Module) -> None:
    """The module as ``become`` found it."""
    stock = module.__dict__[STOCK]
    module.__class__ = stock.cls
    for name in stock.added:
        module.__dict__.pop(name, None)
    for holder, name in stock.slots:
        module.__dict__[holder].pop(name, None)
    for key, hook in list(module._forward_hooks.items()):
        if hook is mark_applied:
            del module._forward_hooks[key]


def mark_applied(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
    """The forward hook of a fused norm whose activation module is also called elsewhere: the very tensor says that
    its activation is done."""
    if torch.compiler.is_compiling():
        # attributes are followed of tensors that an op with one output has made
        out = out.view_as(out)
    # by name: neither setattr() nor a deletion is followed
    out._fusedseg_applied = True  # type: ignore[attr-defined]
    return out


class Applied(nn.Module):
    """Stands for an activation that the fused norms before it have applied, in every call: returns what comes."""

    def forward(self, input):  # noqa: A002
        return input

    def extra_repr(self) -> str:
        return f"{self.__dict__[STOCK].cls.__name__}, done by the norm before it"


class AppliedOnce(nn.Module):
    """Stands for an activation that a fused norm has applied in some of its calls: what is marked stays as it is."""

    def forward(self, input):  # noqa: A002
        if getattr(input, "_fusedseg_applied", False):
            input._fusedseg_applied = False
            return input
        return self.__dict__[STOCK].cls.forward(self, input)

    def extra_repr(self) -> str:
        return f"{self.__dict__[STOCK].cls.__name__}, where no norm before it has done it"
