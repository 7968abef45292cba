"""Checks that run in a process without the interpreter: their names are written in their modules alone."""

import ast
import json
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.tools import warm


def checks_of(*paths: Path) -> list[str]:
    """The functions that take nothing and return None; a name that begins with an underscore is none of a check."""
    nodes = [node for path in paths for node in ast.parse(path.read_text()).body]
    return [
        node.name
        for node in nodes
        if isinstance(node, ast.FunctionDef)
        and not (node.args.args or node.decorator_list or node.name.startswith("_"))
        and node.returns is not None
        and ast.unparse(node.returns) == "None"
    ]


def results_of(module: str, checks: Sequence[str]) -> dict[str, str]:
    """What failed of each check in a process of its own, which ends with ``print_results``."""
    done = warm.run(module, *checks, env=warm.without(["TRITON_INTERPRET", "TRITON_DEFAULT_FP_FUSION"]))
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def print_results(checks: Mapping[str, Any]) -> None:
    """Prints as JSON what fails of the checks that the command line names; "" if nothing fails."""

    def failure_of(check: Callable[[], None]) -> str:
        try:
            check()
        except Exception:
            return traceback.format_exc()
        return ""

    print(json.dumps({name: failure_of(checks[name]) for name in sys.argv[1:]}))
