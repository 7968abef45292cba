"""Casts of many tensors, and many vectors of zeros, in one call each, for the code of compiled graphs.

PyTorch's kernels for many tensors serve dozens of them in one launch.  Their results are allocated without a call
through the dispatcher.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import _backend, _torch
from .replay import Allocation

Forms = tuple[Allocation, ...]


def cast(tensors: Sequence[Tensor], forms: Forms, device: torch.device) -> list[Tensor]:
    """The tensors in the dtypes of ``forms``, which have their sizes and strides."""
    made = list(itertools.starmap(_torch.EMPTY_STRIDED[device.type], forms))
    _torch.foreach_copy(made, tensors)
    return made


def zeros(forms: Forms, device: torch.device) -> list[Tensor]:
    """Zeros that do not share memory: PyTorch's trees of CUDA graphs make tensors that do anew in each replay."""
    made = list(itertools.starmap(_torch.EMPTY_STRIDED[device.type], forms))
    _torch.foreach_zero(made)
    return made


def serves(device: torch.device) -> bool:
    """Whether ``cast`` and ``zeros`` may run: no mode must see them, the GPU is the current one, and they are right."""
    here = device.type != "cuda" or device.index == torch.cuda.current_device()
    if not here or (_torch.len_torch_dispatch_stack() and _torch.is_seen()):
        return False
    # A lookup takes less time than a call.
    return _backend.proven.get(("casts", device)) or _backend.proves("casts", device)


@dataclass(frozen=True)
class Casts:
    """``casts(*tensors)``: the tensors in the dtypes of ``forms``."""

    forms: Forms
    device: torch.device
    # Generated code takes its names from the names of functions.
    __name__ = "casts"

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        if isinstance(tensors[0], _torch.FakeTensor) or not serves(self.device):
            return [t.to(form.dtype) for t, form in zip(tensors, self.forms, strict=True)]
        return cast(tensors, self.forms, self.device)


@dataclass(frozen=True)
class Zeros:
    """``zeros()``: vectors of zeros of these ``forms``."""

    forms: Forms
    device: torch.device
    __name__ = "zeros"

    def __call__(self) -> list[Tensor]:
        if not serves(self.device):
            return [torch.zeros(size, dtype=dtype, device=self.device) for size, _, dtype in self.forms]
        return zeros(self.forms, self.device)
