"""Limits that keep the code readable: parameters of a function, arguments by position."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fusedseg"
PARAMETERS, POSITIONAL = 8, 8

# (file, function) -> why it may take more than PARAMETERS.  Constructors of modules follow their stock class.
LONG = {
    ("functional/norms.py", "inplace_abn"): "the arguments of F.batch_norm, and of the activation",
    ("functional/norms.py", "inplace_instance_norm_act"): "the arguments of F.instance_norm, and of the activation",
    ("functional/norms.py", "norm_act"): "the arguments of F.batch_norm, and of norm and activation",
    ("functional/convolutions.py", "conv_abn"): "the arguments of F.conv2d, F.batch_norm, and of the activation",
    ("inference/sliding_window.py", "sliding_window_labels"): "the arguments of MONAI's sliding_window_inference",
    ("ops/segmentation/call.py", "segmentation_sums"): "options of the sums, by keyword only",
    ("integrations/inplace_abn.py", "inplace_abn"): "the arguments of the package inplace_abn",
    ("planning/plan.py", "plan"): "options of a search, by keyword only",
}
MODULES = ("nn", "losses", "unet")


def files() -> Iterator[tuple[str, ast.Module]]:
    """(path in the package, syntax tree) of each file."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield str(path.relative_to(PACKAGE)), ast.parse(path.read_text())


def count(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> int:
    """Counts the parameters of a function without ``self``, ``cls`` and ``ctx``."""
    of = function.args
    named = [one.arg for one in (*of.posonlyargs, *of.args, *of.kwonlyargs)]
    return (
        len(named) - (named[:1] in (["self"], ["cls"], ["ctx"])) + sum(one is not None for one in (of.vararg, of.kwarg))
    )


def is_schema(function: ast.AST) -> bool:
    """Whether ``torch.library`` reads the parameters: a schema cannot contain our own classes."""
    decorators = [ast.unparse(one) for one in getattr(function, "decorator_list", [])]
    return any("custom_op" in one or one.endswith("register_fake") for one in decorators)


def test_functions_take_few_parameters():
    found = {
        (path, getattr(node, "name", "lambda")): count(node)
        for path, tree in files()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) and count(node) > PARAMETERS
        if not is_schema(node) and not (node.name == "__init__" and path.split("/")[0] in MODULES)
    }
    assert set(found) == set(LONG), f"pass an object with named fields, or give the reason here: {found}"


def test_calls_pass_few_arguments_by_position():
    found = [
        f"{path}:{node.lineno} {ast.unparse(node.func)}, {len(node.args)}"
        for path, tree in files()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and len(node.args) > POSITIONAL
    ]
    assert not found
