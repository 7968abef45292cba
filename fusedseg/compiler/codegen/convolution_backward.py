"""Gradients of a convolution one after the other, so that its input is gone before its gradient is allocated.

    dw = convolution_backward(dy, x, w)         the last reader of x
    dx = convolution_backward(dy, like x, w)    from the shape of x alone

The kernels are those of one call, so the bits are the same.  Where x fits beside its gradient without a higher peak of
the graph, one call computes both, which takes the host less time.  For the codegen "aten".
"""

from typing import Any

import torch
from torch import Tensor, fx

from ... import _torch
from ...ops.conv import conv3d
from ...ops.conv.convolutions import shape_only
from ..graph import last_readers, nbytes_of
from ..plan.aliasing import spent_input
from ..plan.liveness import Liveness

GRADIENTS = _torch.bare_op(torch.ops.aten.convolution_backward.default)


def convolution_backward(inputs: list[Tensor], dy: Tensor, w: Tensor, *given: Any, vendors: bool = False) -> Any:
    """``inputs`` is a list with x, the only reference to it; x is taken off the list.

    ``vendors`` says that no kernel of this package can compute the gradient of x.
    """
    x = inputs.pop()
    *geometry, mask = given
    of_input = GRADIENTS if vendors else conv3d.convolution_backward
    instead = shape_only(dy, x, w)
    if instead is None:
        return of_input(dy, x, w, *given)
    _, dw, dbias = GRADIENTS(dy, x, w, *geometry, [False, *mask[1:]])
    del x
    dx, _, _ = of_input(dy, instead, w, *geometry, [True, False, False])
    return dx, dw, dbias


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
