"""Shows where the bytes of a training step go.

``profile`` runs a step on real tensors, ``estimate`` on tensors without values.  ``compare`` puts reports side by side.
``plan`` finds the batch that fits in a budget.
"""

from .compare import Comparison, compare
from .fake import estimate
from .meter import Footprint, LiveBytes, SavedBytes, allocator_peak, measure
from .plan import Plan
from .report import MemoryReport
from .search import plan
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
