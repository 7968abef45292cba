"""What the tests of real frameworks share: steps in float64, bytes, and a fresh process without fusedseg."""

import copy
import functools
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusedseg.memory import Footprint
from fusedseg.memory.meter import measure
from tests.reference import gradient_errors

MIB = 2**20
# torchvision's wheel for GPUs does not load its binary ops beside a CPU build of PyTorch, and its import needs them.
LIBRARY = """
import torch
library = torch.library.Library("torchvision", "DEF")
for op in ("nms", "qnms"):
    library.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


@functools.cache
def _library() -> dict[str, Any]:
    """Runs ``LIBRARY`` once, and returns its names, because the ops are there as long as the library is."""
    exec(LIBRARY, names := {})
    return names


def framework(name: str) -> Any:
    """Imports a module of a framework, or skips the test where it, or a package that it imports, is absent."""
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        pytest.skip(f"{name} is not installed", allow_module_level=True)
    if importlib.util.find_spec("torchvision") and torch.version.cuda is None:
        _library()
    return pytest.importorskip(name)


def gradients(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> tuple[float, dict[str, Tensor]]:
    """The loss of a copy of the model in float64, and its gradients by the names of the parameters."""
    model = copy.deepcopy(model).double().train()
    value = loss(model)
    value.backward()
    return value.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def difference(ours: dict[str, Tensor], stock: dict[str, Tensor]) -> float:
    """The largest relative difference of a gradient; NaN if there is one."""
    return torch.tensor([*gradient_errors(ours, stock).values()]).max().item()


def bytes_of(model: nn.Module, *inputs: Any) -> Footprint:
    """The bytes of a training step, in fp32."""
    return measure(copy.deepcopy(model).float().train(), *inputs)


def told(name: str, **footprints: Footprint) -> None:
    for which, found in footprints.items():
        print(f"\n{name}, {which}: kept {found.saved / MIB:.2f} MiB, peak {found.peak / MIB:.2f} MiB", end="")


def without_fusedseg(code: str, *arguments: Any) -> str:
    """The last line that a fresh process prints in which ``import fusedseg`` fails."""
    paths: Iterable[str] = [path for path in sys.path if path and Path(path) != Path(__file__).parents[2]]
    head = f"import sys, warnings; sys.path[:] = {list(paths)!r}; sys.modules['fusedseg'] = None\n"
    head += "warnings.simplefilter('ignore')\n" + ("" if torch.version.cuda else LIBRARY)
    return last_line(head + code, *arguments)


def last_line(code: str, *arguments: Any) -> str:
    """The last line that a fresh process prints."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip().splitlines()[-1]
