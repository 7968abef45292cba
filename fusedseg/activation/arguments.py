"""Reads the arguments ``activation`` and ``activation_param``, which name a row of the table and its parameter."""

import math
from typing import NamedTuple

from .table import TABLE, is_invertible

# The values of ``activation``: NAMES are all of them, INVERTIBLE are valid for an op that stores its output, EXACT_ONLY
# are valid only for an op that stores its input, and LEARNED have slopes that are learned.
NAMES = tuple(row.name for row in TABLE.values() if row.selected_by is None)
INVERTIBLE = tuple(name for name in NAMES if TABLE[name].inverse is not None)
EXACT_ONLY = tuple(name for name in NAMES if name not in INVERTIBLE)
LEARNED = tuple(name for name in NAMES if TABLE[name].learned)


class Activation(NamedTuple):
    """The name of a row of the table, and the parameter.

    The parameter is 0 for rows without a parameter, and the initial slope for prelu.
    """

    name: str
    param: float

    def __str__(self) -> str:
        """The activation as users write it."""
        row = TABLE[self.name]
        if row.selected_by is not None:
            name, word = row.selected_by
            return f"{name}({word!r})"
        return self.name if row.parameter is None or row.parameter.choices else f"{self.name}({self.param})"


IDENTITY = Activation("identity", 0.0)


def _check_name(op: str, name: str, names: tuple[str, ...]) -> None:
    if not isinstance(name, str):
        raise TypeError(f"{op}: activation must be a string, one of {', '.join(names)}, got {name!r}")
    if name not in names:
        raise ValueError(f"{op}: activation must be one of {', '.join(names)}, got {name!r}")


def _check_number(op: str, name: str, what: str, param: object) -> float:
    if isinstance(param, bool) or not isinstance(param, (int, float)) or not math.isfinite(param):
        raise TypeError(f"{op}: activation_param must be a finite number, the {what} of {name}, got {param!r}")
    return float(param)


def _no_parameter(op: str, name: str, param: object) -> ValueError:
    return ValueError(f"{op}: activation {name!r} has no parameter; leave activation_param out, got {param!r}")


def parse_activation(op: str, name: str, param: float | str | None = None) -> Activation:
    """The activation of an op that stores its input, which is exact for all activations.

    ``param`` is a number for leaky_relu, elu and prelu, and "none" or "tanh" for gelu; None means the stock default.
    It must be None for an activation without a parameter.  Identity ignores it, as in ``parse_invertible``.
    """
    _check_name(op, name, NAMES)
    parameter = TABLE[name].parameter
    if parameter is None:
        if param is not None and not TABLE[name].identity:
            raise _no_parameter(op, name, param)
        return Activation(name, 0.0)
    if parameter.choices is not None:
        if param not in (None, *parameter.choices):
            words = " or ".join(map(repr, parameter.choices))
            raise ValueError(f"{op}: activation_param of {name} must be {words}, its {parameter.name}, got {param!r}")
        return Activation(parameter.choices[str(param or parameter.default)], 0.0)
    return Activation(name, parameter.default if param is None else _check_number(op, name, parameter.name, param))


def parse_invertible(op: str, name: str, param: float, exact: str = "BatchNormAct") -> Activation:
    """The activation of an op that stores its output.

    Raises ValueError if the activation cannot be inverted; the error names the module ``exact``, which is exact for it.

    In every signature ``param`` has a default, which is the slope of leaky_relu.  So activations without a parameter
    accept this default, and also 0, which ``Activation`` holds for them, but no other number.  Identity accepts any
    number.
    """
    if name in EXACT_ONLY:
        raise ValueError(f"{op}: activation {name!r} cannot be inverted; use fusedseg.{exact}, which is exact for it")
    _check_name(op, name, INVERTIBLE)
    parameter = TABLE[name].parameter
    if parameter is None:
        if not TABLE[name].identity and param not in (None, 0.0, 0.01):
            raise _no_parameter(op, name, param)
        return Activation(name, 0.0)
    value = _check_number(op, name, parameter.name, param)
    if not is_invertible(name, value):
        raise ValueError(
            f"{op}: {name} with {parameter.name} {param} cannot be inverted (the {parameter.name} must be > 0); "
            f"use fusedseg.{exact}, which is exact for it"
        )
    return Activation(name, value)


def check_slope_given(op: str, act: Activation, slope: object) -> None:
    """Raises ValueError unless ``slope`` is given, and is not None, exactly if the activation has learned slopes."""
    if (slope is not None) != TABLE[act.name].learned:
        raise ValueError(
            f"{op}: slope must be given for activation {' or '.join(map(repr, LEARNED))} and for no other, "
            f"got activation {act.name!r}"
        )
