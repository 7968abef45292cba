"""PyTorch's convolutions in the scope: backward frees an input that was rebuilt for it before it allocates dx.

aten computes both gradients of a convolution in one call, so that the rebuilt input, often a large concatenation, lies
beside a gradient of the same size.  Here the gradient of the weight comes first.  Both gradients have the bits of one
call of aten, and gradients of gradients work as well.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import _torch
from ..ops import reuse
from ..ops.conv.convolution import shape_only
from ..ops.double_backward import is_batch
from .calls import Args, Kwargs
from .plain import Place, plain
from .registry import Registry

_NAMES = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
# The functions, and the number of their spatial dimensions.
DIMS: dict[Callable[..., Any], int] = {F.conv2d: 2, F.conv3d: 3}


class Convolution(torch.autograd.Function):
    """The node of a convolution; it keeps what aten's node keeps, in the same order.

    ``call`` calls the function with x, w and the bias.  ``rest`` has the arguments of ``aten.convolution_backward``
    from the sizes of the bias to the groups.
    """

    @staticmethod
    def forward(ctx, call, rest, x, w, bias):
        ctx.rest = rest
        ctx.save_for_backward(x, w)
        # As in aten's node, a missing gradient of the output gives no gradients of the inputs.
        ctx.set_materialize_grads(False)
        return call(x, w, bias)

    @staticmethod
    def backward(ctx, dy):
        if dy is None:
            return (None,) * 5
        saved, (need_x, need_w, need_bias) = list(ctx.saved_tensors), ctx.needs_input_grad[2:]
        w = saved.pop()
        instead = None
        if need_x and (need_w or need_bias) and not is_batch(dy) and reuse.alone(saved, 0):
            instead = shape_only(dy, saved[0], w)
        x = saved.pop()
        backward = torch.ops.aten.convolution_backward
        if instead is None:
            return None, None, *backward(dy, x, w, *ctx.rest, [need_x, need_w, need_bias])
        _, dw, dbias = backward(dy, x, w, *ctx.rest, [False, need_w, need_bias])
        del x
        dx, _, _ = backward(dy, instead, w, *ctx.rest, [True, False, False])
        return None, None, dx, dw, dbias


def convolution(registry: Registry, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Calls ``func`` as a ``Convolution`` if its input is large and will be rebuilt in backward; otherwise as it is."""
    dims, x = DIMS.get(func), args[0] if args else None
    if dims is None or not isinstance(x, Tensor):
        return func(*args, **kwargs)
    if x.nbytes < reuse.LEAST_BYTES or not _is_rebuilt(registry, x):
        return func(*args, **kwargs)
    named = dict(zip(_NAMES, args, strict=False)) | kwargs
    w, bias, padding = named.get("weight"), named.get("bias"), named.get("padding", 0)
    tensors = [t for t in (x, w, bias) if t is not None]
    fits = all(isinstance(t, Tensor) and plain(t) and t.dtype == x.dtype and t.dtype.is_floating_point for t in tensors)
    # A dual level of forward-mode differentiation asks for rules that this node does not have.
    if not fits or isinstance(padding, str) or x.dim() != dims + 2 or _torch.in_forward_ad():
        return func(*args, **kwargs)
    stride, padding, dilation = (
        _each(named.get(name, n), dims) for name, n in zip(_NAMES[3:6], (1, 0, 1), strict=True)
    )
    groups, sizes = named.get("groups", 1), [0 if bias is None else bias.shape[0]]
    rest = sizes, stride, padding, dilation, False, [0] * dims, groups

    def call(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        return func(x, w, bias, stride, padding, dilation, groups)

    return Convolution.apply(call, rest, x, w, bias)


def _each(value: int | Sequence[int], dims: int) -> list[int]:
    return [value] * dims if isinstance(value, int) else list(value) * (dims if len(value) == 1 else 1)


def _is_rebuilt(registry: Registry, x: Tensor) -> bool:
    """Whether the scope saves a recipe of ``x``."""
    with _torch.DisableTorchFunction():
        if not (x.requires_grad and plain(x)):
            return False
        memory, at = registry._find(x.untyped_storage()), Place.of(x)
        if memory is None or memory.kept_at(at, x._version) is not None:
            return False
        return memory.offer_of(at, x._version) is not None
