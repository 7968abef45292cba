"""What the backend would keep of a model that has not run, for each of several options."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..memory.compiled import Partition as Found
from ..memory.compiled import Way, divided
from .settings import Settings, parse


def partitions(
    model: nn.Module,
    inputs: Sequence[Tensor],
    ways: Sequence[Mapping[str, Any]],
    autocast: torch.dtype | None = None,
) -> list[Found]:
    """What ``torch.compile(model, backend="fusedseg", options=way)`` keeps with Inductor, for each way.

    Nothing runs, and no code is generated.  ``fusedseg.memory.compiled.divided`` describes the arguments and errors.
    """
    return divided(model, inputs, [_divides(parse({"codegen": "inductor", **way})) for way in ways], autocast)


def _divides(settings: Settings) -> Way:
    from .partition import Partition

    partition = Partition(settings)
    return lambda joint, inputs, options: partition(joint, inputs, compiler="inductor", **options)
