"""nnU-Net v2: trainers that convert the network, and what they are made of.

trainer.py    ``Fused``, the first base class of such a trainer
loss.py       nnU-Net's losses as losses of this package
trainers/     the folder for ``nnUNet_extTrainer``; it holds nothing but trainers, because nnU-Net forgets the modules
              that it imports from there
"""

from pathlib import Path

from .loss import UnknownLoss, fused_loss
from .trainer import Fused

# The folder that nnU-Net searches for trainers.
TRAINERS = Path(__file__).parent / "trainers"

__all__ = ["TRAINERS", "Fused", "UnknownLoss", "fused_loss"]
