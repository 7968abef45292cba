"""Notes which branches of the kernels run in Triton's interpreter.

    python -m pytest tests/kernels -p tests.tools.branches -m sanitize

A branch is a condition of a kernel and one of its two values.  Conditions are those of ``if``, of ``while`` and of
``a if c else b``, and each operand of ``and`` and ``or``.  At its end the run writes the branches to the file that the
environment variable BRANCHES names.
"""

import ast
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

KERNELS = Path(__file__).parents[2] / "kernels"
taken: set[str] = set()


def conditions(kernel: ast.FunctionDef) -> Iterator[tuple[str, ast.expr, Callable[[ast.expr], None]]]:
    """The conditions of a kernel, with a name each, and a function that puts something else into their place."""
    for node in ast.walk(kernel):
        places: list[tuple[ast.expr, Callable[[ast.expr], None]]] = []
        if isinstance(node, ast.BoolOp):
            places = [(of, partial(node.values.__setitem__, i)) for i, of in enumerate(node.values)]
        elif isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(node.test, ast.BoolOp):
            places = [(node.test, partial(setattr, node, "test"))]
        for condition, put in places:
            yield f"{kernel.name}, line {condition.lineno - kernel.lineno}: {ast.unparse(condition)}", condition, put


def every_branch() -> set[str]:
    """Those of all kernels, as their source has them; functions of ``activation.py`` access no memory."""
    found = set()
    for file in {*KERNELS.glob("*.py")} - {KERNELS / "activation.py"}:
        for kernel in ast.parse(file.read_text()).body:
            if isinstance(kernel, ast.FunctionDef) and any(
                "triton.jit" in ast.unparse(d) for d in kernel.decorator_list
            ):
                found |= {f"{name} is {value}" for name, *_ in conditions(kernel) for value in (True, False)}
    return found


def took(name: str, value: Any) -> Any:
    taken.add(f"{name} is {bool(value)}")
    return value


class Noting:
    """Stands for Triton's transformer of a kernel's syntax tree: each condition is noted where it is evaluated."""

    def __init__(self, transformer: ast.NodeTransformer) -> None:
        self.transformer = transformer

    def visit(self, tree: ast.Module) -> ast.AST:
        for name, condition, put in [*conditions(tree.body[0])]:
            call = ast.Call(ast.Name("took", ast.Load()), [ast.Constant(name), condition], [])
            put(ast.copy_location(call, condition))
        return self.transformer.visit(tree)


def pytest_configure() -> None:
    from triton.runtime import interpreter

    # A kernel finds the names of this module among its own.
    interpreter.took = took
    interpreter.FunctionRewriter.ast_transformer = Noting(interpreter.FunctionRewriter.ast_transformer)


def pytest_sessionfinish() -> None:
    Path(os.environ["BRANCHES"]).write_text(json.dumps(sorted(taken)))
