"""What the options ``budget`` and ``extra_flops`` of the backend ask for."""

import re
from dataclasses import dataclass, replace

from .._sizes import bytes_in

PEAK = "peak "
# An int below this is refused: ``budget=3`` was meant as another unit.
FEWEST_BYTES = 1 << 20
EXPECTED = (
    "budget must be a share of the bytes that eager mode keeps, above 0 and at most 1, such as 0.3 or '30%'; or bytes, "
    f"such as '3GiB' or an int of at least {FEWEST_BYTES}; or a peak, such as 'peak 10GiB'"
)
# The default of ``extra_flops``.  The last bytes cost most.  With budget 0.3, MONAI's SwinUNETR of 12 features at
# 1 x 1 x 64^3 keeps 0.776 of the bytes and repeats 0.24 of its forward.  Without a limit it would keep 0.740 and repeat
# 1.81 of it.
MOST = 0.35


@dataclass(frozen=True)
class Budget:
    """How much a training step may keep for backward, and how much arithmetic may run twice for it.

    Attributes:
        fraction: the share of the bytes that the step keeps without fusedseg, above 0 and at most 1; or None.
        nbytes: the bytes that may be kept; or None.
        peak: the bytes at the peak of the step, with the arguments of the graph; or None.
        most_flops: the arithmetic that may run twice, as a share of forward's.

    A limit of bytes asks for as little repeated arithmetic as the bytes allow.  Without one, as few bytes are kept as
    ``most_flops`` buys.  A choice that peaks higher than one before it is refused.
    """

    fraction: float | None = None
    nbytes: int | None = None
    peak: int | None = None
    most_flops: float = MOST

    @classmethod
    def parse(cls, op: str, budget: float | str | None, extra_flops: float | None) -> "Budget | None":
        """The budget of the arguments of ``op``; None if both are None.

        Raises:
            TypeError: ``budget`` is no float, int or text, or ``extra_flops`` is no number.
            ValueError: a fraction is not above 0 or is above 1, an int is below 1 MiB, a text cannot be read, or
                ``extra_flops`` is negative.
        """
        if budget is None and extra_flops is None:
            return None
        asked = cls() if budget is None else _asked(op, budget)
        if extra_flops is None:
            return asked
        if isinstance(extra_flops, bool) or not isinstance(extra_flops, (float, int)):
            raise TypeError(f"{op}: extra_flops must be a number such as 0.02, got {extra_flops!r}")
        if not 0.0 <= extra_flops < float("inf"):
            raise ValueError(f"{op}: extra_flops must be finite and at least 0, got {extra_flops!r}")
        return replace(asked, most_flops=float(extra_flops))

    def bytes_of(self, eager: int) -> int | None:
        """The bytes that may be kept, of ``eager`` that the step keeps without fusedseg; None for the fewest."""
        return int(self.fraction * eager) if self.fraction is not None else self.nbytes

    @property
    def is_absolute(self) -> bool:
        """Whether it asks for bytes, and not for a share of those of eager mode."""
        return self.nbytes is not None or self.peak is not None


def _asked(op: str, budget: float | str) -> Budget:
    """What an argument asks for; raises ``TypeError`` or ``ValueError`` for what is no budget."""
    if isinstance(budget, bool) or not isinstance(budget, (float, int, str)):
        raise TypeError(f"{op}: {EXPECTED}, got {budget!r}")
    if isinstance(budget, float):
        asked = Budget(fraction=budget)
    elif isinstance(budget, int):
        asked = Budget(nbytes=budget if budget >= FEWEST_BYTES else 0)
    elif percent := re.fullmatch(r"(\d+(?:\.\d+)?)%", budget.strip()):
        asked = Budget(fraction=float(percent[1]) / 100)
    elif budget.strip().lower().startswith(PEAK):
        asked = Budget(peak=bytes_in(budget.strip()[len(PEAK) :]))
    else:
        asked = Budget(nbytes=bytes_in(budget))
    if asked.nbytes == 0 or asked.peak == 0 or not (asked.fraction is None or 0.0 < asked.fraction <= 1.0):
        raise ValueError(f"{op}: {EXPECTED}, got {budget!r}")
    return asked
