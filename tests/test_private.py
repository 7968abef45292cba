"""Private names of PyTorch and Triton: each stands in one file, and where one is missing no gradient changes."""

import ast
import json
from pathlib import Path

import pytest

from fusedseg import _torch
from tests.tools.warm import run

ROOT = Path(__file__).parents[1]
# The base classes of stock modules, which stand beside them in PyTorch's documentation.
STOCK = {f"torch.nn.modules.{name}" for name in (
    "batchnorm._BatchNorm", "conv._ConvNd", "instancenorm._InstanceNorm", "loss._Loss")}  # fmt: skip
# Ops that PyTorch's tracer writes into graphs, and that it calls; a version without them writes others.
OPS_OF_GRAPHS = ("aten._native_batch_norm_legit", "aten._upsample_nearest_exact", "aten._to_copy")
# Gradients of float64 of order one; fused ops add in another order than stock ones.
CLOSE = 1e-13


def dotted(node: ast.AST) -> str:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def private_names(path: Path) -> set[str]:
    """The private names of PyTorch, and the names of Triton's own modules, that a file uses."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and dotted(node).startswith(("torch.", "aten.", "triton.")):
            name = dotted(node)
            found |= {name} if is_private(name) or name.startswith(("triton.runtime", "triton.knobs")) else set()
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("torch") and is_private(alias.name)}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            top = node.module.split(".")[0]
            found |= {name for name in names if top == "torch" and is_private(name)}
            found |= {name for name in names if top == "triton" and not name.startswith("triton.language")}
    return found


def test_private_names_stand_in_one_file():
    found = {}
    for path in [*(ROOT / "fusedseg").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]:
        name = path.relative_to(ROOT).as_posix()
        if name not in ("fusedseg/_torch.py", "kernels/triton_names.py"):
            found[name] = {used for used in private_names(path) - STOCK if not used.startswith(OPS_OF_GRAPHS)}
    assert {name: names for name, names in found.items() if names} == {}


def test_each_name_is_found_once():
    """Two branches had brought ``dispatch_modes``, once a number and once a list."""
    body = ast.parse((ROOT / "fusedseg/_torch.py").read_text()).body
    names = [t.id for node in body if isinstance(node, ast.Assign) for t in node.targets if isinstance(t, ast.Name)]
    assert [name for name in set(names) if names.count(name) > 1] == []


def test_nothing_is_missing_here():
    assert not _torch.MISSING


def without(*names: str) -> dict:
    """What a program finds where names are missing; its gradients are right in any case."""
    done = run("tests.tools.absent", *names)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found["missing"]) >= set(names)
    assert max(found["off"].values()) < CLOSE
    assert not found["warnings"]
    assert found["bytes"]["ours"] < found["bytes"]["stock"]
    return found


def test_names_have_stand_ins_or_errors():
    """Results stay the same, and a feature that cannot do without a name says so."""
    errors = without(*_torch.NAMES)["errors"]
    assert errors["estimate"].startswith("RuntimeError: fusedseg: ")
    assert "does not have; `python -m fusedseg doctor`" in errors["estimate"]


@pytest.mark.slow
@pytest.mark.parametrize("names", [_torch.NAMES[k : k + 8] for k in range(0, len(_torch.NAMES), 8)])
def test_a_name_is_missing(names):
    for name in names:
        for error in without(name)["errors"].values():
            assert error == "" or (error.startswith("RuntimeError: fusedseg: ") and name in error)


def test_nothing_is_missing_from_the_program():
    found = without()
    assert found["errors"] == {"estimate": ""}
