"""Chooses an implementation and the device of a launch.  ``auto`` takes Triton for tensors on a GPU, otherwise aten."""

import functools
import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext

import torch
from torch._subclasses.fake_tensor import FakeTensor

NAMES = ("auto", "triton", "aten")
HERE = nullcontext()


def _checked(name: str, source: str) -> str:
    if name not in NAMES:
        raise ValueError(f"{source} must be one of {', '.join(NAMES)}, got {name!r}")
    return name


_name = _checked(os.environ.get("FUSEDSEG_BACKEND", "auto"), "environment variable FUSEDSEG_BACKEND")


def get() -> str:
    return _name


def set(name: str) -> None:
    global _name
    _name = _checked(name, "fusedseg.backend")


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


def explain(device: torch.device) -> tuple[str, str]:
    """The backend that serves tensors on a device, "triton" or "aten", and the reason for it."""
    device = torch.device(device)
    if _name == "aten":
        return "aten", "fusedseg.backend is 'aten'"
    if not _has_triton():
        return "aten", "triton is not installed"
    if device.type == "cuda":
        return "triton", "a GPU, and triton is installed"
    if _name == "triton" and device.type == "cpu" and _interpreted():
        return "triton", "fusedseg.backend is 'triton' and TRITON_INTERPRET=1 runs kernels on CPU tensors"
    if _name == "triton":
        return (
            "aten",
            f"Triton kernels run on GPU tensors, or on CPU tensors under TRITON_INTERPRET=1, not on {device.type}",
        )
    return "aten", f"'auto' takes Triton on GPUs only, and this is {device.type}"


def use_triton(x: torch.Tensor) -> bool:
    """Whether Triton kernels serve ``x``.

    Raises:
        RuntimeError: the backend is set to "triton", and Triton cannot serve the device of ``x``.
    """
    if _name == "aten" or isinstance(x, FakeTensor):
        return False
    if _name == "auto":
        return x.is_cuda and _has_triton()
    backend, reason = explain(x.device)
    if backend == "aten":
        raise RuntimeError(f"fusedseg.backend is 'triton', but a tensor on {x.device} cannot be served: {reason}")
    return True


def device_of(x: torch.Tensor) -> AbstractContextManager:
    """``torch.cuda.device_of(x)``, or an empty context if the device of ``x`` is the current one.

    ``torch.cuda.device_of`` takes microseconds even then.
    """
    return torch.cuda.device_of(x) if x.is_cuda and x.get_device() != torch.cuda.current_device() else HERE
