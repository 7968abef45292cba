"""The convolution of 3x3x3 taps for few channels: by a Triton kernel (``kernels/conv3d.py``) where that is faster.

``convolution`` and ``convolution_backward`` have the arguments of aten's ops, for graphs of the compiler and for the
convolutions of sources (``convolutions.py``).  They are for code without autograd.  The kernel computes the convolution
and the gradient of its input.  The gradient of the weight is always the vendor's.

The kernel takes the vendor's place if ``Arguments.served`` allows it, and if a measurement at the first call of a kind
of convolution found it faster (``choice.is_faster``).

Sums are fp32 in a fixed order, and the result is rounded once.  A bias is added before that, where the vendor rounds
twice.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ... import _backend
from ..check import HALF
from ..registry import Result, family, serve
from ..self_test.cases import TOLERANCE, image, stock
from . import choice

aten = torch.ops.aten
FAMILY = "conv3d"
# The kernel is made for the products of Hopper (wgmma).  On other GPUs nobody has measured it.
ARCHITECTURE = "sm_90"
# The channels of the input and of the output.
LEAST_CHANNELS, MOST_CHANNELS, STEP_CHANNELS = 16, 64, 16
# Each sample is a program along the third dimension of the grid, where CUDA has no more.
MOST_SAMPLES = 2**16 - 1
ONES = (1, 1, 1)
CHANNELS_LAST = torch.channels_last_3d


class Arguments(NamedTuple):
    """The arguments that both of aten's ops take after the tensors and ``bias_sizes``."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int

    def served(self, x: Tensor, weight: Tensor) -> bool:
        """Whether the kernel computes this convolution, and the gradient of its input.

        It needs what ``fit`` names, and x in channels_last_3d without gaps.
        """
        return (
            self.fit(weight, x)
            and x.is_contiguous(memory_format=CHANNELS_LAST)
            # A fake tensor may be on a GPU that is not there, and which cannot be asked for its architecture.
            and (type(x) is Tensor or _backend.use_triton(x))
            and runs_on(x.device)
            # This comes last, because it may test the kernel.
            and not _backend.why_not(x, FAMILY)
        )

    def fit(self, weight: Tensor, x: Tensor | None = None) -> bool:
        """Whether the kernel computes convolutions of such shapes and dtypes, which do not change in a compiled graph.

        It needs 16-bit tensors, 16 to 64 channels on both sides in steps of 16, 3x3x3 taps with stride, padding and
        dilation 1 and without groups, at most MOST_SAMPLES samples, and samples of fewer than 2**31 elements.  Without
        x, the answer is as far as the weight alone tells.
        """
        # Cheap conditions come first, because most convolutions fail one of them.
        fits = (
            weight.dtype in HALF
            and not self.transposed
            and tuple(weight.shape[2:]) == (3, 3, 3)
            and self.groups == 1
            and tuple(self.stride) == tuple(self.padding) == tuple(self.dilation) == ONES
            # A loop over both numbers of channels would take three more calls.
            and LEAST_CHANNELS <= weight.shape[0] <= MOST_CHANNELS
            and LEAST_CHANNELS <= weight.shape[1] <= MOST_CHANNELS
            and weight.shape[0] % STEP_CHANNELS == weight.shape[1] % STEP_CHANNELS == 0
        )
        if x is None or not fits:
            return fits
        return (
            x.dtype == weight.dtype
            and weight.device == x.device
            and x.dim() == 5
            and x.shape[1] == weight.shape[1]
            and 0 < x.shape[0] <= MOST_SAMPLES
            # A single position has the same strides in both formats.
            and x.shape[2:].numel() > 1
            and max(weight.shape[:2]) * x.shape[2:].numel() < 2**31
        )


PLAIN = Arguments(ONES, ONES, ONES, False, (0, 0, 0), 1)


def runs_on(device: torch.device) -> bool:
    """Whether the kernel is made for a device; on a CPU, Triton's interpreter runs it in tests."""
    return device.type == "cpu" or (
        device.type == "cuda" and torch.version.hip is None and _backend.architecture(device) == ARCHITECTURE
    )


