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
OPS_OF_GRAPHS = ("aten._native_batch_norm_legit", "aten._upsample_nearest_exact")
HOOKS = "torch._C._autograd._top_saved_tensors_default_hooks"
# The names whose absence switches the scope off.
FOR_SCOPE = (
    HOOKS, "torch._C.DisableTorchFunction", "torch._C._current_graph_task_id", "torch._C._len_torch_function_stack",
    "torch.overrides._get_current_function_mode_stack", "torch._C._functorch.peek_interpreter_stack",
    "torch._C._functorch.is_functorch_wrapped_tensor", "torch._C._functorch.get_unwrapped",
    "torch.autograd._get_sequence_nr", "torch._ops.OpOverload",
    "torch._C._dynamo.eval_frame.set_code_exec_strategy", "torch._C._dynamo.eval_frame._FrameExecStrategy",
    "torch._C._dynamo.eval_frame._FrameAction", "torch.autograd.Variable._execution_engine.queue_callback",
    "torch.Tensor._version", "torch.Tensor._base", "torch.Tensor._is_view", "torch.UntypedStorage._cdata",
)  # fmt: skip
OTHERS = tuple(name for name in _torch.NAMES if name not in FOR_SCOPE)
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


def test_the_search_finds_private_names(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        "import torch._dynamo\nfrom torch._ops import OpOverload\nfrom triton import knobs\n"
        "import torch\ntorch._C._nn.elu\ntorch.autograd._get_sequence_nr()\nself._own\n"
    )
    assert {"torch._dynamo", "torch._ops.OpOverload", "triton.knobs", "torch._C._nn.elu"} <= private_names(path)
    assert "torch.autograd._get_sequence_nr" in private_names(path)


@pytest.mark.skipif(not _torch.COMPILES_SCOPES, reason="this PyTorch lacks names")
def test_nothing_is_missing_here():
    assert not _torch.MISSING
    assert not _torch.compiled_problem()
    assert set(FOR_SCOPE) < set(_torch.NAMES)


def without(*names: str) -> dict:
    """What a program finds where names are missing; its gradients are right in any case."""
    done = run("tests.tools.absent", *names)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found["missing"] + found["for_scope"]) >= set(names)
    assert max(found["off"].values()) < CLOSE
    # Outside of a scope, stock modules keep what they keep.
    assert found["bytes"]["fused"] < found["bytes"]["plain"]
    return found


# The rest are of the same kind.
SHOWN = {HOOKS, "torch._C.DisableTorchFunction", "torch.Tensor._version"}


@pytest.mark.parametrize(
    "name", [name if name in SHOWN else pytest.param(name, marks=pytest.mark.slow) for name in FOR_SCOPE]
)
def test_the_scope_says_once_that_it_does_nothing(name):
    found = without(name)
    assert name in found["for_scope"]
    (warning,) = found["warnings"]
    assert warning.startswith("fusedseg.recompute does nothing")
    assert name in warning
    assert found["bytes"]["scope"] == found["bytes"]["plain"]
    assert found["bytes"]["fused in scope"] == found["bytes"]["fused"]


def test_all_names_of_the_scope_at_once():
    found = without(*FOR_SCOPE)
    assert len(found["warnings"]) == 1
    assert found["errors"]["estimate"] == "" or "fusedseg: " in found["errors"]["estimate"]


@pytest.mark.skipif(bool(_torch.scope_problem()), reason="the scope is off in this PyTorch")
def test_other_names_have_stand_ins_or_errors():
    """Results stay the same, the scope works, and a feature that cannot do without a name says so."""
    found = without(*OTHERS)
    assert not found["warnings"]
    assert found["bytes"]["scope"] < found["bytes"]["plain"]
    errors = found["errors"]
    # Batches are not recognised, so PyTorch refuses them.
    assert errors["batched"].startswith("RuntimeError: ")
    assert errors["estimate"].startswith("RuntimeError: fusedseg: ")
    assert "does not have; `python -m fusedseg doctor`" in errors["estimate"]


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_another_name_is_missing(name):
    found = without(name)
    assert not found["warnings"]
    for error in found["errors"].values():
        refused = error.startswith("RuntimeError: Batching rule not implemented")
        assert error == "" or refused or (error.startswith("RuntimeError: fusedseg: ") and name in error)


def test_nothing_is_missing_from_the_program():
    found = without()
    assert found["errors"] == {"batched": "", "estimate": ""} or _torch.scope_problem()


def test_a_scope_in_compiled_code_says_that_it_does_nothing(monkeypatch):
    import torch

    import fusedseg
    from fusedseg.scope import compiled

    monkeypatch.setattr(_torch, "_COMPILED", (*_torch._COMPILED, "torch.no_such_name"))
    compiled.warn_of_torch.cache_clear()

    def step(x):
        with fusedseg.recompute():
            return torch.relu(x * 2).sum()

    x = torch.randn(4, requires_grad=True)
    torch._dynamo.reset()
    missing = "torch.no_such_name" if _torch.COMPILES_SCOPES else "takes no labels"
    with pytest.warns(UserWarning, match=rf"recompute does nothing.*{missing}"):
        torch.compile(step, backend="aot_eager", fullgraph=True)(x).backward()
    torch.testing.assert_close(x.grad, 2.0 * (x > 0))
    compiled.warn_of_torch.cache_clear()
