"""Where the bytes of a training step go: ``profile`` on real tensors, ``estimate`` on none, ``compare``, ``plan``."""

from .compare import Comparison, compare
from .fake import estimate
from .meter import Footprint, LiveBytes, SavedBytes, allocator_peak, measure
from .plan import Plan, plan
from .report import MemoryReport
from .step import profile
from .strategy import checkpoint_blocks

__all__ = [
    "Comparison",
    "Footprint",
    "LiveBytes",
    "MemoryReport",
    "Plan",
    "SavedBytes",
    "allocator_peak",
    "checkpoint_blocks",
    "compare",
    "estimate",
    "measure",
    "plan",
    "profile",
]
