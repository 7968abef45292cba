"""What modules share that are BatchNorms: which statistics a call uses, and which it moves."""

from typing import Any, NamedTuple

from torch import Tensor

from ..ops.recomputation import recomputing


class Using(NamedTuple):
    """``own``: the statistics are those of the batch; the running ones are those that are moved by ``momentum``, or
    used, None where neither."""

    own: bool
    running_mean: Tensor | None
    running_var: Tensor | None
    momentum: float


class BatchStatistics:
    """Beside ``_NormBase`` as a base class, which brings the attributes."""

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
