"""Compiles every launch for a GPU, with its true arguments, and runs nothing.  The GPU need not be present.

    with dry_run("sm_90") as launches:
        norm_act_fwd(cpu_tensor, ...)        # outputs stay as ``torch.empty`` left them
    for launch in launches:
        print(launch.name, launch.grid, launch.compiled.asm["ptx"])

The launchers make the same decisions as for a real tensor of the same shape and dtype.  Only the number of
multiprocessors is assumed (``MULTIPROCESSORS``).  Large tensors cost nothing, because the system does not commit
memory that is never written.
"""

import contextlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from . import launch
from .launcher import FP_FUSION, forget_plans
from .triton_names import GPUTarget, JITFunction, driver, interpreted

# Multiprocessors of the largest GPU of an architecture that we know of: A100, H100 and H200, B200, MI300X.  For others
# ``launch.DEFAULT_SMS`` is assumed.
MULTIPROCESSORS = {80: 108, 90: 132, 100: 148, "gfx942": 304}


class Launch(NamedTuple):
    """A launch of a kernel: its name, the compiled kernel, its grid, and its arguments by name."""

    name: str
    compiled: Any
    grid: tuple
    arguments: dict[str, Any]


def parse_target(name: str) -> GPUTarget:
    """Triton's target for a name such as ``sm_90`` or ``gfx942``."""
    if found := re.fullmatch(r"sm_(\d+)", name):
        return GPUTarget("cuda", int(found[1]), 32)
    if re.fullmatch(r"gfx9\w+", name):
        return GPUTarget("hip", name, 64)
    raise ValueError(f"fusedseg.kernels.dry_run: target must be sm_<number> or gfx9<id>, got {name!r}")


class AbsentDevice:
    """Stands for Triton's driver where there is no GPU."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> str:
        # Compiled kernels are cached by device, so this name must differ from the names of real devices.
        return f"dry run of {self.target.arch}"

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextlib.contextmanager
def dry_run(target: str) -> Iterator[list[Launch]]:
    """A context in which every launch is compiled for ``target`` and listed, and does not run.

    Raises:
        RuntimeError: the kernels were imported for the interpreter (TRITON_INTERPRET=1), which compiles nothing.
    """
    if interpreted():
        raise RuntimeError("fusedseg.kernels.dry_run: TRITON_INTERPRET=1 makes Triton interpret kernels; unset it")
    launches: list[Launch] = []
    # The attribute that holds the active driver has had two names.
    run, before = JITFunction.run, dict(vars(driver))

    def compile_only(self, *args, grid, warmup, **kwargs):
        # A kernel that is launched without a Launcher does not set this option.
        kwargs.setdefault("enable_fp_fusion", FP_FUSION)
        compiled = run(self, *args, grid=grid, warmup=True, **kwargs)
        launches.append(Launch(self.__name__, compiled, grid, dict(zip(self.arg_names, args, strict=False)) | kwargs))
        return compiled

    gpu = parse_target(target)
    driver.set_active(AbsentDevice(gpu))
    JITFunction.run = compile_only
    assumed = launch.DEFAULT_SMS
    launch.DEFAULT_SMS = MULTIPROCESSORS.get(gpu.arch, assumed)
    # Plans for one GPU may not fit another.
    forget_plans()
    try:
        yield launches
    finally:
        JITFunction.run = run
        launch.DEFAULT_SMS = assumed
        vars(driver).update(before)
        forget_plans()
