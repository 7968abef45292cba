"""What the options ``budget`` and ``extra_flops`` of the backend ask for."""

from dataclasses import dataclass
from typing import Any

from .._sizes import parse_bytes
from ..ops.recompute.choice import Budget

PEAK = "peak "


@dataclass(frozen=True)
class Wanted:
    """What the options ``budget`` and ``extra_flops`` ask for.

    Attributes:
        budget: the limits of kept bytes and of repeated arithmetic.
        peak: the bytes at the peak of the step, with the arguments of the graph; or None.
    """

    budget: Budget
    peak: int | None = None

    @property
    def is_absolute(self) -> bool:
        """Whether it asks for bytes, and not for a share of those of eager mode."""
        return self.budget.nbytes is not None or self.peak is not None


def parse_wanted(op: str, budget: Any, extra_flops: Any) -> Wanted | None:
    """The options as ``Wanted``; None without them.  Raises ValueError or TypeError for wrong ones."""
    peak = None
    if isinstance(budget, str) and budget.strip().lower().startswith(PEAK):
        peak = parse_bytes(op, "budget", budget.strip()[len(PEAK) :])
        budget = None
    parsed = Budget.parse(op, budget, extra_flops)
    if parsed is None and peak is None:
        return None
    return Wanted(parsed or Budget(), peak)
