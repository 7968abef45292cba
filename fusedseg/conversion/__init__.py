"""Converts stock models into lean models and back, and reports each change and its reason."""

from .convert import convert
from .report import ConversionReport, Row
from .revert import revert
from .verify import Difference, Verification

__all__ = ["ConversionReport", "Difference", "Row", "Verification", "convert", "revert"]
