"""Writing results over inputs that nobody reads again, for the codegen "aten".

A functional graph computes relu(x) into new memory while x is alive; eager mode writes over x.  Here an elementwise op
becomes its in-place form if its first argument, or one term of a sum, is dead after it, is no argument of the graph,
is known to lie in memory of its own, and has the dtype, shape and strides of the result.  The gradient of an activation
is written over the gradient that it reads.  So are a softmax and its gradient, which would be the third tensor of its
size at the peak of an attention.
"""

import torch
from torch import Tensor, fx

from ..graph import calls_view, has_own_memory, is_op, outputs_of, roots_of, value_of
from ..plan.aliasing import first_result, may_overwrite, overwriting

aten = torch.ops.aten
# The argument that is the tensor to write to, by the overload of the op.
INTO = {"grad_input": "grad_input", "self_out": "out"}


class Memory:
    """In which memory the results of a graph lie, and who reads each memory last.

    Attributes:
        places: the place of each node.
        roots: for each node the one whose memory its result lies in.
        last: for each memory the place of the last node that reads it.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.places = {node: place for place, node in enumerate(graph.nodes)}
        self.roots = roots_of(graph)
        self.last: dict[fx.Node, int] = {}
        for node, place in self.places.items():
            for source in node.all_input_nodes:
                self.last[self.roots[source]] = place

    def is_free(self, node: fx.Node, x: fx.Node) -> bool:
        """Whether the result of a node may be written over its argument ``x``."""
        root = self.roots[x]
        others = [source for source in node.all_input_nodes if source is not x]
        if root.op != "call_function" or not has_own_memory(root) or self.last[root] > self.places[node]:
            return False
        if any(self.roots[other] is root for other in others):
            return False
        # The view covers the memory that it lies in; the root may have several results.
        whole = value_of(root)
        return not isinstance(whole, Tensor) or str(whole.numel()) == str(value_of(x).numel())

    def write_over(self, node: fx.Node, result: fx.Node, x: fx.Node) -> None:
        """Notes that a node writes its result to the memory of ``x``, which is read as long as the result is."""
        root = self.roots[x]
        for other, of in self.roots.items():
            if of is result:
                self.roots[other] = root
        place = self.places[node]
        self.last[root] = max(place, self.last.get(result, place))


def write_in_place(graph: fx.Graph) -> int:
    """Makes ops write their results over their arguments, and returns how many do."""
    memory = Memory(graph)
    # For each result the node that writes it, and what it is written over.
    written: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}
    for node in graph.nodes:
        x = next((x for x in may_overwrite(node) if memory.is_free(node, x)), None)
        if x is None:
            continue
        result = first_result(node)
        node.target = overwriting(node)
        into = INTO.get(node.target._overloadname) if is_op(node) else None
        if into is not None:
            node.kwargs = {**node.kwargs, into: x}
        elif x is not node.args[0]:
            node.args = (x, node.args[0])
        memory.write_over(node, result, x)
        written[result] = node, x
    _return_no_views(graph, written)
    return len(written)


def _return_no_views(graph: fx.Graph, written: dict[fx.Node, tuple[fx.Node, fx.Node]]) -> None:
    """No output of a graph is a view because it was written over one, as over the output of an instance norm.

    A program may change an output in place, and PyTorch refuses that for a view which a function has returned.
    """
    for output in outputs_of(graph):
        if not isinstance(output, fx.Node) or output not in written:
            continue
        node, x = written[output]
        while x in written:
            node, x = written[x]
        if calls_view(x):
            with graph.inserting_before(node):
                node.replace_input_with(x, graph.call_function(without_views, (x,)))


def without_views(x: Tensor) -> Tensor:
    """The same memory as a tensor that is no view to autograd."""
    return x.data
