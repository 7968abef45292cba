"""The blocks of a U-Net.  Every norm overwrites a convolution's output, which nobody else reads."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..nn import ConvABN2d, ConvABN3d, InPlaceABN

NormAct = Callable[[int], nn.Module]

CONV: dict[int, type[nn.Conv2d | nn.Conv3d]] = {2: nn.Conv2d, 3: nn.Conv3d}
CONV_ABN = {2: ConvABN2d, 3: ConvABN3d}
CONV_TRANSPOSE: dict[int, type[nn.Module]] = {2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
MAX_POOL: dict[int, type[nn.Module]] = {2: nn.MaxPool2d, 3: nn.MaxPool3d}
LINEAR = {2: "bilinear", 3: "trilinear"}


def check_dims(block: str, dims: int) -> None:
    if dims not in (2, 3):
        raise ValueError(f"fusedseg.unet.{block}: dims must be 2 or 3, got {dims!r}")


class ConvNormAct(nn.Module):
    """3x3(x3) convolution of padding 1, then ``norm_act``: (N, in_channels, *spatial) to (N, out_channels, *spatial).

    Kept for backward: the input, and what ``norm_act`` keeps: ``Sequential(BatchNorm2d, LeakyReLU)`` keeps two tensors.
    In the blocks below, ``ConvABN2d`` or ``ConvABN3d``, of the same children, stands in its place for ``InPlaceABN``:
    it keeps one, which is the next convolution's input as well.

    Args:
        in_channels, out_channels: of the convolution.
        dims: 2 or 3, the number of spatial dimensions.
        bias: of the convolution.  Off, as the mean that the norm subtracts takes any bias along.
        norm_act: called with ``out_channels``, returns the module after the convolution.  It may overwrite its input.
    """

    conv: nn.Conv2d | nn.Conv3d

    def __init__(
        self, in_channels: int, out_channels: int, *, dims: int = 2, bias: bool = False, norm_act: NormAct = InPlaceABN
    ) -> None:
        super().__init__()
        check_dims("ConvNormAct", dims)
        self.conv = CONV[dims](in_channels, out_channels, kernel_size=3, padding=1, bias=bias)
        self.norm = norm_act(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


def conv_norm_act(in_channels: int, out_channels: int, *, dims: int, bias: bool, norm_act: NormAct) -> nn.Module:
    """``ConvNormAct``, as one op where ``norm_act`` makes an ``InPlaceABN``."""
    module = ConvNormAct(in_channels, out_channels, dims=dims, bias=bias, norm_act=norm_act)
    if type(module.norm) is InPlaceABN:
        return CONV_ABN[dims]._of(module.conv, module.norm)
    return module


class DoubleConv(nn.Sequential):
    """``ConvNormAct``, or ``ConvABN``, twice: in_channels to out_channels to out_channels, of the same spatial size.

    Arguments and what is kept for backward: see ``ConvNormAct``.
    """

    def __init__(
        self, in_channels: int, out_channels: int, *, dims: int = 2, bias: bool = False, norm_act: NormAct = InPlaceABN
    ) -> None:
        check_dims("DoubleConv", dims)
        super().__init__(
            conv_norm_act(in_channels, out_channels, dims=dims, bias=bias, norm_act=norm_act),
            conv_norm_act(out_channels, out_channels, dims=dims, bias=bias, norm_act=norm_act),
        )


class Down(nn.Sequential):
    """``MaxPool(2)``, then ``DoubleConv``: every spatial size s becomes s // 2.

    Kept for backward: the input (a skip connection reads it too), the pool's output and int64 indices, and what
    ``DoubleConv`` keeps.
    """

    def __init__(
        self, in_channels: int, out_channels: int, *, dims: int = 2, bias: bool = False, norm_act: NormAct = InPlaceABN
    ) -> None:
        check_dims("Down", dims)
        super().__init__(
            MAX_POOL[dims](2), DoubleConv(in_channels, out_channels, dims=dims, bias=bias, norm_act=norm_act)
        )


class Up(nn.Module):
    """Enlarges x to the size of the skip, concatenates the skip and it, and applies ``DoubleConv``.

    x: (N, in_channels, *small), skip: (N, skip_channels, *spatial); returns (N, out_channels, *spatial).  Before the
    concatenation x has ``skip_channels`` channels, by one of

    * "linear": a 1x1 convolution, then bi- or trilinear interpolation to the skip's size, whatever that is.  Equals
      interpolating first, since the interpolation's weights sum to one, at a quarter (an eighth in 3D) of the
      arithmetic.
    * "transposed": a transposed 2x2 convolution of stride 2, for a skip of size 2 s or 2 s + 1 where x has size s; the
      odd last row holds the bias.

    Kept for backward: x, the concatenation, and what ``DoubleConv`` keeps.

    Args:
        in_channels, skip_channels, out_channels: of x, of the skip and of the result.
        dims: 2 or 3, the number of spatial dimensions.
        mode: "linear" or "transposed".
        bias: of the convolutions in front of a norm; the one that enlarges has a bias always.
        norm_act: see ``ConvNormAct``.

    Raises:
        ValueError: an unknown mode, or dims not 2 or 3; in forward, a skip that a transposed convolution cannot reach.

    Source: Ronneberger et al., "U-Net", MICCAI 2015 (the transposed convolution, their "up-convolution").
    """

    def __init__(
        self,
        in_channels: int,
        skip_channels: int,
        out_channels: int,
        *,
        dims: int = 2,
        mode: str = "linear",
        bias: bool = False,
        norm_act: NormAct = InPlaceABN,
    ) -> None:
        super().__init__()
        check_dims("Up", dims)
        if mode not in ("linear", "transposed"):
            raise ValueError(f"fusedseg.unet.Up: mode must be 'linear' or 'transposed', got {mode!r}")
        self.mode = mode
        self.interpolation = LINEAR[dims]
        if mode == "linear":
            self.up: nn.Module = CONV[dims](in_channels, skip_channels, kernel_size=1)
        else:
            self.up = CONV_TRANSPOSE[dims](in_channels, skip_channels, kernel_size=2, stride=2)
        self.conv = DoubleConv(2 * skip_channels, out_channels, dims=dims, bias=bias, norm_act=norm_act)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        size = skip.shape[2:]
        if self.mode == "linear":
            x = F.interpolate(self.up(x), size=size, mode=self.interpolation)
        elif any(big // 2 != small for big, small in zip(size, x.shape[2:], strict=True)):
            raise ValueError(
                f"fusedseg.unet.Up: a transposed convolution doubles a size s to 2 s or 2 s + 1; x {tuple(x.shape)} "
                f"cannot reach the skip {tuple(skip.shape)}"
            )
        else:
            x = self.up(x, output_size=size)
        # rebound, so that the enlarged map is gone before the convolutions allocate
        x = torch.cat([skip, x], dim=1)
        return self.conv(x)
