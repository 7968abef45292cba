"""What modules share whose statistics, in training, are those of all processes of a group."""

import functools
import warnings
from typing import Any

from torch import distributed

from ..ops import unfused


@functools.cache
def _warn_alone() -> None:
    warnings.warn(
        "fusedseg: torch.distributed is not initialised, so the statistics of synchronised norms are those of this "
        "process alone",
        stacklevel=8,
    )


class Synchronised:
    """Before the local module among the base classes."""

    training: bool
    running_mean: Any
    process_group: Any = None

    def _others(self) -> str | None:
        """The name of the group, where its statistics are wanted and there are others in it."""
        if not self.training and self.running_mean is not None:
            return None
        return self._group()

    @unfused.assume_constant_result
    def _group(self) -> str | None:
        """Runs once, while a forward is traced."""
        if not distributed.is_available() or not distributed.is_initialized():
            _warn_alone()
            return None
        group: Any = distributed.group.WORLD if self.process_group is None else self.process_group
        return group.group_name if distributed.get_world_size(group) > 1 else None
