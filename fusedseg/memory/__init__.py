"""How many bytes a training step keeps for backward and how many are alive at once."""

from .meter import Footprint, LiveBytes, SavedBytes, allocator_peak, measure

__all__ = ["Footprint", "LiveBytes", "SavedBytes", "allocator_peak", "measure"]
