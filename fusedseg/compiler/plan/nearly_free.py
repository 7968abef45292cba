"""Compute-intensive ops that run twice although nobody has asked for it, because their second run is nearly free.

* The scores of attention: the product of two activations, which is much larger than both of them.  Kernels of
  attention do not keep it either.
* The ops that save the most bytes for their arithmetic, such as a 1x1 convolution of an image or the transposed
  convolution at the end of a decoder, until a fiftieth of forward's arithmetic runs again.  None of them reads what
  backward would have to enlarge again, such as an interpolation: on a CPU that takes as long as the convolution.
"""

from collections.abc import Set as AbstractSet

from torch import fx

from ..graph import Joint, calls_view, flops_of, nbytes_of, row_of, size_of

# The share of forward's arithmetic that may be recomputed.
SHARE = 0.02
# The scores of attention are at least this many times as large as what they are computed from.
LARGER_THAN_INPUTS = 4


def scores(calls: AbstractSet[fx.Node], joint: Joint) -> set[fx.Node]:
    """The calls that compute scores of attention."""
    return {node for node in calls - joint.free_to_save if _is_of_scores(node)}


def cheapest(saved: set[fx.Node], joint: Joint, share: float) -> set[fx.Node]:
    """The saved compute-intensive ops, but for scores, that run again within a share of forward's arithmetic."""
    mine, found = saved - joint.free_to_save, set[fx.Node]()
    intensive = {node: _flops_of(node) for node in joint.graph.nodes if node in mine}
    left = share * sum(map(_flops_of, joint.forward))
    others = [
        node
        for node, flops in intensive.items()
        if flops and not _is_of_scores(node) and not _is_of_larger(node, saved)
    ]
    for node in sorted(others, key=lambda node: intensive[node] / max(1, nbytes_of(node))):
        left -= intensive[node]
        if left < 0:
            break
        found.add(node)
    return found


def _flops_of(node: fx.Node) -> int:
    """The arithmetic of a convolution or a matrix product."""
    return flops_of(node) if row_of(node).compute_intensive else 0


def _is_of_scores(node: fx.Node) -> bool:
    return row_of(node).batched and size_of(node) >= LARGER_THAN_INPUTS * sum(map(size_of, node.all_input_nodes[-2:]))


def _is_of_larger(node: fx.Node, saved: set[fx.Node]) -> bool:
    """Whether something between the saved values and a node is larger than all that it is computed from."""
    stack, seen = node.all_input_nodes, set(saved)
    while stack:
        source = stack.pop()
        if source in seen or source.op != "call_function":
            continue
        seen.add(source)
        if not calls_view(source) and size_of(source) > sum(map(size_of, source.all_input_nodes)):
            return True
        stack += source.all_input_nodes
    return False
