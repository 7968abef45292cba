"""Base classes that make the call of a norm module: the statistics that it uses, and the running ones that it moves.

There is one class for statistics of a batch, one for each sample, and one for groups.  A module has one of these base
classes beside its stock norm, which brings the attributes.  Each class also says which inputs its stock norms take.
"""

import sys
from typing import Any

from torch import Tensor, nn

from ..activation import Activation
from ..ops.norm.call import Norm, Operands
from ..ops.norm.kept import recomputing
from ..ops.norm.statistic import BATCH, INSTANCE, Statistic

COUNTED = "running_mean", "running_var", "num_batches_tracked"


class _AnyNorm:
    """What every norm module has, from its other base classes."""

    KEEP: str
    _act: Activation
    weight: Tensor | None
    bias: Tensor | None
    eps: float

    def _slope(self) -> Tensor | None:
        """The slope of prelu."""
        return None

    def _others(self) -> str | None:
        """The name of the process group whose members share the statistics, or None."""
        return None


class _OfFeatures(_AnyNorm):
    """The attributes that ``_BatchNorm`` and ``_InstanceNorm`` bring."""

    training: bool
    affine: bool
    num_features: int
    running_mean: Tensor | None
    running_var: Tensor | None
    track_running_stats: bool
    momentum: float | None

    @property
    def _channels(self) -> int:
        return self.num_features


class BatchStatistics(_OfFeatures):
    """The statistics of modules that are a ``_BatchNorm``.

    Code that searches a model for BatchNorms, such as ``swa_utils.update_bn``, finds these modules.
    ``nn.SyncBatchNorm.convert_sync_batchnorm``, and functions of this name in other libraries, find them too, and would
    replace them by norms without an activation.  The property ``qconfig`` makes them raise an error.
    """

    DIMS = 2, 5
    SPATIAL = "with up to three spatial dimensions after it"
    channels_matter = True
    stock = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d
    num_batches_tracked: Tensor | None

    def _call(self, x: Tensor, residual: Tensor | None) -> tuple[Operands, Norm]:
        training, momentum, batches = self.training, self.momentum, None
        running_mean, running_var = self.running_mean, self.running_var
        if training and (not self.track_running_stats or recomputing()):
            # A forward pass that is computed again moves no running statistics.
            running_mean = running_var = None
            momentum = 0.0
        elif training:
            batches = self.num_batches_tracked
        if momentum is None:
            momentum = 0.0 if batches is None else 1.0 / (float(batches) + 1.0)
        own = training or running_mean is None
        given = Operands(x, self.weight, self.bias, residual, self._slope(), running_mean, running_var, batches)
        return given, Norm(self.KEEP, self._act, self.eps, momentum, own, BATCH, self._others())

    @property
    def qconfig(self) -> Any:
        """The attribute that PyTorch's quantisation sets on modules.

        ``convert_sync_batchnorm`` of PyTorch asks for it by ``hasattr``, which lets every error pass except
        AttributeError, and so do the copies of this function in other libraries, such as timm.  No other attribute that
        they read could raise an error without harm to other code.  Only the frame of the caller shows who asks, because
        ``torch.ao.quantization.prepare`` asks every module for this attribute as well.
        """
        if sys._getframe(1).f_code.co_name == "convert_sync_batchnorm":
            name = f"fusedseg.{type(self).__name__}"
            raise RuntimeError(
                f"{name}: convert_sync_batchnorm would replace this module by a norm without its "
                "activation; call fusedseg.convert_sync(model) instead, which serves plain BatchNorms as well"
            )
        try:
            return self.__dict__["qconfig"]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} has no qconfig") from None

    @qconfig.setter
    def qconfig(self, value: object) -> None:
        self.__dict__["qconfig"] = value

    @qconfig.deleter
    def qconfig(self) -> None:
        del self.__dict__["qconfig"]


class InstanceStatistics(_OfFeatures):
    """The statistics of modules that are an ``_InstanceNorm``."""

    DIMS = 3, 5
    SPATIAL = "with one to three spatial dimensions after it"
    stock = nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d

    @property
    def channels_matter(self) -> bool:
        """Whether parameters or running statistics belong to the channels.  Otherwise any number of them will do."""
        return self.affine or self.running_mean is not None

    def _call(self, x: Tensor, residual: Tensor | None) -> tuple[Operands, Norm]:
        # As in the stock module, running statistics are used in eval mode only, and a momentum of None means 0.
        own = self.training or not self.track_running_stats
        momentum = 0.0 if self.momentum is None else self.momentum
        running_mean, running_var = self.running_mean, self.running_var
        if self.training and recomputing():
            running_mean = running_var = None
        given = Operands(x, self.weight, self.bias, residual, self._slope(), running_mean, running_var)
        return given, Norm(self.KEEP, self._act, self.eps, momentum, own, INSTANCE, self._others())


class GroupStatistics(_AnyNorm):
    """The statistics of modules that are an ``nn.GroupNorm``."""

    DIMS = 2, sys.maxsize
    SPATIAL = "with any spatial dimensions after it"
    channels_matter = True
    stock = (nn.GroupNorm,)

    num_groups: int
    num_channels: int

    @property
    def _channels(self) -> int:
        return self.num_channels

    def _call(self, x: Tensor, residual: Tensor | None) -> tuple[Operands, Norm]:
        given = Operands(x, self.weight, self.bias, residual, self._slope())
        over = Statistic(True, self.num_groups)
        return given, Norm(self.KEEP, self._act, self.eps, 0.0, True, over, self._others())
