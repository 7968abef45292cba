"""Activation functions, parsed in one place."""

import math
from typing import NamedTuple

INVERTIBLE = ("leaky_relu", "elu", "identity")
EXACT_ONLY = ("relu", "silu", "gelu", "mish", "hardswish", "relu6", "prelu")


class Activation(NamedTuple):
    """A name and its parameter: the negative slope of leaky_relu, the alpha of elu, 0 for identity."""

    name: str
    param: float


def parse_invertible(op: str, name: str, param: float) -> Activation:
    """The activation of an op that stores its output; ValueError for one that cannot be inverted."""
    if not isinstance(name, str):
        raise TypeError(f"{op}: activation must be a string, one of {', '.join(INVERTIBLE)}, got {name!r}")
    if name in EXACT_ONLY:
        raise ValueError(
            f"{op}: activation {name!r} cannot be inverted; use fusedseg.BatchNormAct, which is exact for it"
        )
    if name not in INVERTIBLE:
        raise ValueError(f"{op}: activation must be one of {', '.join(INVERTIBLE)}, got {name!r}")
    if name == "identity":
        return Activation(name, 0.0)
    what = "slope" if name == "leaky_relu" else "alpha"
    if isinstance(param, bool) or not isinstance(param, (int, float)) or not math.isfinite(param):
        raise TypeError(f"{op}: activation_param must be a finite number, the {what} of {name}, got {param!r}")
    if param <= 0:
        raise ValueError(
            f"{op}: {name} with {what} {param} cannot be inverted (the {what} must be > 0); "
            "use fusedseg.BatchNormAct, which is exact for it"
        )
    return Activation(name, float(param))
