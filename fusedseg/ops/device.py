"""The device that kernels are launched on: that of their tensors."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

HERE = nullcontext()


def device_of(x: Tensor) -> AbstractContextManager:
    """``torch.cuda.device_of(x)``, which takes microseconds also where that device is the current one already."""
    return torch.cuda.device_of(x) if x.is_cuda and x.get_device() != torch.cuda.current_device() else HERE
