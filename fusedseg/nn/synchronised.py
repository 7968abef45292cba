"""The base class of modules whose statistics, in training, are those of all processes of a group."""

import functools
import warnings
from typing import Any

from torch import Tensor, distributed

from ..ops import unfused


@functools.cache
def _warn_alone() -> None:
    warnings.warn(
        "fusedseg: torch.distributed is not initialised, so the statistics of synchronised norms are those of this "
        "process alone",
        stacklevel=9,
    )


def group_name(process_group: object) -> str | None:
    """The name of the group, or of the group of all processes for None; None if there are no other processes."""
    if not distributed.is_available() or not distributed.is_initialized():
        _warn_alone()
        return None
    group: Any = distributed.group.WORLD if process_group is None else process_group
    return group.group_name if distributed.get_world_size(group) > 1 else None


class Synchronised:
    """A base class that stands before the module without synchronisation, such as ``InPlaceABN``."""

    training: bool
    running_mean: Tensor | None
    process_group: object = None

    def _others(self) -> str | None:
        """The name of the group if the call uses its statistics and it has other members, otherwise None."""
        if not self.training and self.running_mean is not None:
            return None
        return self._group()

    @unfused.assume_constant_result
    def _group(self) -> str | None:
        """``group_name``, which in compiled code runs once, while the forward is traced."""
        return group_name(self.process_group)
