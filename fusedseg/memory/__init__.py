"""Where the bytes of a training step go: ``profile`` on real tensors, ``estimate`` on none, ``compare``."""

from .compare import Comparison, compare
from .fake import estimate
from .meter import Footprint, LiveBytes, SavedBytes, allocator_peak, measure
from .report import MemoryReport
from .step import profile

__all__ = [
    "Comparison",
    "Footprint",
    "LiveBytes",
    "MemoryReport",
    "SavedBytes",
    "allocator_peak",
    "compare",
    "estimate",
    "measure",
    "profile",
]
