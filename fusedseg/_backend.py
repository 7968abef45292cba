"""Chooses an implementation and the device of a launch.

``auto`` takes Triton for tensors on a GPU if the kernels are tested for its architecture, and if their self-test passes
there (``ops/self_test``); otherwise it takes aten.
"""

import functools
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Literal, get_args

import torch

from ._torch import DisableTorchFunction, FakeTensor, FakeTensorMode, is_listed

Backend = Literal["auto", "triton", "aten"]
NAMES: tuple[Backend, ...] = get_args(Backend)
# The generations of NVIDIA's GPUs, by the first number of the compute capability, and the architectures of AMD's GPUs
# that the kernels are compiled for in tests.  AMD's have wavefronts of 64 threads.
NVIDIA, AMD = (8, 9, 10, 12), ("gfx90a", "gfx942", "gfx950")

# The first use of a family of kernels on a device: called with the family, a dtype and a device, it returns "" if the
# kernels are right there, the reason if they are not, and None if that cannot be found out now.
FirstUse = Callable[[str, torch.dtype, torch.device], str | None]
_first_use: FirstUse | None = None
# (family, dtype, device) -> the reason why Triton does not serve such tensors, or "" if it does.
_reasons: dict[tuple[str | None, torch.dtype, torch.device], str] = {}
# What ``proves`` has found out.  Callers in hot code look here first.
proven: dict[tuple[str, torch.device], bool] = {}
_at_forget: list[Callable[[], None]] = []


def _checked(name: str, source: str) -> Backend:
    if name not in NAMES:
        raise ValueError(f"{source} must be one of {', '.join(NAMES)}, got {name!r}")
    return name


_name = _checked(os.environ.get("FUSEDSEG_BACKEND", "auto"), "environment variable FUSEDSEG_BACKEND")


def get() -> Backend:
    return _name


def set(name: str) -> None:
    global _name
    _name = _checked(name, "fusedseg.backend")
    forget()


def forget() -> None:
    """Forgets all choices, so that the next call of every kind chooses again."""
    _reasons.clear()
    proven.clear()
    for function in _at_forget:
        function()


def at_forget(function: Callable[[], None]) -> None:
    """Registers a function that forgets what was made from these choices."""
    _at_forget.append(function)


def at_first_use(function: FirstUse) -> None:
    """Registers the function that tests kernels at their first use.  The ops do so, because they know the kernels."""
    global _first_use
    _first_use = function


@functools.cache
def _has_triton() -> bool:
    """Whether Triton can be imported, whatever distribution has installed it; an empty folder of its name is none."""
    spec = importlib.util.find_spec("triton")
    return spec is not None and spec.origin is not None


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


def self_test_wanted() -> bool:
    """Whether kernels are tested at their first use: unless FUSEDSEG_SELF_TEST is 0."""
    value = os.environ.get("FUSEDSEG_SELF_TEST", "1")
    if value not in ("0", "1"):
        raise ValueError(f"environment variable FUSEDSEG_SELF_TEST must be 0 or 1, got {value!r}")
    return value == "1"


def architecture(device: torch.device) -> str:
    """The architecture of a GPU, such as "sm_90" or "gfx942"."""
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return properties.gcnArchName.split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def unsupported(arch: str) -> str:
    """The reason why the kernels do not run on an architecture unless they are asked for, or "" if they do."""
    if arch.startswith("gfx"):
        if arch in AMD:
            return ""
        # RDNA, whose names begin so, has wavefronts of 32 threads.
        wave32 = arch.startswith(("gfx10", "gfx11", "gfx12"))
        what = "has wavefronts of 32 threads, and the kernels" if wave32 else "is unknown to the kernels, which"
        return f"{arch} {what} are tested for {', '.join(AMD)}"
    generation = int(arch.removeprefix("sm_")[:-1])
    if generation < min(NVIDIA):
        return f"{arch} is older than sm_{min(NVIDIA)}0, the oldest that Triton and the kernels support"
    if generation not in NVIDIA:
        return f"{arch} is unknown to the kernels, which are tested for sm_{'x, sm_'.join(map(str, NVIDIA))}x"
    return ""


def has_tf32(device: torch.device) -> bool:
    """Whether Triton's products can use TF32 on a device.  Of AMD's GPUs, Triton compiles it for gfx942 alone."""
    return torch.version.hip is None or device.type != "cuda" or architecture(device) == "gfx942"


def explain(device: torch.device) -> tuple[str, str]:
    """The backend that serves tensors on a device, "triton" or "aten", and the reason for it.

    The self-test may still leave a family of kernels to aten; ``why_not`` has its reason.
    """
    device = torch.device(device)
    if _name == "aten":
        return "aten", "fusedseg.backend is 'aten'"
    if not _has_triton():
        return "aten", "triton is not installed"
    if device.type == "cuda":
        arch = architecture(device)
        reason = unsupported(arch)
        if reason and _name != "triton":
            return "aten", f"{reason}; FUSEDSEG_BACKEND=triton takes Triton nevertheless"
        return "triton", f"a GPU ({arch}), and triton is installed"
    if _name == "triton" and device.type == "cpu" and _interpreted():
        return "triton", "fusedseg.backend is 'triton' and TRITON_INTERPRET=1 runs kernels on CPU tensors"
    if _name == "triton":
        return (
            "aten",
            f"Triton kernels run on GPU tensors, or on CPU tensors under TRITON_INTERPRET=1, not on {device.type}",
        )
    return "aten", f"'auto' takes Triton on GPUs only, and this is {device.type}"


