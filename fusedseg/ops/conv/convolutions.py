"""A convolution of sources (``sources.py``) and its gradients, in PyTorch's own functions.

A convolution of volumes, and the gradient of its input, are computed by the kernel of ``conv3d.py`` where that is
faster, unless ``conv_backend`` is "aten".

A small concatenation of sources is formed and convolved at once.  A large one is never formed, because a convolution
is a sum over its channels:

    conv([a, b], W) = conv(a, W[:, :Ca]) + conv(b, W[:, Ca:])

What is added to a large result or gradient is computed in slabs, which are ranges of samples, so that only one slab
lies beside the tensors of full size.

A 1x1 convolution and an interpolation U commute, because the weights of an interpolation sum to one.  So backward
applies the transpose of U to dy, and computes all gradients from the small tensor x:

    y = W U x + b:    g = U^T dy,  dx = W^T g,  dW = g x^T,  db = sum(g)

This neither enlarges x again nor convolves at full size, and U^T is applied to the channels of dy instead of those
of x.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ... import _backend, _torch
from ..._backend import Backend
from .. import reuse
from . import conv3d
from .geometry import Geometry, output_format
from .sources import Interpolated, Source, concatenated, enlarges_of, is_tensor, samples_of, shape_of, tensors_of

aten = torch.ops.aten
GRADIENTS = _torch.bare_op(aten.convolution_backward.default)
# A concatenation of up to this many bytes is formed for a moment, because one convolution is faster than several.
FORMED_BYTES = 2**22
# A slab has at least this many bytes, so that it keeps a GPU busy for longer than a launch takes.
SLAB_BYTES = 2**25

# Which gradients of a convolution are wanted: those of x, of the weight and of the bias.
Wanted = tuple[bool, bool, bool]
# These gradients; None for one that is not wanted.
ConvolutionGradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def stock_convolution(x: Tensor, w: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    """The stock function, for programs that run without this package."""
    convolve: Callable[..., Tensor] = F.conv2d if x.dim() == 4 else F.conv3d
    return convolve(x, w, bias, *geometry)


def _is_vendors(w: Tensor, conv_backend: Backend) -> bool:
    """Whether the vendor's library computes a convolution without a question to ``conv3d.py``.

    The compiler traces stock functions, and its code asks by itself.
    """
    return w.dim() != 5 or conv_backend == "aten" or torch.compiler.is_compiling()


def convolve(x: Tensor, w: Tensor, bias: Tensor | None, geometry: Geometry, conv_backend: Backend = "auto") -> Tensor:
    """The convolution; its result has the memory format of ``output_format``."""
    # This binding is called with less overhead than torch.ops.
    convolution = torch.convolution if _is_vendors(w, conv_backend) else conv3d.convolution
    y = convolution(x, w, bias, *geometry.arguments)
    return y.contiguous(memory_format=output_format(x, w))


def convolve_backward(
    dy: Tensor,
    inputs: list[Tensor],
    w: Tensor,
    geometry: Geometry,
    wanted: Wanted,
    conv_backend: Backend = "auto",
) -> ConvolutionGradients:
    """The gradients of x, w and the bias; ``inputs`` is a list with x, as in ``in_turn``."""
    if not any(wanted):
        return None, None, None
    gradients = aten.convolution_backward if _is_vendors(w, conv_backend) else conv3d.convolution_backward
    rest = w, [w.shape[0]], *geometry.arguments, list(wanted)
    if wanted[0] and any(wanted[1:]) and reuse.is_large(inputs[0]):
        return in_turn(gradients, inputs, dy, *rest)
    return gradients(dy, inputs.pop(), *rest)


def in_turn(
    of_input: Callable[..., Any], inputs: list[Tensor], dy: Tensor, w: Tensor, *given: Any
) -> ConvolutionGradients:
    """All gradients of a convolution, that of its input last, so that the input is gone before that is allocated.

        dw = convolution_backward(dy, x, w)         the last reader of x
        dx = convolution_backward(dy, like x, w)    from the shape of x alone

    The gradients have the same bits as those of one call.

    Args:
        of_input: what computes the gradient of the input; it has the arguments of aten's op.
        inputs: a list with x, the only reference to it, which is taken off the list.
        given: what aten's op takes behind the tensors.
    """
    x = inputs.pop()
    *geometry, mask = given
    instead = shape_only(dy, x, w)
    if instead is None:
        return of_input(dy, x, w, *given)
    _, dw, dbias = GRADIENTS(dy, x, w, *geometry, [False, *mask[1:]])
    del x
    dx, _, _ = of_input(dy, instead, w, *geometry, [True, False, False])
    return dx, dw, dbias


def shape_only(dy: Tensor, x: Tensor, w: Tensor) -> Tensor | None:
    """A tensor with the shape and strides of ``x`` that stands for ``x`` where only the gradient of ``x`` is asked for.

    Nobody reads a value of ``x`` then.  The result lies in memory that is there anyway, usually that of ``dy``.  It is
    None if no such tensor is safe, or if aten would copy it.
    """
    if dy.dtype != x.dtype:
        return None
    # A subclass, such as a fake tensor, may have symbols for sizes, which a cache cannot find again.
    plain = type(dy) is type(x) is Tensor
    if _fits(x.shape, x.stride(), dy.shape, dy.stride()) if plain else _lies_in(x, dy):
        return dy.as_strided(x.shape, x.stride(), dy.storage_offset())
    # ``torch.nn.grad.conv2d_input`` does this too.  It hides the memory format of x, and oneDNN would copy the result.
    if x.is_contiguous() and output_format(x, w) == torch.contiguous_format:
        return x.new_empty(1).expand(x.shape) if _backend.on_gpu(x) else None
    return None


def _lies_in(x: Tensor, dy: Tensor) -> bool:
    """Whether a tensor like x can lie in the memory of dy, which has no gaps in the format that a convolution takes."""
    # The elements of x may lie apart, such as those of some channels of a larger tensor.
    span = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return dy.numel() >= max(x.numel(), span) and dy.is_contiguous(memory_format=output_format(dy, dy))


# The answer for a pair of shapes is found once.  The limit is for shapes that change in every call.
@functools.lru_cache(1024)
def _fits(shape: torch.Size, strides: tuple[int, ...], dy_shape: torch.Size, dy_strides: tuple[int, ...]) -> bool:
    """``_lies_in`` for tensors of such shapes and strides."""
    # A mode that counts bytes must not see these tensors.
    with _torch.no_dispatch_modes():
        x = torch.empty_strided(shape, strides, device="meta")
        return _lies_in(x, torch.empty_strided(dy_shape, dy_strides, device="meta"))


def slabs(samples: int, nbytes: int) -> list[slice]:
    """Ranges that cover the samples of a tensor of ``nbytes``.

    It is a single one if the tensor is not large, or while the compiler traces.
    """
    if torch.compiler.is_compiling() or nbytes < 2 * SLAB_BYTES or samples < 2:
        return [slice(None)]
    step = -(-samples // min(samples, nbytes // SLAB_BYTES))
    return [slice(n, min(n + step, samples)) for n in range(0, samples, step)]


def is_apart(sources: Sequence[Source], geometry: Geometry) -> bool:
    """Whether each source is convolved by itself, because their concatenation would be large."""
    if geometry.groups > 1 or is_tensor(sources):
        return False
    if torch.compiler.is_compiling() and _backend.off_cpu(tensors_of(sources)[0]):
        # On a GPU one convolution of the concatenation is faster, and the compiler may form it again in backward.
        return False
    return shape_of(sources).numel() * tensors_of(sources)[0].element_size() > FORMED_BYTES


def commutes(source: Source, w: Tensor, geometry: Geometry) -> bool:
    """Whether a convolution with this weight may run before the interpolation of its source, and is faster there."""
    if not isinstance(source, Interpolated) or geometry.groups > 1 or w.shape[0] > source.shape[1]:
        return False
    pointwise = all(n == 1 for n in (*w.shape[2:], *geometry.stride)) and not any(geometry.padding)
    return pointwise and source.x.numel() < source.shape.numel()


class Term(NamedTuple):
    """Sources that are convolved at once, or a range of the channels of one source, with the weight for them.

    ``first`` is the place of the first of them among all sources.
    """

    first: int
    sources: tuple[Source, ...]
    w: Tensor


def _terms(sources: Sequence[Source], w: Tensor, whole: Sequence[bool]) -> list[Term]:
    """A term for each source; the terms of ``Interpolated`` sources come first.

    Interpolation needs memory for a moment, so it runs before the other terms allocate memory.  An ``Interpolated``
    with more channels than the result is split into ranges of as many channels as the result has, unless it stays
    ``whole``.
    """
    terms, start = [], 0
    for of, source in enumerate(sources):
        C, K = source.shape[1], w.shape[0]
        ranges: list[Source] = [source]
        if isinstance(source, Interpolated) and not whole[of]:
            ranges = [source.channels(c, min(c + K, C)) for c in range(0, C, K)]
        for part in ranges:
            terms.append(Term(of, (part,), w[:, start : start + part.shape[1]]))
            start += part.shape[1]
    return sorted(terms, key=lambda term: not isinstance(term.sources[0], Interpolated))


def convolve_sources(
    sources: Sequence[Source], w: Tensor, bias: Tensor | None, geometry: Geometry, conv_backend: Backend = "auto"
) -> Tensor:
    """The convolution of the concatenation of the sources."""
    if not is_apart(sources, geometry):
        return convolve(concatenated(sources), w, bias, geometry, conv_backend)
    first, *others = _terms(sources, w, whole=[False] * len(sources))

    def of_samples(n: slice) -> Tensor:
        y = convolve(concatenated(samples_of(first.sources, n)), first.w, bias, geometry, conv_backend)
        for term in others:
            y += convolve(concatenated(samples_of(term.sources, n)), term.w, None, geometry, conv_backend)
        return y

    shape = geometry.output_shape(shape_of(sources), w.shape)
    ranges = slabs(shape[0], shape.numel() * w.element_size())
    if len(ranges) == 1:
        return of_samples(ranges[0])
    y = torch.empty(shape, dtype=w.dtype, device=w.device, memory_format=output_format(tensors_of(sources)[0], w))
    for n in ranges:
        y[n] = of_samples(n)
    return y


def convolve_sources_backward(
    dy: Tensor,
    sources: Sequence[Source],
    w: Tensor,
    geometry: Geometry,
    wanted: Sequence[bool],
    conv_backend: Backend = "auto",
) -> tuple[Tensor | None, ...]:
    """The gradients of w, of the bias and of the tensors of the sources.

    ``wanted`` says in this order which gradients are needed; all other gradients are None.  If ``sources`` is a list,
    each source is taken off it when it is no longer needed, and is freed if nobody else has it.
    """
    need_w, need_bias, *needs = wanted
    shrinks = [commutes(source, w, geometry) for source in sources]
    todo = [Term(0, tuple(sources), w)]
    if is_apart(sources, geometry) or any(shrinks):
        todo = _terms(sources, w, whole=shrinks)
    if isinstance(sources, list):
        sources.clear()
    # The gradients of each source and of its part of the weight, in the order of its channels.
    dsources: list[list[Tensor | None]] = [[] for _ in needs]
    dws: list[list[Tensor | None]] = [[] for _ in needs]
    dbias = None
    todo.reverse()
    while todo:
        of, count = todo[-1].first, len(todo[-1].sources)
        # The first term computes the gradient of the bias.
        asked = (need_w, need_bias and dbias is None, *needs[of : of + count])
        if shrinks[of]:
            dw, db, *dxs = _at_small_size(dy, todo.pop(), geometry, asked)
        else:
            dw, db, *dxs = _at_full_size(dy, todo, geometry, asked, conv_backend)
        for gradients, dx in zip(dsources[of : of + count], dxs, strict=True):
            gradients.append(dx)
        dws[of].append(dw)
        dbias = db if dbias is None else dbias
        # The next term needs the memory.
        del dxs, dx
    return _cat([dw for each in dws for dw in each]), dbias, *(_cat(each) for each in dsources)


def _at_small_size(dy: Tensor, term: Term, geometry: Geometry, wanted: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """The gradients of the weight, of the bias and of the tensor of an ``Interpolated``, which is not enlarged."""
    (source,) = term.sources
    assert isinstance(source, Interpolated)
    need_w, need_bias, need_x = wanted
    shrunk = source.enlarge.backward(dy, (*dy.shape[:2], *source.x.shape[2:]))
    dx, dw, dbias = convolve_backward(shrunk, [source.x], term.w, geometry, (need_x, need_w, need_bias))
    return dw, dbias, dx


def _at_full_size(
    dy: Tensor, todo: list[Term], geometry: Geometry, wanted: Sequence[bool], conv_backend: Backend
) -> tuple[Tensor | None, ...]:
    """The gradients of the weight, of the bias and of the tensors of the sources of the last term.

    The term is taken off the list.  An ``Interpolated`` is enlarged again, slab by slab.
    """
    _, sources, w = todo.pop()
    ranges = slabs(dy.shape[0], dy.nbytes) if isinstance(sources[0], Interpolated) else []
    if len(sources) > 1 or len(ranges) < 2:
        given = list(sources)
        # The list must have the only references to the sources.
        del sources
        return _of_sources(dy, given, w, geometry, wanted, conv_backend)
    dw: Tensor | None = None
    dbias: Tensor | None = None
    dxs = []
    for n in ranges:
        dw_n, dbias_n, dx_n = _of_sources(dy[n], list(samples_of(sources, n)), w, geometry, wanted, conv_backend)
        dxs.append(dx_n)
        dw = _added(dw, dw_n)
        dbias = _added(dbias, dbias_n)
    return *(None if total is None else total.to(w.dtype) for total in (dw, dbias)), _cat(dxs, dim=0)


def _added(total: Tensor | None, t: Tensor | None) -> Tensor | None:
    """Adds the gradient of a slab to the sum of those before it, which is in fp32 or wider."""
    if t is None:
        return None
    return t.to(torch.promote_types(t.dtype, torch.float32)) if total is None else total.add_(t)


def _of_sources(
    dy: Tensor, sources: list[Source], w: Tensor, geometry: Geometry, wanted: Sequence[bool], conv_backend: Backend
) -> tuple[Tensor | None, ...]:
    """The gradients of the weight, of the bias and of the tensors of the sources, by one convolution of all sources.

    The sources are taken off the list.
    """
    need_w, need_bias, *needs = wanted
    channels = [source.shape[1] for source in sources]
    shapes, enlarges = [t.shape for t in tensors_of(sources)], enlarges_of(sources)
    inputs = [concatenated(sources)]
    sources.clear()
    dx, dw, dbias = convolve_backward(dy, inputs, w, geometry, (any(needs), need_w, need_bias), conv_backend)
    if dx is None:
        return dw, dbias, *(None for _ in needs)
    parts = (dx,) if len(channels) == 1 else dx.split(channels, dim=1)
    dsources = [
        None if not need else part if enlarge is None else enlarge.backward(part, shape)
        for part, shape, enlarge, need in zip(parts, shapes, enlarges, needs, strict=True)
    ]
    return dw, dbias, *dsources


def _cat(gradients: list[Tensor | None], dim: int = 1) -> Tensor | None:
    """Concatenates gradients of ranges of channels or samples.  Either all gradients are tensors, or all are None."""
    given = [gradient for gradient in gradients if gradient is not None]
    return torch.cat(given, dim) if len(given) > 1 else given[0] if given else None
