"""nnU-Net v2: trainers that compile the network, a predictor, and what they are made of.

trainer.py    ``Fused``, the first base class of such a trainer
loss.py       nnU-Net's losses as losses of this package
predictor.py  ``FusedPredictor``: labels without logits of the whole image; the one file whose import needs nnU-Net
resampling.py labels of logits that come in slabs, as nnU-Net resamples them
plans.py      the network, patch and batch of a plans file, for ``fusedseg plan``
trainers/     the folder for ``nnUNet_extTrainer``; it holds nothing but trainers, because nnU-Net forgets the modules
              that it imports from there
"""

from pathlib import Path

from .loss import UnknownLoss, fused_loss
from .trainer import Fused

# The folder that nnU-Net searches for trainers.
TRAINERS = Path(__file__).parent / "trainers"

__all__ = ["TRAINERS", "Fused", "UnknownLoss", "fused_loss"]
