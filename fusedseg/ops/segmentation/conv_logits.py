"""``fusedseg.functional.ConvLogits``: the logits of a last 1x1 convolution, not yet computed."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..check import autocast_dtype, check_channel_vector, check_dtype, check_tangents, check_tensor, check_transforms
from ..upsample import MODES

OP = "fusedseg.ConvLogits"


class Conv(NamedTuple):
    """The convolution of features (N, C, *spatial) with a weight (K, C, 1, ...) and a bias (K,) or None.

    size: the spatial size to which the logits are interpolated, or None.  align_corners: as in ``interpolate``.
    dtype: the dtype to which features, weight and bias are rounded, as autocast does; the products are wider.
    """

    features: Tensor
    weight: Tensor
    bias: Tensor | None
    size: Sequence[int] | None
    align_corners: bool
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """The shape of the logits, (N, K, *size)."""
        spatial = self.features.shape[2:] if self.size is None else self.size
        return torch.Size([self.features.shape[0], self.weight.shape[0], *spatial])


# A dataclass, because DistributedDataParallel looks for tensors in an output that is one.
@dataclass(eq=False)
class ConvLogits:
    """The logits of a 1x1 convolution and an optional linear interpolation, not yet computed.

    ``fusedseg.functional.segmentation_sums``, ``tp_fp_fn``, ``argmax_labels`` and all losses of ``fusedseg.losses``
    take it instead of logits.  They compute the logits tile by tile, and again in backward, so that the logits are
    never formed as a whole.

    Equals ``interpolate(conv(features, weight, bias), size, mode=mode, align_corners=align_corners)``, where conv is
    the convolution of the dimensions of ``features``, and mode "linear", "bilinear" or "trilinear"; without a size it
    equals the convolution alone.

    Args:
        features: (N, C, *spatial), with up to three spatial dimensions, fp16, bf16, fp32 or fp64.  Strides that are
            neither contiguous nor channels_last are copied in each pass.
        weight: (K, C), or (K, C, 1, ...) as in a convolution module, in the dtype of ``features``.
        bias: (K,) in the dtype of ``features``, or None.
        size: the spatial size of the logits, which that of ``target`` must equal; None is that of ``features``.
        align_corners: as in ``torch.nn.functional.interpolate``.

    Under autocast, features and weights are rounded to the dtype of autocast, as for a stock convolution.  What counts
    is autocast at the time when the object is made.  Products, logits, probabilities and the gradients of weight and
    bias are computed in fp32 (in fp64 for fp64 features), and rounded once at the end.

    Kept for backward: ``features``, ``weight`` and ``bias`` of the caller; of the target what the loss says.

    **From how many classes on it pays**: the peak of convolution and loss is the gradient of the features and a few
    tiles.  At (2, 32, 128, 128, 128) in fp16 it is 260 MiB for 118 classes, where a stock convolution and a fused loss
    take 1892 and the stock loss 8496; for 14 classes it is 259 instead of 368 and 1008.  With three classes it changes
    the peak by a few per cent, in either direction, and a stock convolution and a fused loss do as well.

    All devices compute with aten ops, tile by tile; there is no Triton kernel.  With an interpolation in one or two
    dimensions, the logits of one sample before it are held in fp32.

    Raises:
        ValueError: a shape, a device or a size does not fit.
        TypeError: an argument is no tensor, or a dtype does not fit.
    """

    features: Tensor
    weight: Tensor
    bias: Tensor | None = None
    size: tuple[int, ...] | None = None
    align_corners: bool = False

    def __post_init__(self) -> None:
        self.size = None if self.size is None else tuple(self.size)
        check_tensor(OP, self.features, "features")
        autocast = autocast_dtype(self.features)
        self.dtype = self.features.dtype if autocast is None else autocast
        _check(self, autocast)
        if self.size == self.features.shape[2:]:
            # An interpolation to the same size changes nothing.
            self.size = None

    @property
    def conv(self) -> Conv:
        return Conv(self.features, self.weight, self.bias, self.size, self.align_corners, self.dtype)

    @property
    def shape(self) -> torch.Size:
        """The shape of the logits, (N, K, *size)."""
        return self.conv.shape

    @property
    def device(self) -> torch.device:
        return self.features.device

    @property
    def ndim(self) -> int:
        return self.features.dim()

    def dim(self) -> int:
        return self.features.dim()

    def numel(self) -> int:
        return math.prod(self.shape)

    def formed(self) -> Tensor:
        """The logits as a tensor, computed by stock functions."""
        x, weight, dims = self.features.to(self.dtype), self.weight.to(self.dtype), self.dim() - 2
        bias = None if self.bias is None else self.bias.to(self.dtype)
        convolve: Callable[..., Tensor] = (F.linear, F.conv1d, F.conv2d, F.conv3d)[dims]
        z = convolve(x, weight.view(*weight.shape[:2], *(1,) * dims), bias)
        if self.size is None:
            return z
        return F.interpolate(z, list(self.size), mode=MODES[dims], align_corners=self.align_corners)


Logits = Tensor | ConvLogits


def tensor_of(logits: Tensor | Conv) -> Tensor:
    """Logits that exist, or the features of the convolution that computes them."""
    return logits if isinstance(logits, Tensor) else logits.features


def is_target_dense(logits: Logits, target: Tensor) -> bool:
    """Whether a target has a value for each class, because it has the shape of the logits."""
    return isinstance(target, Tensor) and isinstance(logits, (Tensor, ConvLogits)) and target.shape == logits.shape


def _check(given: ConvLogits, autocast: torch.dtype | None) -> None:
    features, weight, bias = given.features, given.weight, given.bias
    check_transforms(OP)
    check_dtype(OP, "features", features.dtype)
    if not 2 <= features.dim() <= 5:
        raise ValueError(
            f"{OP}: features must have shape (N, C, *spatial) with up to three spatial dimensions, "
            f"got {tuple(features.shape)}"
        )
    check_tensor(OP, weight, "weight")
    check_tangents(OP, features, weight)
    C = features.shape[1]
    if weight.dim() < 2 or weight.shape[0] < 1 or weight.shape[1] != C or any(n != 1 for n in weight.shape[2:]):
        raise ValueError(
            f"{OP}: weight must have shape (K, {C}) or (K, {C}, 1, ...), for features {tuple(features.shape)}, "
            f"got {tuple(weight.shape)}"
        )
    # Autocast casts all dtypes but fp64.
    if weight.dtype != features.dtype and (autocast is None or weight.dtype == torch.float64):
        raise TypeError(f"{OP}: weight must be {features.dtype}, the dtype of features, got {weight.dtype}")
    if weight.device != features.device:
        raise ValueError(f"{OP}: weight must be on {features.device}, the device of features, got {weight.device}")
    check_channel_vector(OP, "bias", bias, weight.shape[0], weight.dtype, weight.device, "the convolution")
    _check_size(given)


def _check_size(given: ConvLogits) -> None:
    dims = given.features.dim() - 2
    if not isinstance(given.align_corners, bool):
        raise TypeError(f"{OP}: align_corners must be True or False, got {given.align_corners!r}")
    if given.size is None:
        return
    if dims == 0 or len(given.size) != dims or not all(n >= 1 for n in given.size):
        raise ValueError(
            f"{OP}: size must be {dims} positive integers for features {tuple(given.features.shape)}, got {given.size}"
        )
