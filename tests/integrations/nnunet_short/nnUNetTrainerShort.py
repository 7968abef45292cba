"""Trainers for a real run of a few steps: nnU-Net's own, and the one with fusedseg, with the same random numbers."""

import random

import numpy as np
import torch
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

from fusedseg.integrations.nnunet import Fused


class nnUNetTrainerShort(nnUNetTrainer):
    # nnU-Net reads these names from the signature.
    def __init__(self, plans, configuration, fold, dataset_json, device):
        # nnU-Net draws weights and batches from the global generators.
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002 -- nnU-Net's own generator
        torch.manual_seed(0)
        super().__init__(plans, configuration, fold, dataset_json, device)
        self.num_epochs, self.num_iterations_per_epoch, self.num_val_iterations_per_epoch = 2, 6, 2


class nnUNetTrainerShortFused(Fused, nnUNetTrainerShort):
    pass
