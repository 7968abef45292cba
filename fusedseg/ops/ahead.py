"""Compiles the kernels that a function launches, in threads, before it launches them.

The function runs once on fake tensors, for which ops choose as for tensors of their device, and launches are listed.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _torch


def compile_kernels(function: Callable[[list[Any]], Any], arguments: Sequence[Any], device: torch.device) -> int:
    """Compiles the kernels of ``function(list of arguments)``, and returns the number of its launches.

    A kernel that this misses is compiled at its launch, and so is one that it cannot compile.
    """
    from ..kernels.ahead import compile_ahead, threads
    from ..kernels.launcher import noting

    if threads() == 1 or any(isinstance(t, _torch.FakeTensor) for t in arguments):
        return 0
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return 0
    mode = _torch.ListingMode(allow_non_fake_inputs=True)
    # PyTorch calls a compiled graph for the first time in a mode that looks at its ops.
    seen_by_nobody = _torch.no_dispatch_modes()
    # An op may have no form for tensors without values.  What is listed until then is compiled.
    errors = contextlib.suppress(Exception)
    with noting(only_lists=True) as notes, errors, seen_by_nobody, torch.no_grad(), mode:
        function([mode.from_tensor(t) if isinstance(t, Tensor) else t for t in arguments])
    # Triton refuses if its caller compiles in threads already.
    with contextlib.suppress(Exception):
        compile_ahead(notes.wanted)
    return len(notes.wanted)
