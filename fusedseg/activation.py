"""Activation functions, parsed in one place."""

import math
from typing import NamedTuple

# these have an inverse, for suitable parameters, so that an op may store its output
INVERTIBLE = ("leaky_relu", "elu", "identity")
# these do not: an op stores its input
EXACT_ONLY = ("relu", "silu", "gelu", "mish", "hardswish", "relu6", "prelu")
NAMES = (*INVERTIBLE, *EXACT_ONLY)

# what ``activation_param`` is, and the stock module's default for it
PARAMETERS = {"leaky_relu": ("slope", 0.01), "elu": ("alpha", 1.0), "prelu": ("initial slope", 0.25)}
GELU = {"none": "gelu", "tanh": "gelu_tanh"}


class Activation(NamedTuple):
    """A name and its parameter: the negative slope of leaky_relu, the alpha of elu, the initial slope of prelu (which
    is learned), 0 for the others.  GELU by its approximation is two of them, "gelu" and "gelu_tanh"."""

    name: str
    param: float

    def __str__(self) -> str:
        """As users wrote it."""
        if self.name == "gelu_tanh":
            return "gelu('tanh')"
        return f"{self.name}({self.param})" if self.name in PARAMETERS else self.name


def _check_name(op: str, name: str, names: tuple[str, ...]) -> None:
    if not isinstance(name, str):
        raise TypeError(f"{op}: activation must be a string, one of {', '.join(names)}, got {name!r}")
    if name not in names:
        raise ValueError(f"{op}: activation must be one of {', '.join(names)}, got {name!r}")


def _check_number(op: str, name: str, param: object) -> float:
    if isinstance(param, bool) or not isinstance(param, (int, float)) or not math.isfinite(param):
        what = PARAMETERS[name][0]
        raise TypeError(f"{op}: activation_param must be a finite number, the {what} of {name}, got {param!r}")
    return float(param)


def parse_activation(op: str, name: str, param: float | str | None = None) -> Activation:
    """The activation of an op that stores its input, which is exact for all of them; None: the stock default.

    ``param``: a number for leaky_relu, elu and prelu, "none" or "tanh" for gelu, None for the others; identity takes no
    notice of it, as in ``parse_invertible``.
    """
    _check_name(op, name, NAMES)
    if name == "identity":
        return Activation(name, 0.0)
    if name == "gelu":
        if param not in (None, *GELU):
            raise ValueError(
                f"{op}: activation_param of gelu must be 'none' or 'tanh', its approximation, got {param!r}"
            )
        return Activation(GELU[param or "none"], 0.0)
    if name in PARAMETERS:
        return Activation(name, PARAMETERS[name][1] if param is None else _check_number(op, name, param))
    if param is not None:
        raise ValueError(f"{op}: activation {name!r} has no parameter, activation_param must be None, got {param!r}")
    return Activation(name, 0.0)


def parse_invertible(op: str, name: str, param: float, exact: str = "BatchNormAct") -> Activation:
    """The activation of an op that stores its output; ValueError for one that cannot be inverted, which names the
    module that is exact for it."""
    if name in EXACT_ONLY:
        raise ValueError(f"{op}: activation {name!r} cannot be inverted; use fusedseg.{exact}, which is exact for it")
    _check_name(op, name, INVERTIBLE)
    if name == "identity":
        return Activation(name, 0.0)
    value = _check_number(op, name, param)
    if value <= 0:
        what = PARAMETERS[name][0]
        raise ValueError(
            f"{op}: {name} with {what} {param} cannot be inverted (the {what} must be > 0); "
            f"use fusedseg.{exact}, which is exact for it"
        )
    return Activation(name, value)
