"""Activation functions: what the package knows about each (``table.py``), and how arguments name them."""

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
