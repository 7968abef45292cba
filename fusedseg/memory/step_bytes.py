"""What a training step needs of memory: one record for the planner, the reports, ``profile`` and ``plan``."""

from typing import NamedTuple


class StepBytes(NamedTuple):
    """What a step, or the decision about one, needs.

    kept: bytes kept for backward at the end of forward.
    peak: the most bytes of tensors at once, beside those that were there before the step.
    with_workspaces: the most bytes with those that convolutions and packing need beside their results.
    repeated: the arithmetic that backward repeats, as a share of forward's.
    """

    kept: int
    peak: int
    with_workspaces: int
    repeated: float = 0.0

    def is_within(self, most: "StepBytes") -> bool:
        """Whether neither the kept bytes nor a peak is above ``most``."""
        return self.kept <= most.kept and self.peak <= most.peak and self.with_workspaces <= most.with_workspaces

    def beside(self, before: int) -> "StepBytes":
        """The same with bytes that were there before the step."""
        return self._replace(peak=before + self.peak, with_workspaces=before + self.with_workspaces)