def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The convolution of ``x`` by the kernel; ``served`` is true."""
    return _launch(x, weight, bias, weight.shape[0], backward=False)


def input_gradient(dy: Tensor, weight: Tensor) -> Tensor:
    """The gradient of the input by the kernel; ``served`` is true, and ``dy`` has no gaps in channels_last_3d."""
    return _launch(dy, weight, None, weight.shape[1], backward=True)


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, channels: int, backward: bool) -> Tensor:
    from ...kernels.conv3d import conv3d, ordered_weight

    y = torch.empty((x.shape[0], channels, *x.shape[2:]), dtype=x.dtype, device=x.device, memory_format=CHANNELS_LAST)
    if not (weight.is_contiguous() or weight.is_contiguous(memory_format=CHANNELS_LAST)):
        weight = weight.contiguous()
    with _backend.launching(x):
        conv3d(x, ordered_weight(weight, backward), bias, y)
    return y


def reference_forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.convolution(x, weight, bias, *PLAIN)


def reference_input_gradient(dy: Tensor, weight: Tensor) -> Tensor:
    shape = (dy.shape[0], weight.shape[1], *dy.shape[2:])
    # aten reads the shape and the strides of x alone.
    x = torch.empty(shape, dtype=dy.dtype, device=dy.device, memory_format=CHANNELS_LAST)
    return aten.convolution_backward(dy, x, weight, None, *PLAIN, [True, False, False])[0]


def _is_faster(
    what: str, by_kernel: Callable[..., Tensor], by_vendor: Callable[..., Tensor], x: Tensor, weight: Tensor, *bias: Any
) -> bool:
    """Whether the kernel is right and faster for a call with these tensors."""

    def run(backend: str) -> Tensor:
        return (by_kernel if backend == "triton" else by_vendor)(x, weight, *bias)

    of = {"log2_positions": (x.shape.numel() // x.shape[1] - 1).bit_length(), "channels": tuple(weight.shape[:2])}
    return choice.is_faster(what, x, run, dtype=x.dtype, **of, has_bias=any(v is not None for v in bias))


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *given: Any) -> Tensor:
    """``aten.convolution``; ``given`` is ``Arguments``."""
    call = x, weight, bias
    if Arguments(*given).served(x, weight) and _is_faster("conv3d", forward, reference_forward, *call):
        return forward(*call)
    return torch.convolution(x, weight, bias, *given)


def convolution_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias_sizes: Sequence[int] | None, *given: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """``aten.convolution_backward``; ``given`` is ``Arguments`` and the mask of the wanted gradients.

    Only the gradient of the weight reads values of ``x``.
    """
    *shared, (need_x, *need_others) = given
    served = need_x and Arguments(*shared).served(x, weight)
    of_input = input_gradient, reference_input_gradient, dy, weight
    dense = served and dy.dtype == x.dtype and dy.is_contiguous(memory_format=CHANNELS_LAST)
    if dense and _is_faster("conv3d input gradient", *of_input):
        dw = dbias = None
        if any(need_others):
            _, dw, dbias = aten.convolution_backward(dy, x, weight, bias_sizes, *shared, [False, *need_others])
        return input_gradient(dy, weight), dw, dbias
    return aten.convolution_backward(dy, x, weight, bias_sizes, *given)


# A measurement chooses who computes, so that no call is replayed.
serve(aten.convolution.default, convolution, replayed=False)
serve(aten.convolution_backward.default, convolution_backward, replayed=False)


@family(FAMILY, dtypes=HALF, runs_on=runs_on)
def _self_test(dtype: torch.dtype, device: torch.device) -> Iterator[Result]:
    # 48 channels take two steps a tap, and leave lanes idle.  The last tile and the last plane are incomplete.
    C, K = 48, 32
    x = image((2, C, 3, 7, 33), dtype, device, "channels_last_3d", 0)
    weight = image((K, C, 3, 3, 3), dtype, device, "contiguous", 1)
    bias = image((K,), dtype, device, "contiguous", 2)
    dy = image((2, K, 3, 7, 33), dtype, device, "channels_last_3d", 3)
    y64, dx64, *_ = stock(partial(F.conv3d, padding=1), x, weight, bias, dy=dy)
    yield Result("y", forward(x, weight, bias), y64, TOLERANCE[dtype])
    yield Result("dx", input_gradient(dy, weight), dx64, TOLERANCE[dtype])
