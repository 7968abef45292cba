"""The instruments: what a training step keeps and needs, measured on real tensors or on tensors without values.

``fusedseg.profile`` and ``fusedseg.plan`` stand on them and on the byte model of the compiler.
"""

from .checkpoint import checkpoint_blocks
from .fake import fake_mode
from .meter import Footprint, SavedBytes, allocator_peak, measure

__all__ = ["Footprint", "SavedBytes", "allocator_peak", "checkpoint_blocks", "fake_mode", "measure"]


__dir__ = __all__.copy