def takes_triton(device: torch.device) -> bool:
    """Whether Triton serves tensors on a device, as far as this is known before a kernel has run there."""
    return explain(device)[0] == "triton"


def use_triton(x: torch.Tensor, family: str | None = None) -> bool:
    """Whether Triton kernels of a family (``ops/registry.py``) serve ``x``.

    The first call for a family, dtype and device tests the kernels there.  Without a family, only the device counts,
    and nothing is tested.

    Raises:
        RuntimeError: the backend is set to "triton", and Triton cannot serve ``x``.
    """
    return not why_not(x, family)


def lists_launches(x: torch.Tensor, family: str) -> bool:
    """Whether ``x`` is a fake tensor on which Triton kernels of a family are listed (``_torch.ListingMode``)."""
    return is_listed(x) and use_triton(x, family)


class EstimateMode(FakeTensorMode):
    """A fake mode whose tensors stand for those of a GPU, whatever their device is.

    Tensors of every other fake mode stand for tensors of their own device.
    """


def on_gpu(t: torch.Tensor) -> bool:
    """Whether a tensor is on a GPU, or stands for one that is."""
    return t.is_cuda or (isinstance(t, FakeTensor) and isinstance(t.fake_mode, EstimateMode))


def off_cpu(t: torch.Tensor) -> bool:
    """Whether aten runs the kernels of another device than a CPU on ``t``.

    The tests replace this function to run that code on a CPU, by the rules of ``tests/tools/cuda_rules.py``.
    """
    return t.device.type != "cpu"


def why_not(x: torch.Tensor, family: str | None) -> str:
    """The reason why Triton kernels of a family do not serve ``x``, or "" if they do.  It raises as ``use_triton``."""
    # ``type`` answers for nearly all tensors, and is faster than ``isinstance`` with the class of fake tensors.
    if type(x) is not torch.Tensor and isinstance(x, FakeTensor) and not is_listed(x):
        return "a fake tensor has no values"
    reason = _reasons.get((family, x.dtype, x.device))
    return _find_out(x, family) if reason is None else reason


def _find_out(x: torch.Tensor, family: str | None) -> str:
    """The result of ``why_not``, which is remembered unless the next call may have another."""
    device = x.device
    backend, reason = explain(device)
    if backend == "triton":
        if not is_tested(device):
            # The interpreter may be switched off again.
            return "" if device.type == "cpu" else _reasons.setdefault((family, x.dtype, device), "")
        found = "" if family is None or _first_use is None else _first_use(family, x.dtype, device)
        if found is None:
            # While a graph is captured or traced nothing is tested, and aten is right anyway.
            return "" if _name == "triton" else "its kernels have not been tested yet, and cannot be tested now"
        reason = found
    if reason and _name == "triton":
        raise RuntimeError(f"fusedseg.backend is 'triton', but a tensor on {device} cannot be served: {reason}")
    return _reasons.setdefault((family, x.dtype, device), reason)


def refuse(family: str, dtype: torch.dtype, device: torch.device, reason: str) -> None:
    """Leaves a family of kernels to aten in this process, because a result was wrong.

    Raises:
        RuntimeError: the backend is set to "triton".
    """
    # What was made of launches of the family must go as well.
    for function in _at_forget:
        function()
    if _name == "triton":
        raise RuntimeError(f"fusedseg.backend is 'triton', but a tensor on {device} cannot be served: {reason}")
    _reasons[family, dtype, device] = reason


def is_tested(device: torch.device) -> bool:
    """Whether the kernels of a device are tested at their first use."""
    return device.type == "cuda" and self_test_wanted()


def proves(way: str, device: torch.device) -> bool:
    """Whether a way of launching or allocating, "replays" or "casts", has passed its self-test on a device.

    Devices that are not tested need no proof.  Where nothing can be tested now, there is no proof yet.
    """
    if (way, device) not in proven:
        reason = _first_use(way, torch.float32, device) if _first_use is not None and is_tested(device) else ""
        if reason is None:
            return False
        proven[way, device] = not reason
    return proven[way, device]


def launching(x: torch.Tensor) -> AbstractContextManager:
    """The context of a launch on ``x``: its device is the current one, and no function mode sees the calls.

    ``torch.cuda.device_of`` asks the driver even if the device is the current one already.
    """
    elsewhere = x.is_cuda and x.get_device() != torch.cuda.current_device()
    return _elsewhere(x) if elsewhere else DisableTorchFunction()


@contextmanager
def may_wait(device: torch.device) -> Iterator[None]:
    """A context in which the host may wait for a device, which the user may have forbidden."""
    forbids = torch.cuda.get_sync_debug_mode() if device.type == "cuda" else 0
    if forbids:
        torch.cuda.set_sync_debug_mode(0)
    try:
        yield
    finally:
        if forbids:
            torch.cuda.set_sync_debug_mode(forbids)


@contextmanager
def _elsewhere(x: torch.Tensor) -> Iterator[None]:
    with torch.cuda.device_of(x), DisableTorchFunction():
        yield
