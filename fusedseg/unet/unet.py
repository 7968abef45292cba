"""U-Nets: encoders that halve the spatial size at every level and a decoder that restores it through skips."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from ..ops.check import check_positive
from .blocks import CONV, DoubleConv, Down, NormAct, Up, check_dims


def check_widths(net: str, name: str, widths: Sequence[int], count: int | None = None) -> tuple[int, ...]:
    widths = tuple(widths)
    enough = len(widths) >= 2 if count is None else len(widths) == count
    if not enough or not all(isinstance(width, int) and width > 0 for width in widths):
        wanted = "two or more" if count is None else count
        raise ValueError(f"fusedseg.unet.{net}: {name} must be {wanted} positive integers, got {widths}")
    return widths


class MultiEncoderUNet(nn.Module):
    """A U-Net with an encoder for each of several images, whose bottoms and skips one decoder joins.

    It maps images (N, in_channels[i], *spatial) of one spatial size to logits (N, num_classes, *spatial), in two or
    three dimensions.  Each encoder has ``widths[0]`` channels at full size.  Each further width is one level at half
    the size, on the way down and up.  Any spatial size of at least ``2 ** (len(widths) - 1)`` works, odd sizes too,
    because pooling rounds down and the way up restores the size.

    Kept for backward: one tensor for each convolution and its norm, and one byte for each element of a pool's output.
    The concatenations (of the bottoms, and of the skips with the enlarged map) and the enlarged map are not kept, and
    large concatenations are not formed.  ``plain=True`` builds the network of stock modules, which keeps them all.

    Args:
        in_channels: the channels of each image.
        num_classes: the channels of the result.
        dims: 2 or 3, the number of spatial dimensions.
        widths: the channels of each encoder at each level, from full size to the bottom, at least two.
        up_widths: the channels of the decoder's levels, from the lowest level to full size; by default as many as all
            skips of the level have.
        mode, reduce, fit, align_corners: how the decoder enlarges, see ``Up``.
        bias, norm_act: of the convolutions before a norm, and what follows each of them, see ``ConvNormAct``.
        plain: True builds the network from stock modules only (BatchNorm and LeakyReLU unless ``norm_act`` says
            otherwise).  It is the same function, with the same parameters in the same order, for comparison.

    Raises:
        ValueError: an argument is outside these ranges; in forward, the number of images, their channels or dimensions
            are wrong, an image is too small to be halved at every level, or so small that a norm would take the
            statistics of a single value.

    Source: Ronneberger et al., "U-Net", MICCAI 2015; Çiçek et al., "3D U-Net", MICCAI 2016.  Unlike theirs,
    convolutions are padded, so that the logits have the size of the image.
    """

    def __init__(
        self,
        in_channels: Sequence[int],
        num_classes: int,
        *,
        dims: int = 2,
        widths: Sequence[int] = (64, 128, 256, 512, 1024),
        up_widths: Sequence[int] | None = None,
        mode: str = "linear",
        reduce: bool = True,
        fit: str = "resize",
        align_corners: bool = False,
        bias: bool = False,
        norm_act: NormAct | str | None = None,
        plain: bool = False,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        check_dims(name, dims)
        widths = check_widths(name, "widths", widths)
        in_channels = tuple(in_channels)
        if not in_channels:
            raise ValueError(f"fusedseg.unet.{name}: in_channels must name at least one image, got none")
        for channels in in_channels:
            check_positive(f"fusedseg.unet.{name}", "in_channels", channels)
        check_positive(f"fusedseg.unet.{name}", "num_classes", num_classes)
        encoders = len(in_channels)
        skip_widths = [encoders * width for width in reversed(widths[:-1])]
        up_widths = skip_widths if up_widths is None else check_widths(name, "up_widths", up_widths, len(widths) - 1)
        self.in_channels, self.dims = in_channels, dims
        # "" stands for a norm of the caller, whose statistics are unknown.
        self._norm = norm_act if isinstance(norm_act, str) else "batch" if norm_act is None else ""
        options: dict[str, Any] = {"dims": dims, "bias": bias, "norm_act": norm_act, "plain": plain}
        self.incs = nn.ModuleList(DoubleConv(channels, widths[0], **options) for channels in in_channels)
        self.downs = nn.ModuleList(
            nn.ModuleList(Down(upper, lower, **options) for upper, lower in pairwise(widths)) for _ in in_channels
        )
        self.ups = nn.ModuleList(
            Up(lower, skip, up, mode=mode, reduce=reduce, fit=fit, align_corners=align_corners, **options)
            for lower, skip, up in zip([encoders * widths[-1], *up_widths], skip_widths, up_widths, strict=False)
        )
        self.out = CONV[dims](up_widths[-1], num_classes, kernel_size=1)

    def forward(self, *images: Tensor) -> Tensor:
        self._check(images)
        # The indices of levels are [level][encoder].
        levels = [[inc(x) for inc, x in zip(self.incs, images, strict=True)]]
        for downs in zip(*self.downs, strict=True):
            levels.append([down(x) for down, x in zip(downs, levels[-1], strict=True)])
        x: object = levels.pop()
        for up in self.ups:
            x = up(x, levels.pop())
        return self.out(x)

    def _check(self, images: Sequence[Tensor]) -> None:
        name = type(self).__name__
        if len(images) != len(self.in_channels):
            raise ValueError(f"fusedseg.unet.{name}: expected {len(self.in_channels)} images, got {len(images)}")
        for x, channels in zip(images, self.in_channels, strict=True):
            if x.dim() != self.dims + 2 or x.shape[1] != channels:
                raise ValueError(
                    f"fusedseg.unet.{name}: input must have shape (N, {channels}) with {self.dims} spatial "
                    f"dimensions after it, got {tuple(x.shape)}"
                )
            if x.shape[0] != images[0].shape[0] or x.shape[2:] != images[0].shape[2:]:
                raise ValueError(
                    f"fusedseg.unet.{name}: images must have one batch and spatial size, got "
                    f"{[tuple(image.shape) for image in images]}"
                )
        levels = len(self.ups)
        if min(images[0].shape[2:]) < 2**levels:
            raise ValueError(
                f"fusedseg.unet.{name}: every spatial size must be at least {2**levels} to be halved {levels} "
                f"times, got {tuple(images[0].shape)}"
            )
        if not torch.compiler.is_compiling():
            self._check_lowest_level(images[0], levels)

    def _check_lowest_level(self, x: Tensor, levels: int) -> None:
        """Raises ValueError if a norm would take the statistics of a single value.

        The norm itself would raise too, but without the image size that works.
        """
        samples = 1 if self._norm == "instance" else x.shape[0]
        if self._norm not in ("batch", "instance") or samples * math.prod(n // 2**levels for n in x.shape[2:]) != 1:
            return
        norms: list[Any] = [
            module for module in self.downs.modules() if isinstance(module, (_BatchNorm, _InstanceNorm))
        ]
        # Frozen norms take no statistics.
        if any(norm.training or norm.running_mean is None for norm in norms):
            larger = f"a spatial size of at least {2 ** (levels + 1)}"
            raise ValueError(
                f"fusedseg.unet.{type(self).__name__}: {self._norm} norms need more than one value for their "
                f"statistics, and images of shape {tuple(x.shape)} have one left after {levels} halvings; pass images "
                f"with {larger}{'' if self._norm == 'instance' else ', or two samples or more'}"
            )

    def load_stock_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Loads the weights of a network of stock modules with the same structure; names of modules may differ.

        Tensors are matched in order: convolution, BatchNorm, convolution, BatchNorm, ... from the encoders through the
        decoder to the last convolution.

        Raises:
            ValueError: the number of tensors or a shape differs.  Nothing is loaded then.
        """
        where = f"fusedseg.unet.{type(self).__name__}.load_stock_state_dict"
        own = self.state_dict()
        if len(own) != len(state):
            raise ValueError(f"{where}: expected {len(own)} tensors, got {len(state)}")
        matched = {}
        for (name, mine), (other, value) in zip(own.items(), state.items(), strict=True):
            if mine.shape != value.shape:
                raise ValueError(
                    f"{where}: {other} for {name} must have shape {tuple(mine.shape)}, got {tuple(value.shape)}"
                )
            matched[name] = value
        self.load_state_dict(matched)


class UNet(MultiEncoderUNet):
    """A U-Net for one image: (N, in_channels, *spatial) to logits (N, num_classes, *spatial).

    ``MultiEncoderUNet`` describes the network, the arguments, the tensors kept for backward and the errors; here
    ``in_channels`` is a number.

    ``UNet(..., plain=True)`` is the same function of stock PyTorch modules, with the same parameters in the same order.
    """

    def __init__(self, in_channels: int, num_classes: int, **options: Any) -> None:
        check_positive("fusedseg.unet.UNet", "in_channels", in_channels)
        super().__init__((in_channels,), num_classes, **options)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)
