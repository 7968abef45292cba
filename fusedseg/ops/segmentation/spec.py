"""The description of the sums that a segmentation loss needs, and of the form of its target."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..check import wide_dtype
from ..layout import layout_of

OP = "fusedseg.segmentation_sums"

# The rows of the tensor of sums, (ROWS, N, K), which ``SegmentationSums`` (``call.py``) defines.
OVERLAP, PREDICTION, TARGET, NLL, OTHER_NLL = range(5)
ROWS = 5

# The functions of the logits that give p.  For HARD, p is 1 or 0: "argmax" is 1 for the first class with the largest
# logit, and "positive" for every class with a logit above 0.
HARD = ("argmax", "positive")
PROBABILITIES = ("softmax", "sigmoid", "identity", *HARD, "none")


# The kinds of negative log-likelihoods: the function of the logits, and whether OTHER_NLL is computed.
LIKELIHOODS = {
    "softmax": ("softmax", False),
    "smoothed": ("softmax", True),
    "sigmoid": ("sigmoid", True),
    "none": ("none", False),
}


class SumsSpec(NamedTuple):
    """The description of one call, by the options of ``segmentation_sums`` (``call.py``).

    dense: whether the target has a channel for each class, (N, K, *spatial), instead of labels (N, *spatial).
    """

    probability: str
    likelihood: str
    ignore: int | None = None
    squared: bool = False
    minimum: bool = False
    dense: bool = False
    gamma: float = 0.0

    @property
    def nll(self) -> str:
        """The function of the logits in NLL: "softmax", "sigmoid" or "none"."""
        return LIKELIHOODS[self.likelihood][0]

    @property
    def other(self) -> bool:
        return LIKELIHOODS[self.likelihood][1]

    @property
    def hard(self) -> bool:
        """Whether p is 1 or 0, so that the sums are counts and have no gradient."""
        return self.probability in HARD

    # The compiler of PyTorch 2.8 does not follow ``_replace``.
    def using(self, probability: str, likelihood: str, gamma: float = 0.0) -> "SumsSpec":
        """The same call with other functions of the logits."""
        return SumsSpec(probability, likelihood, self.ignore, self.squared, self.minimum, self.dense, gamma)


# The fields of a ``SumsSpec`` in the schemas of ``torch.library``, in their order.
SCHEMA = "str probability, str likelihood, SymInt? ignore, bool squared, bool minimum, bool dense, float gamma=0.0"


class SumsInputs(NamedTuple):
    """The tensors of one call.

    logits: (N, K, *spatial), or the convolution that computes them: a ``ConvLogits`` for ``op.sums``, and a ``Conv``
        below it.  Any, because no function takes all three.
    target: labels (N, *spatial) or (N, 1, *spatial), or, if it is dense, (N, K, *spatial).
    mask: the weight of each position, (N, *spatial) or (N, 1, *spatial), or None.
    """

    logits: Any
    target: Tensor
    mask: Tensor | None = None


class Sizes(NamedTuple):
    """N samples of K classes and S positions; with ``rows`` the classes of a position are adjacent (channels_last)."""

    N: int
    K: int
    S: int
    rows: bool


def sizes_of(logits: Tensor) -> Sizes:
    """The sizes in memory of logits that are contiguous or channels_last."""
    layout = layout_of(logits)
    assert layout is not None
    N, K, *spatial = logits.shape
    return Sizes(N, K, math.prod(spatial), layout.rows)


def sums_dtype(logits: Tensor, spec: SumsSpec) -> torch.dtype:
    """The dtype of the sums; that of counts is float64, in which they are exact."""
    return torch.float64 if spec.hard else wide_dtype(logits.dtype)


def holds(dtype: torch.dtype, value: int) -> bool:
    """Whether a tensor of this dtype may have this whole number.

    PyTorch casts a number to the dtype of the tensor that it is compared with: -100 equals 156 in uint8.
    """
    if dtype.is_floating_point or dtype == torch.bool:
        return True
    limits = torch.iinfo(dtype)
    return limits.min <= value <= limits.max


def differs(target: Tensor, value: int) -> Tensor:
    """``target != value``, where the dtype of the target may lack the value."""
    return target != value if holds(target.dtype, value) else torch.ones_like(target, dtype=torch.bool)
