"""Selects the device of the tensors for a launch."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

HERE = nullcontext()


def device_of(x: Tensor) -> AbstractContextManager:
    """``torch.cuda.device_of(x)``, or an empty context if the device of ``x`` is the current one.

    ``torch.cuda.device_of`` takes microseconds even then.
    """
    return torch.cuda.device_of(x) if x.is_cuda and x.get_device() != torch.cuda.current_device() else HERE
