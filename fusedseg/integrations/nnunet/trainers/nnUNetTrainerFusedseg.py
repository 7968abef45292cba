"""Trainers for ``nnUNetv2_train -tr``.  ``docs/nnunet.md`` says how nnU-Net finds them."""

from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

from fusedseg.integrations.nnunet import Fused


class nnUNetTrainerFusedseg(Fused, nnUNetTrainer):
    """nnU-Net's own trainer with a converted network, fused losses, and validation in one pass over the logits."""
