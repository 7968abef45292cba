"""Activation functions: a table of their properties (``table.py``), and the arguments that name them."""

from .arguments import (
    EXACT_ONLY,
    IDENTITY,
    INVERTIBLE,
    NAMES,
    Activation,
    check_slope_given,
    parse_activation,
    parse_invertible,
)
from .table import OF_MODULE, TABLE, ActivationRow, Inverse, is_invertible

__all__ = [
    "EXACT_ONLY",
    "IDENTITY",
    "INVERTIBLE",
    "NAMES",
    "OF_MODULE",
    "TABLE",
    "Activation",
    "ActivationRow",
    "Inverse",
    "check_slope_given",
    "is_invertible",
    "parse_activation",
    "parse_invertible",
]
