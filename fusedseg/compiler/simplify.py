"""Copies and calls that a functional graph does not need.

An activation that writes over a view, as after an instance norm, is traced with copies of its gradient into new memory
of the same form.  The values are the same without them.  ``detach`` does nothing where no autograd records.
"""

from typing import Any

from torch import Tensor, fx

from .joint import name_of, value_of

# Ops that return their input.
NOTHING = ("detach", "alias")


def rewrite(graph: fx.Graph) -> int:
    """Replaces each such copy by what it copies, and returns their number."""
    count, graph_end = 0, next(iter(reversed(graph.nodes)))
    for node in list(graph.nodes):
        source: Any = None
        if name_of(node) == "copy":
            source = node.args[1]
        elif name_of(node) in ("clone", *NOTHING) and not (name_of(node) in NOTHING and graph_end in node.users):
            source = node.args[0]
        if isinstance(source, fx.Node) and _is_inner(source, node) and _is_same(value_of(source), value_of(node)):
            node.replace_all_uses_with(source)
            graph.erase_node(node)
            count += 1
    return count


def _is_inner(source: fx.Node, node: fx.Node) -> bool:
    """Whether nobody outside of the graph has the memory of a source; a view of it is a view in any case."""
    return source.op == "call_function" or name_of(node) in NOTHING


def _is_same(old: Any, new: Any) -> bool:
    """Whether two tensors have the same form, and their elements lie in memory without gaps."""
    if not (isinstance(old, Tensor) and isinstance(new, Tensor)):
        return False
    if old.dtype != new.dtype or old.device != new.device or old.dim() != new.dim():
        return False
    # Equal expressions of symbolic sizes are equal sizes; nothing is asked that would become a guard.
    left, right = ([str(n) for n in (*t.shape, *t.stride())] for t in (old, new))
    return left == right
