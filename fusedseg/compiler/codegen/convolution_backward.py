"""Gradients of a convolution one after the other (``in_turn``), for the codegen "aten".

Where x fits beside its gradient without a higher peak of the graph, one call computes both, which takes the host less
time.
"""

from typing import Any

from torch import Tensor, fx

from ...ops.conv import conv3d
from ...ops.conv.convolutions import GRADIENTS, in_turn
from ..graph import last_readers, nbytes_of
from ..plan.aliasing import spent_input
from ..plan.liveness import Liveness


def convolution_backward(inputs: list[Tensor], dy: Tensor, w: Tensor, *given: Any, vendors: bool = False) -> Any:
    """``in_turn``; ``vendors`` says that no kernel of this package can compute the gradient of x."""
    return in_turn(GRADIENTS if vendors else conv3d.convolution_backward, inputs, dy, w, *given)


def free_inputs(graph: fx.Graph, liveness: Liveness) -> int:
    """Writes such gradients where they are the last reader, and returns their number."""
    last = last_readers(graph)
    found = [(node, x) for node in graph.nodes if (x := spent_input(node)) is not None and last[x] is node]
    found = [(node, x) for node, x in found if not _fits(node, x, liveness)]
    for node, x in found:
        dy, _, *rest = node.args
        node.target, node.args = convolution_backward, ([x], dy, *rest)
    return len(found)


def _fits(node: fx.Node, x: fx.Node, liveness: Liveness) -> bool:
    """Whether both may be alive at once."""
    place = liveness.place_of.get(node)
    return place is not None and liveness.takes((place, place, nbytes_of(x)))
