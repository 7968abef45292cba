"""Activation functions: a table of their properties (``table.py``), and the arguments that name them."""

from .arguments import EXACT_ONLY, INVERTIBLE, NAMES, Activation, parse_activation, parse_invertible
from .table import OF_MODULE, OTHERS, TABLE, Inverse, Row, is_invertible

__all__ = [
    "EXACT_ONLY",
    "INVERTIBLE",
    "NAMES",
    "OF_MODULE",
    "OTHERS",
    "TABLE",
    "Activation",
    "Inverse",
    "Row",
    "is_invertible",
    "parse_activation",
    "parse_invertible",
]
