"""``Leaky``: the base class of a trainer whose network has LeakyReLU where the plans name ReLU."""

import copy
import pydoc
from typing import ClassVar

import torch
from torch import nn

from .trainer import Fused

# The default device of nnU-Net's trainer.
GPU = torch.device("cuda")


class Leaky(Fused):
    """``Fused`` for plans with ReLU: the network is built with LeakyReLU, which norms in place can invert.

    A norm before ReLU keeps its input, because ReLU has no inverse, and one before LeakyReLU keeps its output alone,
    which the next convolution keeps anyway.  The plans of this trainer, which nnU-Net writes beside its checkpoints,
    name LeakyReLU, and so the stock trainer predicts from them.  The plans in the folder of the preprocessed dataset
    stay as they are, and so do plans that name another activation: nnU-Net's own planners choose LeakyReLU.

    Attributes:
        slope: the negative slope, 0.01 as in nnU-Net's own plans.
    """

    slope: ClassVar[float] = 0.01

    # nnU-Net reads these names from the signature, and finds them among the local variables of its own trainer.
    def __init__(
        self, plans: dict, configuration: str, fold: int, dataset_json: dict, device: torch.device = GPU
    ) -> None:
        leaky = with_leaky_relu(plans, self.slope)
        super().__init__(leaky, configuration, fold, dataset_json, device)


def with_leaky_relu(plans: dict, slope: float) -> dict:
    """A copy of plans in which LeakyReLU stands for ReLU in every configuration."""
    plans = copy.deepcopy(plans)
    for configuration in plans["configurations"].values():
        # A configuration that inherits from another has no architecture, and old plans name no activation.
        arguments = configuration.get("architecture", {}).get("arch_kwargs", {})
        if pydoc.locate(str(arguments.get("nonlin"))) is nn.ReLU:
            arguments["nonlin"] = "torch.nn.LeakyReLU"
            arguments["nonlin_kwargs"] = {**(arguments.get("nonlin_kwargs") or {}), "negative_slope": slope}
    return plans
