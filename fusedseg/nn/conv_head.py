"""``ConvHead2d`` and ``ConvHead3d``: the last convolution of a network, whose logits a loss computes tile by tile."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.check import check_positive, check_tensor
from ..ops.segmentation.conv_logits import ConvLogits
from ..ops.segmentation.positions import argmax_labels
from .unscriptable import Unscriptable

DOC = """The last convolution, 1x1, of a segmentation network; in training its logits are not formed.

    In training mode the result is ``functional.ConvLogits``, which all losses of ``fusedseg.losses`` take instead of
    logits: they compute the logits tile by tile, and again in backward.  In eval mode the result are the logits.  So a
    training step reads as before::

        head = fusedseg.ConvHead{dims}d(32, 118)
        loss = fusedseg.DiceCELoss(to_onehot_y=True, softmax=True)
        loss(head(features), labels).backward()

    In eval mode it equals ``nn.Conv{dims}d(in_channels, out_channels, 1, bias=bias)`` followed by ``interpolate`` with
    ``scale_factor``, ``mode="{mode}"`` and ``align_corners``.  Its ``state_dict`` is that of ``nn.Conv{dims}d``.

    Args:
        in_channels, out_channels, bias, device, dtype: as in ``nn.Conv{dims}d``.
        scale_factor: the number of times that the logits are larger than the features along each axis, an integer.
        align_corners: as in ``interpolate``.

    ``from_conv`` makes one of the last convolution of a network that exists, with its parameters.

    Its forward takes features (N, in_channels, {axes}) and two options: ``size``, the spatial size of the logits, which
    then goes before ``scale_factor``; and ``labels``.  ``labels=True`` gives ``argmax_labels`` of the logits, in either
    mode, and also forms no logits.

    Kept for backward: the features, the weight and the bias.

    ``functional.ConvLogits`` says from how many classes on it pays: with three classes, a stock convolution and a fused
    loss do as well.

    It falls back to stock functions, which form the logits, in eval mode without ``labels``.  FullyShardedDataParallel
    frees the weight before the loss needs it, and cannot hold this module apart from the loss.

    Raises:
        ValueError: ``scale_factor`` or ``size`` is not positive; the features have the wrong shape.
        TypeError: the dtypes of features and weight differ, without autocast.
        RuntimeError: backward itself is differentiated.
    """


class _ConvHead(Unscriptable):
    """The methods of both heads that the stock convolution does not have."""

    _stock: type[nn.Module]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        bias: bool = True,
        *,
        scale_factor: int = 1,
        align_corners: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_positive(self._name(), "scale_factor", scale_factor)
        stock: Any = super()
        stock.__init__(in_channels, out_channels, 1, bias=bias, device=device, dtype=dtype)
        self.scale_factor, self.align_corners = scale_factor, align_corners

    @classmethod
    def from_conv(cls: Any, conv: nn.Conv2d | nn.Conv3d, *, scale_factor: int = 1, align_corners: bool = False) -> Any:
        """A head in place of a stock 1x1 convolution: ``net.head = fusedseg.ConvHead3d.from_conv(net.head)``.

        The head has the parameters of ``conv`` themselves, so that an optimizer keeps them, and its ``state_dict`` has
        the same names.  It is in training mode if ``conv`` is.  Hooks of ``conv`` are not taken over.

        Raises:
            TypeError: ``conv`` is no stock convolution of the dimensions of the head.
            ValueError: ``conv`` has a kernel other than 1, or a stride, padding or groups.
        """
        stock = cls._stock
        if type(conv) is not stock:
            raise TypeError(f"{cls._name()}.from_conv: conv must be an nn.{stock.__name__}, got {type(conv).__name__}")
        form = conv.kernel_size, conv.stride, conv.groups
        ones = (1,) * len(conv.kernel_size)
        # "same" and "valid" add nothing to a kernel of size 1.
        if form != (ones, ones, 1) or conv.padding not in ((0,) * len(ones), "same", "valid"):
            raise ValueError(
                f"{cls._name()}.from_conv: conv must have kernel size 1, stride 1, no padding and one group, got {conv}"
            )
        head = cls(
            conv.in_channels, conv.out_channels, conv.bias is not None, scale_factor=scale_factor,
            align_corners=align_corners, device="meta", dtype=conv.weight.dtype,
        )  # fmt: skip
        head.weight, head.bias = conv.weight, conv.bias
        return head.train(conv.training)

    def extra_repr(self: Any) -> str:
        enlarged = f", scale_factor={self.scale_factor}, align_corners={self.align_corners}"
        return f"{self.in_channels}, {self.out_channels}, bias={self.bias is not None}{enlarged}"

    def forward(
        self: Any, features: Tensor, size: Sequence[int] | None = None, labels: bool = False
    ) -> Tensor | ConvLogits:
        check_tensor(self._name(), features, "features")
        dims, spatial = len(self.kernel_size), features.shape[2:]
        if len(spatial) != dims:
            raise ValueError(
                f"{self._name()}: features must have shape (N, {self.in_channels}) with {dims} spatial dimensions "
                f"after it, got {tuple(features.shape)}"
            )
        if size is None:
            size = [n * self.scale_factor for n in spatial]
        # Views, because DistributedDataParallel looks for parameters in the graph of the output, and a leaf has none.
        weight, bias = self.weight.flatten(1), None if self.bias is None else self.bias.view(-1)
        logits = ConvLogits(features, weight, bias, tuple(size), self.align_corners)
        if labels:
            return argmax_labels(logits)
        return logits if self.training else logits.formed()


class ConvHead2d(_ConvHead, nn.Conv2d):  # type: ignore[misc]
    __doc__ = DOC.format(dims=2, mode="bilinear", axes="H, W")
    _stock = nn.Conv2d


class ConvHead3d(_ConvHead, nn.Conv3d):  # type: ignore[misc]
    __doc__ = DOC.format(dims=3, mode="trilinear", axes="D, H, W")
    _stock = nn.Conv3d
