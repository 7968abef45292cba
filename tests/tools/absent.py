"""A program: runs fusedseg where private names of PyTorch are missing, and prints what happens as JSON.

    python -m tests.tools.absent torch._C._current_graph_task_id [more names]

The names are hidden from ``fusedseg/_torch.py`` alone, while it looks them up, so that PyTorch itself still works.
"""

import importlib.util
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROOT = Path(__file__).parents[2]
_ABSENT = object()


def import_without(paths: list[str]) -> Any:
    """Imports fusedseg with ``fusedseg/_torch.py`` not finding the names; returns that module."""
    hidden = set()
    for path in paths:
        parent: Any = sys.modules["torch"]
        *above, leaf = path.split(".")[1:]
        for i, name in enumerate(above, 2):
            if not hasattr(parent, name):
                importlib.import_module(".".join(path.split(".")[:i]))
            parent = getattr(parent, name)
        hidden.add((id(parent), leaf))

    def find(of: Any, name: str, default: Any = _ABSENT) -> Any:
        if (id(of), name) in hidden:
            return default
        return getattr(of, name) if default is _ABSENT else getattr(of, name, default)

    spec = importlib.util.spec_from_file_location("fusedseg._torch", ROOT / "fusedseg" / "_torch.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    # Names of a module come before builtins.
    nothing = object()
    module.getattr, module.hasattr = find, lambda of, name: find(of, name, nothing) is not nothing
    sys.modules["fusedseg._torch"] = module
    spec.loader.exec_module(module)
    return module


def network(kind: str) -> nn.Module:
    """Convolutions, norms, a prelu and a pool in float64: "stock", "converted", or "ours", modules of this package."""
    import fusedseg

    torch.manual_seed(0)
    stock = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.LeakyReLU(0.1)),
        *(nn.Conv2d(8, 8, 3, padding=1), nn.InstanceNorm2d(8, affine=True), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Conv2d(8, 4, 1), nn.GroupNorm(2, 4), nn.PReLU()),
    ).double()
    if kind != "ours":
        return fusedseg.convert(stock) if kind == "converted" else stock
    ours = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), fusedseg.InPlaceABN(8, activation_param=0.1)),
        *(nn.Conv2d(8, 8, 3, padding=1), fusedseg.InstanceNormAct(8, activation="relu", affine=True)),
        *(fusedseg.MaxPool2d(2), nn.Conv2d(8, 4, 1), fusedseg.GroupNormAct(2, 4, activation="prelu")),
    ).double()
    for own, of in zip(ours.parameters(), stock.parameters(), strict=True):
        own.data.copy_(of.data)
    return ours


class Counted(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes that autograd saves."""

    def __init__(self) -> None:
        self.nbytes = 0
        super().__init__(self._pack, lambda t: t)

    def _pack(self, t: Tensor) -> Tensor:
        self.nbytes += t.nbytes
        return t


def gradients(model: nn.Module) -> tuple[list[Tensor], int]:
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    count = Counted()
    with count:
        loss = F.relu(model(x)).mul(2).sigmoid().sum()
    loss.backward()
    return [p.grad for p in model.parameters()], count.nbytes


def error_of(run: Any) -> str:
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def estimate() -> None:
    import fusedseg

    fusedseg.profile(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), (1, 3, 8, 8))


def main() -> None:
    names = import_without(sys.argv[1:])
    expected, _ = gradients(network("stock"))
    found: dict[str, Any] = {"missing": names.MISSING}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        runs = {name: gradients(network(name)) for name in ("ours", "converted", "stock")}
    found["warnings"] = [str(warning.message) for warning in seen]
    found["bytes"] = {name: nbytes for name, (_, nbytes) in runs.items()}
    found["off"] = {
        name: max((a - b).abs().max().item() for a, b in zip(grads, expected, strict=True))
        for name, (grads, _) in runs.items()
    }
    found["errors"] = {"estimate": error_of(estimate)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
