"""Shows where the bytes of a training step go.

``profile`` runs a step on real tensors, ``estimate`` on tensors without values.  ``compare`` puts reports side by side.
``plan`` finds the batch that fits in a budget, and ``curve`` sets bytes against repeated arithmetic.
"""

from .compare import Comparison, compare
from .curve import Curve, curve
from .fake import estimate
from .meter import Footprint, LiveBytes, SavedBytes, allocator_peak, measure
from .plan import Plan
from .report import MemoryReport
from .search import plan
from .step import profile
from .strategy import checkpoint_blocks

__all__ = [
    "Comparison",
    "Curve",
    "Footprint",
    "LiveBytes",
    "MemoryReport",
    "Plan",
    "SavedBytes",
    "allocator_peak",
    "checkpoint_blocks",
    "compare",
    "curve",
    "estimate",
    "measure",
    "plan",
    "profile",
]
