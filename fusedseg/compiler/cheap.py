"""Which nodes of a graph of aten ops are cheap: by one rule for all passes of the backend.

A cheap node may be computed again: it gives the same result, without much arithmetic.  A product is a convolution, a
matrix product, attention, or an op of another package.  It is neither: it is kept, and what is cheap follows from it.
"""

import math

import torch
from torch import Tensor, fx

from .. import _torch
from ..rules import CHEAP

# Keep a result if computing it again needs a recomputed input at least this many times its size.
LARGER = 4
# A result is a small vector if it has at most this fraction of the elements of the inputs: 1 / SMALL.
SMALL = 16


def tensors_of(node: fx.Node) -> list[Tensor]:
    """The results of a node, which are tensors without values."""
    value = node.meta.get("val")
    return [t for t in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(t, Tensor)]


def hint_of(size: int | torch.SymInt) -> int:
    """A size as a number.  A symbolic size has the size of the example as its hint; reading the hint adds no guard."""
    return size if isinstance(size, int) else size.node.hint or 1


def numel_of(t: Tensor) -> int:
    """The number of elements, with hints in place of symbolic sizes."""
    return math.prod(map(hint_of, t.shape))


def size_of(node: fx.Node) -> int:
    """The number of elements of the largest result."""
    return max(map(numel_of, tensors_of(node)), default=0)


def call_of(node: fx.Node) -> str:
    """The call of a function to which the node belongs; the compiler may write one call as many nodes."""
    stack = node.meta.get("source_fn_stack")
    return stack[-1][0] if stack else node.name


def has_flops(node: fx.Node) -> bool:
    """Whether the node is a convolution, a matrix product or attention."""
    from torch.utils.flop_counter import flop_registry

    return isinstance(node.target, _torch.OpOverload) and node.target.overloadpacket in flop_registry


def is_cheap(node: fx.Node) -> bool:
    """Whether the compiler may compute the node again, with the same result and without much arithmetic."""
    op = node.target
    if not isinstance(op, _torch.OpOverload) or op._schema.is_mutable:
        return False
    if torch.Tag.nondeterministic_seeded in op.tags:
        return False
    if any(isinstance(source.meta.get("val"), torch.SymFloat) for source in node.all_input_nodes):
        # The compiler cannot keep such a number for backward.
        return False
    name = op._schema.name.partition("::")[2]
    if op.namespace == "fusedseg":
        return name in OURS
    return op.namespace in ("aten", "prims") and (torch.Tag.pointwise in op.tags or op.is_view or name in CHEAP)


# The ops of this package that may run again.  A norm that keeps its output has nothing to rebuild, and a synchronised
# norm must not communicate again; that of ``norms.py`` has a form of its own (``forms.py``).
OURS = frozenset({"max_pool", "interpolate"})
