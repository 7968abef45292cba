"""Which statistics a call of a norm module uses, and which it moves: of a batch, of each sample, or of groups.

Each class here stands beside the stock norm among the base classes of a module; the stock norm brings the attributes.
"""

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..ops.recompute.saved import recomputing


class Using(NamedTuple):
    """The statistics of one call.

    ``own``: they are those of the input.  The running ones are those that ``momentum`` moves, or that are used; None
    where neither happens.  ``batches`` is the number of batches if the call adds 1 to it, or None.  ``groups`` is that
    of ``nn.GroupNorm``.
    """

    own: bool
    running_mean: Tensor | None = None
    running_var: Tensor | None = None
    momentum: float = 0.0
    batches: Tensor | None = None
    groups: int = 0


def looked_up(module: Any, where: str, names: tuple[str, ...]) -> list[Any]:
    """The attributes of these names, which are parameters or buffers; ``where`` is "_parameters" or "_buffers".

    ``nn.Module`` looks for such an attribute in Python, after every other place; this function reads the module's
    dictionaries.  An attribute that is not there, such as a weight that ``torch.nn.utils.parametrize`` computes, is
    looked up as usual.  So are all of them in compiled code.
    """
    if torch.compiler.is_compiling():
        return [getattr(module, name) for name in names]
    found = module.__dict__[where]
    return [found[name] if name in found else getattr(module, name) for name in names]


RUNNING = "running_mean", "running_var"
COUNTED = *RUNNING, "num_batches_tracked"


class BatchStatistics:
    """Of ``_BatchNorm``.

    As a ``_BatchNorm`` a module is found by whatever looks for BatchNorms, such as ``swa_utils.update_bn``.
    ``nn.SyncBatchNorm.convert_sync_batchnorm`` looks for them too, and would replace them by norms without an
    activation: ``qconfig`` is there to make it raise.
    """

    KIND = "batch"
    CHANNELS = "num_features"
    stock = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d

    training: bool
    track_running_stats: bool
    momentum: float | None

    def _statistics(self) -> Using:
        training, momentum = self.training, self.momentum
        # a forward that is computed again moves nothing
        if training and (not self.track_running_stats or recomputing()):
            return Using(True)
        running_mean, running_var, *counted = looked_up(self, "_buffers", COUNTED if training else RUNNING)
        batches = counted[0] if counted else None
        if momentum is None:
            momentum = 0.0 if batches is None else 1.0 / (float(batches) + 1.0)
        return Using(training or running_mean is None, running_mean, running_var, momentum, batches)

    @property
    def qconfig(self) -> Any:
        """The attribute that PyTorch's quantisation sets on modules.

        ``convert_sync_batchnorm`` asks for it too, by ``hasattr``, which passes on every error but AttributeError.
        Nothing else that it asks for can raise without harm to others.  Only the frame of the caller tells who asks:
        ``torch.ao.quantization.prepare`` asks every module for this attribute as well.
        """
        asking = sys._getframe(1).f_code
        if asking is nn.SyncBatchNorm.convert_sync_batchnorm.__func__.__code__:  # type: ignore[attr-defined]
            name = f"fusedseg.{type(self).__name__}"
            raise RuntimeError(
                f"{name}: nn.SyncBatchNorm.convert_sync_batchnorm would replace this module by a norm without its "
                "activation; call fusedseg.convert_sync(model) instead, which serves plain BatchNorms as well"
            )
        try:
            return self.__dict__["qconfig"]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} has no qconfig") from None

    @qconfig.setter
    def qconfig(self, value: Any) -> None:
        self.__dict__["qconfig"] = value

    @qconfig.deleter
    def qconfig(self) -> None:
        del self.__dict__["qconfig"]


class InstanceStatistics:
    """Of ``_InstanceNorm``."""

    KIND = "instance"
    CHANNELS = "num_features"
    stock = nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d

    training: bool
    track_running_stats: bool
    momentum: float | None

    def _statistics(self) -> Using:
        # as in the stock module: running statistics are used in eval mode only, and a momentum of None is 0
        own = self.training or not self.track_running_stats
        momentum = 0.0 if self.momentum is None else self.momentum
        moved = not (self.training and recomputing())
        mean, var = looked_up(self, "_buffers", RUNNING) if moved else (None, None)
        return Using(own, mean, var, momentum)


class GroupStatistics:
    """Of ``nn.GroupNorm``."""

    KIND = "group"
    CHANNELS = "num_channels"
    stock = (nn.GroupNorm,)

    num_groups: int

    def _statistics(self) -> Using:
        return Using(True, groups=self.num_groups)
