"""The U-Net: an encoder that halves the spatial size at every level and a decoder that restores it through skips."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from ..nn import InPlaceABN
from .blocks import CONV, DoubleConv, Down, NormAct, Up, check_dims


class UNet(nn.Module):
    """Maps images (N, in_channels, *spatial) to logits (N, num_classes, *spatial), in two or three dimensions.

    ``widths[0]`` channels at full size; each further width is one level, at half the size, down and up again.  Any
    spatial size of at least ``2 ** (len(widths) - 1)`` works, odd ones too: pooling floors, and the way up restores the
    size.

    With plain PyTorch modules the same function, with the same number of parameters in the same order, is::

        UNet(..., norm_act=lambda c: nn.Sequential(nn.BatchNorm2d(c), nn.LeakyReLU(0.01, inplace=True)))

    Kept for backward, per level: one tensor for each convolution and ``InPlaceABN`` (two with plain modules), the
    pooled map and its indices, and on the way up the concatenation.

    Args:
        in_channels: of the images.
        num_classes: channels of the result.
        dims: 2 or 3, the number of spatial dimensions.
        widths: channels at each level, from full size to the bottom, at least two.
        mode: how the way up enlarges: "linear" or "transposed", see ``Up``.
        bias: of the convolutions in front of a norm.  Off, as the mean that the norm subtracts takes any bias along.
        norm_act: called with a number of channels, returns the module after a convolution.  It may overwrite its input.

    Raises:
        ValueError: dims, widths, mode or channels outside the above; in forward, an input of another number of channels
            or dimensions, or too small to be halved that often.

    Source: Ronneberger et al., "U-Net", MICCAI 2015; Çiçek et al., "3D U-Net", MICCAI 2016.  Unlike theirs,
    convolutions are padded, so that the logits have the size of the image.
    """

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        *,
        dims: int = 2,
        widths: Sequence[int] = (64, 128, 256, 512, 1024),
        mode: str = "linear",
        bias: bool = False,
        norm_act: NormAct = InPlaceABN,
    ) -> None:
        super().__init__()
        check_dims("UNet", dims)
        widths = tuple(widths)
        if len(widths) < 2 or not all(isinstance(width, int) and width > 0 for width in widths):
            raise ValueError(f"fusedseg.unet.UNet: widths must be two or more positive integers, got {widths}")
        for name, value in (("in_channels", in_channels), ("num_classes", num_classes)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"fusedseg.unet.UNet: {name} must be a positive integer, got {value!r}")
        self.in_channels = in_channels
        self.dims = dims
        self.inc = DoubleConv(in_channels, widths[0], dims=dims, bias=bias, norm_act=norm_act)
        levels = list(pairwise(widths))
        self.downs = nn.ModuleList(
            Down(upper, lower, dims=dims, bias=bias, norm_act=norm_act) for upper, lower in levels
        )
        self.ups = nn.ModuleList(
            Up(lower, upper, upper, dims=dims, mode=mode, bias=bias, norm_act=norm_act)
            for upper, lower in reversed(levels)
        )
        self.out = CONV[dims](widths[0], num_classes, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        self._check(x)
        skips = [self.inc(x)]
        for down in self.downs:
            skips.append(down(skips[-1]))
        x = skips.pop()
        for up in self.ups:
            x = up(x, skips.pop())
        return self.out(x)

    def _check(self, x: Tensor) -> None:
        if x.dim() != self.dims + 2 or x.shape[1] != self.in_channels:
            raise ValueError(
                f"fusedseg.unet.UNet: input must have shape (N, {self.in_channels}) with {self.dims} spatial "
                f"dimensions after it, got {tuple(x.shape)}"
            )
        smallest = 2 ** len(self.downs)
        if min(x.shape[2:]) < smallest:
            raise ValueError(
                f"fusedseg.unet.UNet: every spatial size must be at least {smallest} to be halved {len(self.downs)} "
                f"times, got {tuple(x.shape)}"
            )
