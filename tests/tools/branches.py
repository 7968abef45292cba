"""Notes which branches of the kernels run in Triton's interpreter.

    python -m pytest tests/kernels -p tests.tools.branches -m sanitize

A branch is a condition of a kernel and one of its two values.  Conditions are those of ``if``, of ``while`` and of
``a if c else b``, and each operand of ``and`` and ``or``.  At its end the run writes the branches to the file that the
environment variable BRANCHES names.
"""

import ast
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KERNELS = Path(__file__).parents[2] / "kernels"
taken: set[str] = set()


def conditions(tree: ast.AST) -> Iterator[tuple[ast.AST, str, int | None]]:
    """Where each condition stands: a node, its field, and the place in a list of operands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            if not isinstance(node.test, ast.BoolOp):
                yield node, "test", None
        elif isinstance(node, ast.BoolOp):
            yield from ((node, "values", i) for i in range(len(node.values)))


def named(kernel: str, condition: ast.AST, value: bool) -> str:
    return f"{kernel}: {ast.unparse(condition)} is {value}"


def every_branch() -> set[str]:
    """Those of all kernels, as their source has them; functions of ``activation.py`` access no memory."""
    found = set()
    for file in {*KERNELS.glob("*.py")} - {KERNELS / "activation.py"}:
        for kernel in ast.parse(file.read_text()).body:
            if isinstance(kernel, ast.FunctionDef) and any(
                "triton.jit" in ast.unparse(d) for d in kernel.decorator_list
            ):
                for node, field, i in conditions(kernel):
                    condition = getattr(node, field) if i is None else getattr(node, field)[i]
                    found |= {named(kernel.name, condition, value) for value in (True, False)}
    return found


def took(kernel: str, condition: str, value: Any) -> Any:
    taken.add(f"{kernel}: {condition} is {bool(value)}")
    return value


class Noting:
    """Stands for Triton's transformer of a kernel's syntax tree: each condition is noted where it is evaluated."""

    def __init__(self, transformer: ast.NodeTransformer) -> None:
        self.transformer = transformer

    def visit(self, tree: ast.Module) -> ast.AST:
        kernel = tree.body[0].name
        for node, field, i in [*conditions(tree)]:
            condition = getattr(node, field) if i is None else getattr(node, field)[i]
            call = ast.Call(
                ast.Name("took", ast.Load()),
                [ast.Constant(kernel), ast.Constant(ast.unparse(condition)), condition], [],
            )  # fmt: skip
            call = ast.copy_location(call, condition)
            if i is None:
                setattr(node, field, call)
            else:
                getattr(node, field)[i] = call
        return self.transformer.visit(tree)


def pytest_configure() -> None:
    from triton.runtime import interpreter

    # A kernel finds the names of this module among its own.
    interpreter.took = took
    interpreter.FunctionRewriter.ast_transformer = Noting(interpreter.FunctionRewriter.ast_transformer)


def pytest_sessionfinish() -> None:
    Path(os.environ["BRANCHES"]).write_text(json.dumps(sorted(taken)))
