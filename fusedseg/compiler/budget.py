"""What the options ``budget`` and ``extra_flops`` of the backend ask for."""

from dataclasses import dataclass

from .._sizes import parse_bytes

PEAK = "peak "
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
        most_flops: the arithmetic that may run twice, as a share of the arithmetic of all calls that may run twice, in
            forward.

    A limit of bytes asks for as little repeated arithmetic as the bytes allow.  Without one, as few bytes are kept as
    ``most_flops`` buys.  Beside ``fraction`` or ``nbytes`` the peak counts less than the two limits.
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
            ValueError: a fraction is not above 0 or is above 1, bytes are not positive, a text cannot be read, or
                ``extra_flops`` is negative.
        """
        if budget is None and extra_flops is None:
            return None
        fraction = nbytes = peak = None
        if isinstance(budget, bool) or not isinstance(budget, (float, int, str, type(None))):
            raise TypeError(
                f"{op}: budget must be a fraction such as 0.3, a number of bytes, or a text such as '6GiB', "
                f"got {budget!r}"
            )
        if isinstance(budget, float):
            if not 0.0 < budget <= 1.0:
                raise ValueError(
                    f"{op}: budget must be a fraction above 0.0 and at most 1.0, or bytes as an int or a text such as "
                    f"'6GiB', got {budget!r}"
                )
            fraction = budget
        elif isinstance(budget, str) and budget.strip().lower().startswith(PEAK):
            peak = parse_bytes(op, budget.strip()[len(PEAK) :])
        elif budget is not None:
            nbytes = parse_bytes(op, budget)
        if extra_flops is None:
            return cls(fraction, nbytes, peak)
        if isinstance(extra_flops, bool) or not isinstance(extra_flops, (float, int)):
            raise TypeError(f"{op}: extra_flops must be a number such as 0.02, got {extra_flops!r}")
        if not 0.0 <= extra_flops < float("inf"):
            raise ValueError(f"{op}: extra_flops must be finite and at least 0, got {extra_flops!r}")
        return cls(fraction, nbytes, peak, float(extra_flops))

    def bytes_of(self, eager: int) -> int | None:
        """The bytes that may be kept, of ``eager`` that the step keeps without fusedseg; None for the fewest."""
        return int(self.fraction * eager) if self.fraction is not None else self.nbytes

    @property
    def is_absolute(self) -> bool:
        """Whether it asks for bytes, and not for a share of those of eager mode."""
        return self.nbytes is not None or self.peak is not None
