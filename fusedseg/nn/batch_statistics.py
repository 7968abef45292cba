"""What modules share that are BatchNorms: which statistics a call uses, and which it moves."""

import sys
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..ops.recompute.saved import recomputing


class Using(NamedTuple):
    """``own``: the statistics are those of the batch; the running ones are those that are moved by ``momentum``, or
    used, None where neither."""

    own: bool
    running_mean: Tensor | None
    running_var: Tensor | None
    momentum: float


class BatchStatistics:
    """Beside ``_BatchNorm`` as a base class, which brings the attributes.

    From ``_BatchNorm`` the modules get to be found by whatever looks for BatchNorms, such as ``swa_utils.update_bn``.
    ``nn.SyncBatchNorm.convert_sync_batchnorm`` looks for them too, and would replace them by norms without an
    activation: ``qconfig`` is there to make it raise.
    """

    training: bool
    track_running_stats: bool
    momentum: float | None
    running_mean: Any
    running_var: Any
    num_batches_tracked: Any

    def _statistics(self) -> Using:
        training, momentum = self.training, self.momentum
        # a forward that is computed again moves nothing
        if training and (not self.track_running_stats or recomputing()):
            return Using(True, None, None, 0.0)
        if momentum is None:
            momentum = 0.0
            if training and self.num_batches_tracked is not None:
                momentum = 1.0 / (float(self.num_batches_tracked) + 1.0)
        # looked up once: attributes that are buffers take a module microseconds
        running_mean = self.running_mean
        return Using(training or running_mean is None, running_mean, self.running_var, momentum)

    def _count_batch(self) -> None:
        if not (self.training and self.track_running_stats):
            return
        count = self.num_batches_tracked
        if count is not None and not recomputing():
            count.add_(1)

    @property
    def qconfig(self) -> Any:
        """The attribute that PyTorch's quantisation sets on modules.

        ``convert_sync_batchnorm`` asks for it too, by ``hasattr``, which an error other than AttributeError leaves.
        Nothing else that it asks for can be made to raise without harm to others.  Whether it is the one that asks
        can be told by its frame alone: ``torch.ao.quantization.prepare`` asks every module for it as well.
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
