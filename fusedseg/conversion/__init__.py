"""Stock models into lean ones and back, with a report of what was done and why."""

from .convert import convert
from .report import ConversionReport, Row
from .revert import revert
from .verify import Difference, Verification

__all__ = ["ConversionReport", "Difference", "Row", "Verification", "convert", "revert"]
