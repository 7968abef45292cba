"""The blocks of a U-Net.  Every norm overwrites the output of a convolution, which no other module reads."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..nn import (
    ConvABN2d,
    ConvABN3d,
    InPlaceABN,
    InPlaceGroupNormAct,
    InPlaceInstanceNormAct,
    Interpolated,
    JoinConv2d,
    JoinConv3d,
    MaxPool2d,
    MaxPool3d,
)
from ..ops.check import check_choice

NormAct = Callable[[int], nn.Module]
NORMS: dict[str, Any] = {norm.KIND.name: norm for norm in (InPlaceABN, InPlaceInstanceNormAct, InPlaceGroupNormAct)}

CONV: dict[int, type[nn.Conv2d | nn.Conv3d]] = {2: nn.Conv2d, 3: nn.Conv3d}
JOIN_CONV: dict[int, type[JoinConv2d | JoinConv3d]] = {2: JoinConv2d, 3: JoinConv3d}
CONV_ABN = {2: ConvABN2d, 3: ConvABN3d}
CONV_TRANSPOSE: dict[int, type[nn.Module]] = {2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
PLAIN_MAX_POOL: dict[int, type[nn.Module]] = {2: nn.MaxPool2d, 3: nn.MaxPool3d}
MAX_POOL: dict[int, type[nn.Module]] = {2: MaxPool2d, 3: MaxPool3d}
LINEAR = {2: "bilinear", 3: "trilinear"}
MODES = ("linear", "transposed")
FITS = ("resize", "pad")


def check_dims(block: str, dims: int) -> None:
    if dims not in (2, 3):
        raise ValueError(f"fusedseg.unet.{block}: dims must be 2 or 3, got {dims!r}")


def groups_of(channels: int) -> int:
    """The number of groups of a GroupNorm: 8, or the greatest common divisor of 8 and ``channels``."""
    return math.gcd(8, channels)


def norm_act_of(norm_act: NormAct | str | None, dims: int, plain: bool) -> NormAct:
    """The function that makes the module after a convolution; with ``plain`` from stock modules."""
    if norm_act is not None and not isinstance(norm_act, str):
        return norm_act
    name = norm_act or "batch"
    check_choice("fusedseg.unet.ConvNormAct", "norm_act", name, tuple(NORMS))
    cls = NORMS[name].KIND.module(dims) if plain else NORMS[name]

    def made(channels: int) -> nn.Module:
        norm = cls(*([groups_of(channels)] if name == "group" else []), channels, affine=True)
        return nn.Sequential(norm, nn.LeakyReLU(0.01, inplace=True)) if plain else norm

    return made


class ConvNormAct(nn.Module):
    """3x3(x3) convolution of padding 1, then ``norm_act``: (N, in_channels, *spatial) to (N, out_channels, *spatial).

    Kept for backward: the input, and the tensors that ``norm_act`` keeps.  ``Sequential(BatchNorm2d, LeakyReLU)`` keeps
    two tensors.  If the norm is an ``InPlaceABN``, the blocks below use ``ConvABN2d`` or ``ConvABN3d`` with the same
    children instead, which keeps one tensor; that tensor is also the next convolution's input.

    Args:
        in_channels, out_channels: the channels of the convolution.
        dims: 2 or 3, the number of spatial dimensions.
        bias: whether the convolution has a bias.  By default it has none, because the norm subtracts the mean, which
            contains the bias.
        norm_act: a function that is called with ``out_channels`` and returns the module after the convolution, which
            may overwrite its input; or a name.  "batch" (or None) stands for ``InPlaceABN``, "instance" for
            ``InPlaceInstanceNormAct`` with parameters, "group" for ``InPlaceGroupNormAct`` with 8 groups.  With
            ``plain`` the names stand for the stock norm and LeakyReLU.
        plain: True builds the block from stock modules only, for comparison.  Otherwise the input may be several
            sources, see ``JoinConv2d``.

    Raises:
        ValueError: ``dims`` is not 2 or 3, or the name of the norm is unknown.
    """

    conv: nn.Conv2d | nn.Conv3d

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        dims: int = 2,
        bias: bool = False,
        norm_act: NormAct | str | None = None,
        plain: bool = False,
    ) -> None:
        super().__init__()
        check_dims("ConvNormAct", dims)
        conv = CONV if plain else JOIN_CONV
        self.conv = conv[dims](in_channels, out_channels, kernel_size=3, padding=1, bias=bias)
        self.norm = norm_act_of(norm_act, dims, plain)(out_channels)

    def forward(self, x: Tensor | Sequence[Tensor | Interpolated]) -> Tensor:
        # No name holds the output of the convolution, so that it is freed after its only use.
        return self.norm(self.conv(x))


def conv_norm_act(in_channels: int, out_channels: int, **options: Any) -> nn.Module:
    """A ``ConvNormAct``, or a ``ConvABN`` if its norm is an ``InPlaceABN``."""
    module = ConvNormAct(in_channels, out_channels, **options)
    if options.get("plain") or type(module.norm) is not InPlaceABN:
        return module
    return CONV_ABN[options.get("dims", 2)]._of(module.conv, module.norm)


class DoubleConv(nn.Sequential):
    """Two blocks, ``ConvNormAct`` or ``ConvABN``: (N, in_channels, *spatial) to (N, out_channels, *spatial).

    ``ConvNormAct`` describes the arguments and the tensors kept for backward.
    """

    def __init__(self, in_channels: int, out_channels: int, **options: Any) -> None:
        check_dims("DoubleConv", options.get("dims", 2))
        super().__init__(
            conv_norm_act(in_channels, out_channels, **options), conv_norm_act(out_channels, out_channels, **options)
        )


class Down(nn.Sequential):
    """Max-pooling by 2, then ``DoubleConv``: every spatial size s becomes s // 2.

    Kept for backward: the pool's output, one byte for each of its elements, and the tensors that ``DoubleConv`` keeps.
    A stock pool keeps its input, and eight bytes for each element of its output.  ``ConvNormAct`` describes the
    arguments.
    """

    def __init__(self, in_channels: int, out_channels: int, **options: Any) -> None:
        dims = options.get("dims", 2)
        check_dims("Down", dims)
        pool = PLAIN_MAX_POOL if options.get("plain") else MAX_POOL
        super().__init__(pool[dims](2), DoubleConv(in_channels, out_channels, **options))


class Up(nn.Module):
    """Enlarges x to the size of the skips, joins it with the skips, and applies ``DoubleConv``.

    Shapes: x is (N, in_channels, *small), or several tensors with ``in_channels`` channels together.  The skips are
    (N, skip_channels, *spatial), in one tensor or several.  The result is (N, out_channels, *spatial).  x is enlarged
    in one of two modes:

    * "linear" interpolates bi- or trilinearly.  With ``fit="resize"`` it interpolates to the skip's size, which may be
      any size; with ``fit="pad"`` it interpolates by 2 and pads with zeros to the skip's size.  With ``reduce``, a 1x1
      convolution to ``up_channels`` runs before the interpolation.  This equals a convolution after the interpolation,
      because the weights of the interpolation sum to one, and costs a quarter (in 3D an eighth) of it.
    * "transposed" applies a transposed 2x2 convolution of stride 2.  If x has size s, the skip must have size 2 s or
      2 s + 1; in the second case the last row holds the bias.

    Kept for backward: x, the skips (which the modules that made them keep anyway), and the tensors that ``DoubleConv``
    keeps.  The concatenation and the interpolated map are kept only if ``fit="pad"`` has to pad.

    Args:
        in_channels, skip_channels, out_channels: the channels of x, of all skips together and of the result.
        dims: 2 or 3, the number of spatial dimensions.
        mode: "linear" or "transposed".
        reduce: whether "linear" has a 1x1 convolution.
        up_channels: the channels of the enlarged map; by default ``skip_channels``.  Without ``reduce`` they are
            ``in_channels``.
        fit: "resize" or "pad".
        align_corners: as in ``torch.nn.functional.interpolate``.
        bias, norm_act, plain: as in ``ConvNormAct``.

    The convolution that enlarges always has a bias.

    Raises:
        ValueError: the mode or fit is unknown, or ``dims`` is not 2 or 3; in forward, the skips have several sizes, or
            a transposed convolution or padding cannot reach the size of the skip.

    Source: Ronneberger et al., "U-Net", MICCAI 2015 (the transposed convolution, their "up-convolution").
    """

    def __init__(
        self,
        in_channels: int,
        skip_channels: int,
        out_channels: int,
        *,
        mode: str = "linear",
        reduce: bool = True,
        up_channels: int | None = None,
        fit: str = "resize",
        align_corners: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        dims, plain = options.get("dims", 2), options.get("plain", False)
        check_dims("Up", dims)
        check_choice("fusedseg.unet.Up", "mode", mode, MODES)
        check_choice("fusedseg.unet.Up", "fit", fit, FITS)
        self.mode, self.fit, self.plain = mode, fit, plain
        self.interpolation, self.align_corners = LINEAR[dims], align_corners
        up_channels = skip_channels if up_channels is None else up_channels
        if mode == "transposed":
            self.up: nn.Module = CONV_TRANSPOSE[dims](in_channels, up_channels, kernel_size=2, stride=2)
        elif reduce:
            conv = CONV if plain else JOIN_CONV
            self.up = conv[dims](in_channels, up_channels, kernel_size=1)
        else:
            self.up, up_channels = nn.Identity(), in_channels
        self.conv = DoubleConv(skip_channels + up_channels, out_channels, **options)

    def forward(self, x: Tensor | Sequence[Tensor], skips: Tensor | Sequence[Tensor]) -> Tensor:
        sources: list[Any] = [skips] if isinstance(skips, Tensor) else list(skips)
        size = sources[0].shape[2:]
        if any(skip.shape[2:] != size for skip in sources):
            raise ValueError(
                f"fusedseg.unet.Up: skips must have one spatial size, got {[tuple(skip.shape) for skip in sources]}"
            )
        sources.append(self._enlarged(x, size))
        # The names are rebound, so that the enlarged map is freed before the convolutions allocate.
        joined = torch.cat(sources, dim=1) if self.plain else sources
        del sources
        return self.conv(joined)

    def _enlarged(self, x: Tensor | Sequence[Tensor], size: torch.Size) -> Tensor | Interpolated:
        xs = (x,) if isinstance(x, Tensor) else tuple(x)
        small = xs[0].shape[2:]
        takes_several = isinstance(self.up, (JoinConv2d, JoinConv3d))
        source = xs if takes_several else xs[0] if len(xs) == 1 else torch.cat(xs, dim=1)
        if self.mode == "transposed":
            if any(big // 2 != s for big, s in zip(size, small, strict=True)):
                raise ValueError(
                    f"fusedseg.unet.Up: a transposed convolution doubles a size s to 2 s or 2 s + 1; x of size "
                    f"{tuple(small)} cannot reach the skip of size {tuple(size)}"
                )
            return self.up(source, output_size=size)
        reached = size if self.fit == "resize" else torch.Size(2 * s for s in small)
        missing = [big - up for big, up in zip(size, reached, strict=True)]
        if min(missing) < 0:
            raise ValueError(
                f"fusedseg.unet.Up: x of size {tuple(small)}, enlarged by 2, is larger than the skip of size "
                f"{tuple(size)}, to which it would be padded"
            )
        options: dict[str, Any] = {"size": reached, "mode": self.interpolation, "align_corners": self.align_corners}
        if isinstance(source, Tensor) and self.plain:
            enlarged = self.up(F.interpolate(source, **options))
        elif not any(missing):
            return Interpolated(self.up(source), **options)
        else:
            enlarged = Interpolated(self.up(source), **options).formed()
        if any(missing):
            return F.pad(enlarged, [n for more in reversed(missing) for n in (more // 2, more - more // 2)])
        return enlarged
