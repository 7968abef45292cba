"""What a training step needs of memory: one record for the planner, the reports, ``profile`` and ``plan``.

``copies_of`` estimates the bytes that a convolution takes beside its arguments and its result.  No tensor shows them,
and no CPU knows which of cuDNN's kernels a GPU will run.  The rule is that a convolution computes in channels_last: it
copies each image that it reads or writes and that lies in another memory format.  On an H100 the measured peaks of two
3D U-Nets of nnU-Net (float16, contiguous, the backend with codegen "aten") are 794 and 795 MiB above the bytes of their
tensors, of which this rule explains 768; in channels_last, where it says 0, 32 MiB were measured.  Workspaces of
another kind are not in it.
"""

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from ..ops.layout import FORMATS


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


def copies_of(images: Iterable[Tensor]) -> int:
    """The bytes of copies of those images that are in another format than channels_last."""
    return sum(
        image.numel() * image.dtype.itemsize
        for image in images
        if image.dim() in FORMATS and not image.is_contiguous(memory_format=FORMATS[image.dim()])
    )
