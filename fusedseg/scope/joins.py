"""Notes about concatenations inside the scope, for the convolutions that read them.

The scope notes the sources of each ``torch.cat`` along the channels, and the input of each ``interpolate``.  A
convolution of a converted model convolves such a tensor as it is, but keeps its sources (``ops/conv/sources.py``).  If
they are large, backward then forms neither the concatenation nor the enlarged tensor again, nor a gradient of that
size.

Only the scope of a converted model takes notes (``Registry.converted``), because a note keeps its sources alive.  The
registry holds the notes by tensor, and drops each note with its tensor.  A note becomes invalid when a source is
written to.  It is also invalid if a source is the caller's own memory, which eager mode would not keep.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import getcallargs
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import _torch
from ..ops.conv.sources import ALIGNABLE, MODES, Interpolated, Source, tensors_of
from .plain import plain
from .recipes import active


class Note(NamedTuple):
    """The sources of a tensor, and the versions of the tensor and of its sources at the time of the note."""

    sources: tuple[Source, ...]
    versions: tuple[int, ...]


def _versions(out: Tensor, sources: tuple[Source, ...]) -> tuple[int, ...]:
    return tuple(t._version for t in (out, *tensors_of(sources)))


def sources_of(x: Tensor) -> tuple[Source, ...] | None:
    """The sources of ``x``; None if they are unknown or have changed."""
    registry = active()
    if registry is None:
        return None
    # This is hidden from the scope, which would otherwise think that the caller accesses the memory.
    with _torch.DisableTorchFunction():
        note = registry.notes.get(x)
        if note is None or note.versions != _versions(x, note.sources):
            return None
        return note.sources if all(map(registry.certain, tensors_of(note.sources))) else None


@contextmanager
def saving_sources() -> Iterator[None]:
    """A context in which saved tensors are marked as sources, which eager mode would not have kept.

    Eager mode allows changes to such a tensor, so the scope copies it before it is written to.
    """
    registry = active()
    if registry is None:
        yield
        return
    before, registry.saves_sources = registry.saves_sources, True
    try:
        yield
    finally:
        registry.saves_sources = before


def note_sources(out: object, sources: tuple[Source, ...]) -> None:
    registry, tensors = active(), tensors_of(sources)
    if registry is None or not isinstance(out, Tensor) or out.dim() not in MODES or not plain(out):
        return
    if all(plain(t) and t.dtype == out.dtype for t in tensors):
        registry.notes[out] = Note(sources, _versions(out, sources))


def note_cat(out: Tensor, tensors: tuple, dim: int = 0, **others: Any) -> None:
    dim = others.pop("axis", dim)
    if others or not isinstance(dim, int) or not all(isinstance(t, Tensor) for t in tensors) or len(tensors) < 2:
        return
    # torch.cat still accepts empty tensors of one dimension, and leaves them out.
    if any(t.dim() != out.dim() for t in tensors) or dim % out.dim() != 1:
        return
    sources = []
    for t in tensors:
        inner = sources_of(t)
        enlarged = inner is not None and len(inner) == 1
        sources.append(inner[0] if inner is not None and enlarged else t)
    note_sources(out, tuple(sources))


def note_interpolated(out: Tensor, *args: Any, **kwargs: Any) -> None:
    given = getcallargs(F.interpolate, *args, **kwargs)
    x, factors, mode = given["input"], given["scale_factor"], given["mode"]
    if given["antialias"] or not isinstance(x, Tensor) or mode not in MODES.get(x.dim(), ()):
        return
    if not out.is_cpu and torch.are_deterministic_algorithms_enabled():
        # PyTorch then calls another function, because the backward of the usual one adds in any order.
        return
    sizes = tuple(out.shape[2:])
    if factors is not None and not given["recompute_scale_factor"]:
        # Positions are computed from the factor.  They equal the positions for ``size`` only if the factor gives the
        # size exactly.
        factors = factors if isinstance(factors, (tuple, list)) else (factors,) * len(sizes)
        if any(n * f != m for n, f, m in zip(x.shape[2:], factors, sizes, strict=True)):
            return
    note_sources(out, (Interpolated(x, sizes, mode, given["align_corners"] if mode in ALIGNABLE else None),))


def noted(rule: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
    """A rule of ``stock.py`` that also takes a note about its result."""

    def noting(registry: Any, func: object, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        out = rule(registry, func, args, kwargs)
        if registry.converted:
            with _torch.DisableTorchFunction():
                note(out, *args, **kwargs)
        return out

    return noting
