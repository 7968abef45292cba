"""``fusedseg doctor`` prints versions and the backend of each device with its reason.

With ``--gpu``, every kernel runs on each kind of GPU, and is compared with PyTorch in float64 (``gpu.py``).
"""

import contextlib
import importlib
import os
import platform
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from .. import _backend, _torch
from ..cli.command import Refused, check_new
from ..memory.tables import write_json
from ..progress import Progress
from .gpu import Outcome, kinds_of_gpu, outcomes

# The oldest and the newest version that the tests have passed with (``tests/versions.sh``).  ``pyproject.toml`` demands
# the oldest ones, and no version is refused for being newer.
TESTED = {"python": ("3.10", "3.13"), "torch": ("2.8", "2.15"), "triton": ("3.4", "3.9")}

DRIVERS = ("/sys/module/nvidia/version", "/sys/module/amdgpu/version")


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


def verdict(problems: int, tested: Sequence[Outcome], unused: Sequence[str]) -> str:
    """One sentence that says whether all is well.  ``unused`` has the reasons why tested kernels are not used."""
    late = sum(outcome.late for outcome in tested)
    untried = f" For {late} of them no time was left." if late else ""
    if problems:
        return f"Something is wrong: see {'the lines' if problems > 1 else 'the line'} with PROBLEM above.{untried}"
    if not tested:
        hint = "; `fusedseg doctor --gpu` tests the kernels" if len(devices()) > 1 else ""
        return f"Nothing is wrong{hint}."
    if unused:
        return f"Every kernel that was tried is right here, but fusedseg does not use them: {unused[0]}.{untried}"
    return f"All is well: every kernel that was tried agrees with PyTorch in float64.{untried}"


def described(gpu: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(gpu)
    return {
        "device": str(gpu), "gpu": properties.name, "architecture": _backend.architecture(gpu), "driver": _driver(),
        "memory": properties.total_memory, "multiprocessors": properties.multi_processor_count,
    }  # fmt: skip


def _driver() -> str:
    for path in DRIVERS:
        with contextlib.suppress(OSError):
            return Path(path).read_text().strip()
    return "unknown"


def _check_left_out() -> None:
    """Raises Refused if FUSEDSEG_WITHOUT has a wrong name, before anything is tested."""
    if os.environ.get("FUSEDSEG_WITHOUT"):
        # The compiler takes seconds to import.
        from ..compiler.settings import left_out

        try:
            left_out()
        except ValueError as error:
            raise Refused(str(error)) from None


def doctor(gpu: bool = False, path: str | None = None, overwrite: bool = False) -> int:
    """Prints the report, and writes it to ``path`` in JSON, for an issue.

    Returns 1 if something does not work that fusedseg would use here, otherwise 0.

    Raises:
        Refused: the file cannot be written, there is nothing to test, or FUSEDSEG_WITHOUT has a wrong name.
    """
    check_new(path, overwrite)
    _check_left_out()
    if gpu and not torch.cuda.is_available():
        raise Refused("--gpu: torch sees no GPU here")
    if gpu and not _backend._has_triton():
        raise Refused("--gpu: triton is not installed, so there are no kernels to test")
    installed = [*versions(), *untested()]
    print("\n".join(installed))
    print(f"\nbackend    fusedseg.backend is {_backend.get()!r}")
    used = {device: _backend.explain(device) for device in devices()}
    for device, (backend, why) in used.items():
        print(f"  {describe(device)}: {backend} ({why})")
    problems = 0
    if _backend.get() == "triton" and not any(backend == "triton" for backend, _ in used.values()):
        problems += 1
        print("  PROBLEM: Triton was asked for, and no device here can be served by it")
    kinds, tested = kinds_of_gpu() if gpu else [], list[Outcome]()
    if gpu:
        print("\nkernels")
        with Progress("fusedseg doctor --gpu"):
            for outcome in outcomes(kinds):
                tested.append(outcome)
                problems += outcome.failed
                print(f"  {outcome}", flush=True)
    said = verdict(problems, tested, [used[kind][1] for kind in kinds if used[kind][0] != "triton"])
    print(f"\n{said}")
    if path is not None:
        jobs = [{**outcome.job._asdict(), **outcome.found} for outcome in tested]
        backends = {str(device): explained for device, explained in used.items()}
        figures = {"versions": installed, "verdict": said, "backends": backends, "jobs": jobs}
        write_json({**figures, "gpus": [described(kind) for kind in kinds]}, path, overwrite)
        print(f"The report is in {path}: please attach it when you report a problem.")
    return min(problems, 1)
