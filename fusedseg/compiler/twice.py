"""Products that run twice although nobody has asked for it, because their second run is nearly free.

* The scores of attention: a product of two activations whose result is much larger than both of them.  Kernels of
  attention do not keep it either.
* Those that give the most bytes for a multiplication, such as a 1x1 convolution of an image or the transposed
  convolution at the end of a decoder, until a fiftieth of forward's multiplications runs again.
"""

import math

from torch import fx

from ..ops.cheap import hint_of, size_of
from ..ops.observer import LARGER
from .joint import Joint, name_of, nbytes_of, value_of

# The share of forward's multiplications that may run again.
SHARE = 0.02
# The products whose factors are both activations.
BATCHED = ("bmm", "baddbmm")
# The matrix products, and the place of their left factor among the arguments.
MATRICES = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}


def multiplications(node: fx.Node) -> int:
    """How many multiplications a product has; 0 for other nodes."""
    name = name_of(node)
    if name in MATRICES:
        left = value_of(node.args[MATRICES[name]])
        return size_of(node) * hint_of(left.shape[-1])
    if name == "convolution":
        x, weight, transposed = node.args[0], node.args[1], node.args[6]
        each = math.prod(map(hint_of, value_of(weight).shape[1:]))
        return size_of(x if transposed else node) * each  # type: ignore[arg-type]
    return 0


def chosen(kept: set[fx.Node], joint: Joint) -> set[fx.Node]:
    """Those of the kept products that run again."""
    mine = kept - joint.returned
    products = {node: multiplications(node) for node in joint.graph.nodes if node in mine}
    found = {node for node in products if _is_of_scores(node)}
    left = SHARE * sum(map(multiplications, joint.forward))
    others = [node for node, count in products.items() if count and node not in found]
    for node in sorted(others, key=lambda node: products[node] / max(1, nbytes_of(node))):
        left -= products[node]
        if left < 0:
            break
        found.add(node)
    return found


def _is_of_scores(node: fx.Node) -> bool:
    return name_of(node) in BATCHED and size_of(node) >= LARGER * sum(map(size_of, node.all_input_nodes[-2:]))
