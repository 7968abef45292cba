"""Shows where the bytes of a training step go.

``profile`` runs a step, on real tensors or on tensors without values.  ``compare`` puts reports side by side.
``plan`` finds the batch that fits in a budget, and ``curve`` sets bytes against repeated arithmetic.
"""

from .compare import Comparison, compare
from .curve import Curve, curve
from .fake import profile
from .meter import Footprint, SavedBytes, allocator_peak
from .plan import Plan
from .plot import plot
from .report import MemoryReport
from .search import plan
from .strategy import checkpoint_blocks

__all__ = [
    "Comparison",
    "Curve",
    "Footprint",
    "MemoryReport",
    "Plan",
    "SavedBytes",
    "allocator_peak",
    "checkpoint_blocks",
    "compare",
    "curve",
    "plan",
    "plot",
    "profile",
]


def __dir__() -> list[str]:
    return __all__
