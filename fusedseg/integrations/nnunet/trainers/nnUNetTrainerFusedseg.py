"""Trainers for ``nnUNetv2_train -tr``.

nnU-Net finds them by the environment variable ``nnUNet_extTrainer``; see ``docs/nnunet.md``.
"""

from typing import Any, ClassVar

from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

from fusedseg.integrations.nnunet import Fused


class nnUNetTrainerFusedseg(Fused, nnUNetTrainer):
    """nnU-Net's own trainer, with a network and losses in fewer bytes, and validation in one pass over the logits."""


class nnUNetTrainerFusedsegNoGraphs(nnUNetTrainerFusedseg):
    """Records no CUDA graphs."""

    compile_options: ClassVar[dict[str, Any]] = {"cudagraphs": False}


class nnUNetTrainerFusedsegBudget(nnUNetTrainerFusedseg):
    """Keeps at most 0.3 of the stock network's bytes: convolutions with large outputs run a second time in backward."""

    compile_options: ClassVar[dict[str, Any]] = {"budget": 0.3}


# The key of the rounding is on the host, so that steps with bits cannot be recorded.


class nnUNetTrainerFusedsegBits8(nnUNetTrainerFusedseg):
    """Keeps activations in 8 bits a value: the forward pass stays exact, and gradients get noise with mean 0."""

    compile_options: ClassVar[dict[str, Any]] = {"bits": 8, "cudagraphs": False}


class nnUNetTrainerFusedsegBits4(nnUNetTrainerFusedseg):
    """Keeps activations in 4 bits a value, with more noise."""

    compile_options: ClassVar[dict[str, Any]] = {"bits": 4, "cudagraphs": False}
