"""Convolutions of a converted model: at their own paths, with their own parameters, but for two cases.

* A convolution that reads a concatenation keeps its sources instead (``ops/recompute/joins.py``).  The scope keeps the
  same bytes anyway; but in backward, a concatenation and a gradient of its size are not formed.
* A BatchNorm and an invertible activation follow, and one op for the three pays: the convolution computes it, and the
  norm, which finds a mark on the tensor, passes it on as the activation does.

Wherever else, under ``torch.compile``, and where a hook of the convolution's wants to see its output, they are the
stock convolution.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from ..nn import InPlaceABN
from ..nn.conv_abn import convolved_and_normalised, has_hooks
from ..nn.join_conv import arguments_of
from ..nn.leaf import as_leaf
from ..ops import join_conv
from ..ops.convolution import looped
from ..ops.recompute.joins import saving_sources, sources_of
from ..ops.sources import Source, is_tensor, padded, tensors_of
from .norms import MARK, NORM_OF_CONV

OP = "fusedseg.convert"


def pays(x: Tensor) -> bool:
    """Whether one op for convolution, norm and activation is faster than two.

    On a GPU it touches memory no more often, and less where the convolution has a bias (a pass forward and one
    backward) or Triton's epilogue leaves the statistics.  On a CPU it takes as long or up to 5 % longer (measured), but
    for one small fp32 volume, which torch would convolve by a loop: a fifth of the time.
    """
    return x.is_cuda or looped(x)


class _LeanConv(nn.Module):
    # an attribute, but no child: the norm has its own path
    norm: InPlaceABN | None

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        if isinstance(input, Proxy):
            return as_leaf(self, input)
        if not torch.compiler.is_compiling():
            sources = sources_of(input)
            if sources is not None and not is_tensor(sources):
                return self._joined(sources, input)
            norm = self.__dict__["norm"]
            if norm is not None and pays(input) and self._unobserved(norm):
                z = convolved_and_normalised(OP, self, norm, (input,))  # type: ignore[arg-type]
                setattr(z, MARK, True)
                return z
        return super().forward(input)

    def _unobserved(self, norm: InPlaceABN) -> bool:
        """Nobody wants to see what the convolution gives to the norm; and the norm is still one that passes things on,
        not one that synchronises."""
        hooks = norm._forward_pre_hooks or norm._backward_hooks or norm._backward_pre_hooks
        return type(norm) in NORM_OF_CONV.values() and not (hooks or has_hooks(self))

    def _joined(self, sources: tuple[Source, ...], formed: Tensor) -> Tensor:
        conv: Any = self
        _, geometry = padded(OP, sources, *arguments_of(conv))
        whole, weight, bias = join_conv.autocast((formed,), conv.weight, conv.bias)
        sources, _, _ = join_conv.autocast(sources, conv.weight, conv.bias)
        join_conv.check(OP, sources, weight, bias, geometry)
        with saving_sources():
            return join_conv.join_conv(sources, weight, bias, geometry, *tensors_of(whole))


class LeanConv2d(_LeanConv, nn.Conv2d):
    pass


class LeanConv3d(_LeanConv, nn.Conv3d):
    pass


LEAN: dict[type, type[_LeanConv]] = {nn.Conv2d: LeanConv2d, nn.Conv3d: LeanConv3d}


def joins(conv: Any) -> bool:
    """Whether sources can be convolved one by one."""
    return type(conv) in LEAN and conv.groups == 1 and conv.padding_mode == "zeros" and conv.padding != "same"


def lean(conv: nn.Module, norm: nn.Module | None) -> nn.Module:
    """What ``conv`` is to become."""
    twin = LEAN[type(conv)].__new__(LEAN[type(conv)])
    nn.Module.__init__(twin)
    twin.__dict__["norm"] = norm
    return twin
