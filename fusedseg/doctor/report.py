"""``fusedseg doctor`` prints versions, the backend of each device with its reason, and whether the kernels work here.

Compiling the kernels takes long, so only ``--compile`` and ``--gpu`` do it.  With ``--compile`` and a GPU, every kernel
is also launched and compared with PyTorch in float64.  Without a GPU, every kernel is compiled for the architectures in
``TARGETS``.  ``gpu.py`` does ``--gpu``.
"""

import importlib
import platform
import re
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from .. import _backend, _torch
from ..ops.self_test import first_use
from ..ops.self_test.checks import CHECKS, DTYPES, compare
from ..progress import Progress

TARGETS = ("sm_80", "sm_90")
# The oldest and the newest version that the tests have passed with (``tests/versions.sh``).  ``pyproject.toml`` demands
# the oldest ones, and no version is refused for being newer.
TESTED = {"python": ("3.10", "3.13"), "torch": ("2.6", "2.15"), "triton": ("3.2", "3.9")}


def versions() -> Iterator[str]:
    from .. import __version__

    yield f"fusedseg   {__version__}"
    yield f"python     {platform.python_version()} on {platform.system()} {platform.machine()}"
    yield f"torch      {torch.__version__}"
    for name in ("triton", "numpy"):
        yield f"{name:<10} {_version(name)}"
    yield f"CUDA       {torch.version.cuda or 'not in this build of torch'}"
    yield f"ROCm       {torch.version.hip or 'not in this build of torch'}"


def _version(name: str) -> str:
    """A version, found by importing the module: Triton is installed under several names."""
    try:
        return getattr(importlib.import_module(name), "__version__", "not installed (a folder of this name is empty)")
    except ImportError as error:
        return f"not installed ({error})"


def _minor(version: str) -> tuple[int, ...]:
    """(2, 13) of "2.13.0+cpu"; () of a text that is no version."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else ()


def untested_versions() -> Iterator[tuple[str, str, str]]:
    """(name, installed version, "older" or "newer") of each version that the tests have not run with."""
    installed = {"python": platform.python_version(), "torch": torch.__version__, "triton": _version("triton")}
    for name, (oldest, newest) in TESTED.items():
        minor = _minor(installed[name])
        if minor and not _minor(oldest) <= minor <= _minor(newest):
            yield name, installed[name], "older" if minor < _minor(oldest) else "newer"


def untested() -> Iterator[str]:
    """A line for each installed version that the tests have not run with, and for what this PyTorch lacks."""
    for name, version, side in untested_versions():
        yield (
            f"WARNING: {name} {version} is {side} than the versions that fusedseg is tested with, "
            f"{' to '.join(TESTED[name])}"
        )
    if _torch.scope_problem():
        yield f"WARNING: fusedseg.recompute() does nothing here: {_torch.scope_problem()}"
    if _torch.MISSING:
        missing = ", ".join(_torch.MISSING)
        yield f"WARNING: PyTorch {torch.__version__} does not have {missing}: some features raise errors"


def devices() -> list[torch.device]:
    return [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]


def describe(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    properties = torch.cuda.get_device_properties(device)
    return f"{device} ({properties.name}, {_backend.architecture(device)})"


def run_kernels(name: str, device: torch.device) -> str:
    """Launches the kernels of a family in fp32; raises an error if they cannot run or disagree with float64."""
    with torch.no_grad(), torch.cuda.device_of(torch.empty(0, device=device)):
        worst = compare(name, torch.float32, device)
    return f"ran, and agrees with float64 to {worst:.0e}"


def compile_kernels(name: str, target: str) -> str:
    from ..kernels.dry_run import dry_run

    with dry_run(target) as launches:
        for _ in CHECKS[name](torch.float32, torch.device("cpu")):
            pass
    count = len({launch.name for launch in launches})
    return f"{count} kernel{'s' if count > 1 else ''} compiled, not run"


def kernels() -> Iterator[tuple[str, Callable[[], str]]]:
    """Yields (device or target and check, a function that returns its finding or raises) for each check to run."""
    gpus = devices()[1:]
    for gpu in gpus:
        for name in CHECKS:
            yield f"{gpu} {name}", partial(run_kernels, name, gpu)
    if not gpus:
        for target in TARGETS:
            for name in CHECKS:
                yield f"{target} {name}", partial(compile_kernels, name, target)


def untried(compiles: bool) -> str | None:
    """The reason why the kernels are not tried, or None.  ``compiles`` says whether the user asked for it."""
    if not _backend._has_triton():
        return "triton is not installed, so PyTorch computes every op"
    if _backend._interpreted():
        return "TRITON_INTERPRET is set, with which Triton interprets kernels and compiles none; unset it"
    if not compiles:
        return "compiling them takes minutes the first time; `fusedseg doctor --compile` does it"
    return None


def failures(device: torch.device) -> Iterator[str]:
    """A line for each family of kernels that an earlier self-test has found to fail on a device."""
    if not _backend.is_tested(device):
        return
    for family, dtypes in DTYPES.items():
        for dtype in dtypes:
            found = first_use.remembered(family, dtype, device)
            if found is not None and found.kind:
                yield f"aten for {family} in {first_use.short(dtype)}: the self-test failed, {found.kind}: {found.text}"


def verdict(problems: int, reason: str | None) -> str:
    """One sentence that says whether all is well.  ``reason`` says why the kernels were not tried, or is None."""
    if problems:
        return f"Something is wrong: see {'the lines' if problems > 1 else 'the line'} with PROBLEM above."
    if reason is not None:
        return f"Nothing is wrong, but the kernels were not tried: {reason}."
    if len(devices()) > 1:
        return "All is well: every kernel ran on every GPU and agrees with PyTorch in float64."
    return (
        f"All is well: there is no GPU here, so PyTorch computes every op, and the kernels compile for "
        f"{' and '.join(TARGETS)}."
    )


def doctor(compiles: bool = False) -> int:
    """Prints the report.  Returns 1 if something does not work that fusedseg would use here, otherwise 0.

    ``compiles`` says whether to compile the kernels, and on a GPU to run them.
    """
    problems = 0
    for line in (*versions(), *untested()):
        print(line)
    print(f"\nbackend    fusedseg.backend is {_backend.get()!r}")
    served = set()
    for device in devices():
        backend, why = _backend.explain(device)
        served.add(backend)
        print(f"  {describe(device)}: {backend} ({why})")
        for line in failures(device) if backend == "triton" else ():
            print(f"    {line}")
    if _backend.get() == "triton" and "triton" not in served:
        problems += 1
        print("  PROBLEM: Triton was asked for, and no device here can be served by it")
    print("\nkernels")
    reason = untried(compiles)
    if reason is not None:
        print(f"  not tried: {reason}")
    for where, attempt in () if reason is not None else kernels():
        start = time.perf_counter()
        try:
            with Progress(f"  {where}"):
                seen = attempt()
        # The report shows every error of a compiler or a driver, whatever its class.
        except Exception as error:
            problems += 1
            message = next(iter(str(error).strip().splitlines()), "")
            seen = f"PROBLEM: {type(error).__name__}: {message}"
        print(f"  {where}: {seen} ({time.perf_counter() - start:.1f} s)")
    print(f"\n{verdict(problems, reason)}")
    return min(problems, 1)
