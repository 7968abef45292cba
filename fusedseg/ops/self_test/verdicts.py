"""Keeps verdicts of self-tests on disk: a file for each family, dtype and environment, in the user's cache folder.

The environment consists of the GPU, its driver, and the versions of PyTorch, Triton and the kernels.  If one of them
changes, the kernels are tested again.  A folder that cannot be written and a file that cannot be read are no errors;
then every process tests for itself.
"""

import contextlib
import functools
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

from ... import _backend

DRIVERS = ("/sys/module/nvidia/version", "/sys/module/amdgpu/version")


class Verdict(NamedTuple):
    """The result of a self-test: ``kind`` of failure and ``text`` of the error, both "" if the test has passed."""

    kind: str = ""
    text: str = ""
    seconds: float = 0.0


class Environment(NamedTuple):
    """The values that a verdict depends on."""

    gpu: str
    architecture: str
    driver: str
    torch: str
    runtime: str
    triton: str
    kernels: str


def _driver() -> str:
    for path in DRIVERS:
        with contextlib.suppress(OSError):
            return Path(path).read_text().strip()
    return "unknown"


@functools.cache
def environment(device: torch.device) -> Environment:
    from ...kernels.triton_names import identity

    if device.type == "cuda":
        gpu, architecture = torch.cuda.get_device_name(device), _backend.architecture(device)
    else:
        gpu = architecture = str(device)
    runtime = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    return Environment(gpu, architecture, _driver(), torch.__version__, runtime, **identity())


def folder() -> Path | None:
    """The folder of the verdicts, or None if the user has no home."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    # The specification of these folders ignores relative paths.
    if os.path.isabs(given):
        return Path(given) / "fusedseg" / "self_test"
    try:
        return Path.home() / ".cache" / "fusedseg" / "self_test"
    except RuntimeError:
        return None


def path_of(family: str, dtype: torch.dtype, of: Environment) -> Path | None:
    where = folder()
    digest = hashlib.sha256(json.dumps(of).encode()).hexdigest()[:16]
    return None if where is None else where / f"{family}-{str(dtype).removeprefix('torch.')}-{digest}.json"


def read(path: Path | None, of: Environment) -> Verdict | None:
    """The verdict in a file, or None if there is none, or the file is damaged."""
    if path is None:
        return None
    # A damaged file may hold anything, also bytes that are no text, or a list in place of a dict.
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        content = json.loads(path.read_text())
        kind, text, seconds = (content["verdict"][name] for name in Verdict._fields)
        if content["environment"] == of._asdict() and isinstance(kind, str) and isinstance(text, str):
            return Verdict(kind, text, float(seconds))
    return None


def write(path: Path | None, of: Environment, verdict: Verdict) -> bool:
    """Writes a verdict, and returns whether it could be written.  Readers see the old file or the new one."""
    if path is None:
        return False
    made = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, made = tempfile.mkstemp(prefix=path.stem, suffix=".new", dir=path.parent)
        with os.fdopen(handle, "w") as file:
            json.dump({"environment": of._asdict(), "verdict": verdict._asdict()}, file, indent=1)
        os.replace(made, path)
    except OSError:
        if made is not None:
            with contextlib.suppress(OSError):
                os.unlink(made)
        return False
    return True
