"""Casts of many tensors, and many vectors of zeros, in one call each, for the code of compiled graphs.

PyTorch's kernels for many tensors serve dozens of them in one launch.  The memory of the results is allocated without
the dispatcher.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import _backend, _torch
from .check import HALF
from .registry import Result, family
from .replay import Allocation
from .self_test.cases import image

Forms = tuple[Allocation, ...]


def allocated(forms: Forms, device: torch.device) -> list[Tensor] | None:
    """Memory for tensors in one call; None if each tensor must be a call of its own.

    It must if a mode must see calls, if another GPU is the current one, or if the self-test has failed.  The zeros do
    not share memory: PyTorch's trees of CUDA graphs make tensors that do anew in each replay.
    """
    here = device.type != "cuda" or device.index == torch.cuda.current_device()
    if not here or (_torch.len_torch_dispatch_stack() and _torch.is_seen()):
        return None
    # A lookup takes less time than a call.
    if not (_backend.proven.get(("casts", device)) or _backend.proves("casts", device)):
        return None
    # ``_empty`` without a further call.
    return list(itertools.starmap(_torch.EMPTY_STRIDED[device.type], forms))


def _empty(forms: Forms, device: torch.device) -> list[Tensor]:
    return list(itertools.starmap(_torch.EMPTY_STRIDED[device.type], forms))


@dataclass(frozen=True)
class Casts:
    """``casts(*tensors)``: the tensors in the dtypes of ``forms``."""

    forms: Forms
    device: torch.device
    # Generated code takes its names from the names of functions.
    __name__ = "casts"

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        made = None if isinstance(tensors[0], _torch.FakeTensor) else allocated(self.forms, self.device)
        if made is None:
            return [t.to(form.dtype) for t, form in zip(tensors, self.forms, strict=True)]
        _torch.foreach_copy(made, tensors)
        return made


@dataclass(frozen=True)
class Zeros:
    """``zeros()``: vectors of zeros of these ``forms``."""

    forms: Forms
    device: torch.device
    __name__ = "zeros"

    def __call__(self) -> list[Tensor]:
        made = allocated(self.forms, self.device)
        if made is None:
            return [torch.zeros(size, dtype=dtype, device=self.device) for size, _, dtype in self.forms]
        _torch.foreach_zero(made)
        return made


@family("casts", dtypes=(torch.float32,), instead="Every cast is a call of its own", compiles=False)
def _self_test(dtype: torch.dtype, device: torch.device) -> Iterator[Result]:
    """Casts of many tensors in one call have the bits of casts one by one, and many vectors of zeros are zeros."""

    def joined(tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([t.flatten() for t in tensors])

    shapes: list[tuple[int, ...]] = [(n % 7 + 1, 3, 3, 3) for n in range(250)]
    # One is longer than the part that a program of PyTorch's kernel computes.
    shapes += [(65537,), (320, 320), ()]
    for half in HALF:
        given = [image(shape, dtype, device, "contiguous", seed) for seed, shape in enumerate(shapes)]
        for of in (half, dtype):
            forms = tuple(Allocation(tuple(t.shape), t.stride(), of) for t in given)
            found, wanted = _empty(forms, device), [t.to(of) for t in given]
            _torch.foreach_copy(found, given)
            yield Result(f"casts from {given[0].dtype} to {of}", joined(found), joined(wanted).double(), 0.0)
            given = found
    zeros = _empty(tuple(Allocation((n,), (1,), dtype) for n in range(1, 300)), device)
    _torch.foreach_zero(zeros)
    # An error is relative to what is right, which must not be 0.
    yield Result("zeros plus 1", joined(zeros) + 1, torch.ones(299 * 150, dtype=torch.float64), 0.0)
