"""How many bytes a training step keeps for backward and how many are alive at once."""

from .meter import Footprint, LiveBytes, SavedBytes, allocator_peak, measure
from .report import MemoryReport
from .step import profile

__all__ = ["Footprint", "LiveBytes", "MemoryReport", "SavedBytes", "allocator_peak", "measure", "profile"]
