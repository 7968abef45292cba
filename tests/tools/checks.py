"""The names of the checks of modules that another process imports: they are written in the modules alone."""

import ast
from pathlib import Path


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
