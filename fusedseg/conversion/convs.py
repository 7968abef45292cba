"""Convolutions of a converted model.

They keep their paths and parameters, and differ from the stock class in three cases.

* The input is a concatenation.  The convolution then keeps the sources of the concatenation
  (``scope/joins.py``).  The scope alone would keep the same bytes, but backward then forms neither the
  concatenation nor a gradient of its size.
* A 1x1 convolution reads an enlarged tensor.  It then keeps the small tensor, and backward computes all gradients at
  the small size (``ops/conv/apart.py``).
* A BatchNorm and an invertible activation follow, and one op for all three is faster (``pays``).  The convolution then
  computes all three and marks the tensor.  The norm sees the mark and returns its input, as the activation does.

In all other cases they run the stock convolution.  They also run it under ``torch.compile``, and where anybody looks at
the call, who must see its output.
"""

from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from .._module_hooks import is_called_unseen
from ..nn.conv_abn import convolved_and_normalised
from ..nn.join_conv import geometry_of
from ..nn.stock_norm import StockNorm
from ..ops.conv import join_conv
from ..ops.conv.convolution import looped
from ..ops.conv.sources import Convolution, Source, is_pointwise, is_tensor, padded, tensors_of
from ..scope.joins import saving_sources, sources_of
from .norms import MARK, NORM_OF_CONV

OP = "fusedseg.convert"


def pays(x: Tensor) -> bool:
    """Whether one op for convolution, norm and activation is faster than two ops.

    On a GPU one op reads and writes memory no more often than two.  It saves a pass in forward and a pass in backward
    if the convolution has a bias, and a pass in forward if Triton's epilogue computes the statistics.  On a CPU one op
    saves nothing.  The exception is one small fp32 volume, which torch would convolve by a loop.
    """
    return x.is_cuda or looped(x)


class _LeanConv(nn.Module):
    # The norm is an attribute but no child module, because it has a path of its own in the model.
    norm: StockNorm | None

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        # Code that replaces ``_conv_forward``, such as for another padding, is called by the stock forward.
        if not torch.compiler.is_compiling() and "_conv_forward" not in self.__dict__:
            sources = sources_of(input)
            if sources is not None and not is_tensor(sources) and _is_linear_in_channels(self):
                return self._joined(sources, input)
            norm = self.__dict__["norm"]
            if norm is not None and pays(input) and self._unobserved(norm):
                z = convolved_and_normalised(OP, self, norm, (input,))  # type: ignore[arg-type]
                setattr(z, MARK, True)
                return z
        return super().forward(input)

    def _unobserved(self, norm: StockNorm) -> bool:
        """Whether nobody sees the tensor between the convolution and the norm, and the norm looks for the mark.

        A norm that was converted to a synchronised norm does not look for the mark.  The wiring looks at the modules
        between both; this also finds hooks where code calls the convolution without the model's own forward.
        """
        if type(norm) not in NORM_OF_CONV.values() or type(self).forward is not _LeanConv.forward:
            return False
        return not norm._aside.now and is_called_unseen(self, norm)

    def _joined(self, sources: tuple[Source, ...], formed: Tensor) -> Tensor:
        conv: Any = self
        _, geometry = padded(OP, sources, geometry_of(conv))
        whole, _, _ = join_conv.autocast((formed,), conv.weight, conv.bias)
        call = Convolution(*join_conv.autocast(sources, conv.weight, conv.bias), geometry)
        join_conv.check(OP, call)
        with saving_sources():
            return join_conv.join_conv(call, *tensors_of(whole))


class LeanConv2d(_LeanConv, nn.Conv2d):
    pass


class LeanConv3d(_LeanConv, nn.Conv3d):
    pass


LEAN: dict[type, type[_LeanConv]] = {nn.Conv2d: LeanConv2d, nn.Conv3d: LeanConv3d}


def joins(conv: object) -> TypeGuard[nn.Conv2d | nn.Conv3d]:
    """Whether the convolution of a concatenation can be computed from its sources one by one."""
    return type(conv) in LEAN and _is_linear_in_channels(conv)


def shrinks(conv: object) -> bool:
    """Whether the gradients of the convolution of an enlarged tensor can be computed at the size before."""
    return joins(conv) and conv.out_channels <= conv.in_channels and is_pointwise(conv.kernel_size, conv)


def _is_linear_in_channels(conv: Any) -> bool:
    return conv.groups == 1 and conv.padding_mode == "zeros" and conv.padding != "same"


def lean(conv: nn.Module, norm: nn.Module | None) -> nn.Module:
    """The module that ``conv`` becomes; ``norm`` is the norm whose work it may do, or None."""
    twin = LEAN[type(conv)].__new__(LEAN[type(conv)])
    nn.Module.__init__(twin)
    twin.__dict__["norm"] = norm
    return twin
