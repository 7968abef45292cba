"""The most bytes at once of a graph that a compiler runs with fusion, counted on the graph alone.

A compiler such as Inductor computes elementwise functions and sums inside the kernel that reads them.  So only some
values of a graph are buffers: the results of other functions, such as convolutions; sums, which are small; and what
such a function reads or the graph returns.  A buffer is allocated when it is computed, and freed after the last kernel
that reads it.  A kernel of elementwise functions writes its result over a buffer of the same size that only it still
reads.  What a function allocates inside itself is not counted.
"""

from collections.abc import Callable, Collection
from operator import getitem

from torch import Tensor, fx

from .._torch import compiler_parts
from .meter import key_of

# Functions that Inductor computes inside other kernels, beside those that the partitioner knows; and functions whose
# kernel computes what it reads, but whose result is a buffer.
ALSO_INSIDE = {
    "_unsafe_index", "constant_pad_nd", "copy", "new_empty_strided", "repeat", "select_scatter", "slice_scatter",
}  # fmt: skip
BUFFERS = {"_unsafe_index_put", "cat", "index_put"}
# The result of a sum is smaller than its inputs by this factor.
SMALLER = 4


class Buffers:
    """The buffers of one graph.

    Args:
        graph: the graph of a forward or a backward pass, in the order in which it runs.
        is_fusible: whether the compiler may compute a node inside another kernel.
    """

    def __init__(self, graph: fx.Graph, is_fusible: Callable[[fx.Node], bool]) -> None:
        self._nodes = list(graph.nodes)
        calls = (node for node in self._nodes if node.op == "call_function")
        self._fusible = {node for node in calls if is_fusible(node) or _name(node) in ALSO_INSIDE | BUFFERS}
        # The nodes that are no buffers, and for each node the place of the last kernel that reads what the node reads.
        self._inside: set[fx.Node] = set()
        self._read_at: dict[fx.Node, int] = {}
        for at, node in reversed([*enumerate(self._nodes)]):
            self._read_at[node] = at
            if self._is_inside(node):
                self._inside.add(node)
                self._read_at[node] = max((self._read_at[user] for user in node.users), default=at)

    def _is_inside(self, node: fx.Node) -> bool:
        if node.op != "call_function":
            return False
        own, given = keys_of(node), {key for source in node.all_input_nodes for key in keys_of(source)}
        if node.target is getitem or (own and own <= given):
            # One of several results, or a view.
            return True
        if node not in self._fusible or _name(node) in BUFFERS:
            return False
        if not node.users or not all(user in self._fusible for user in node.users):
            return False
        read = sum(t.nbytes for source in node.all_input_nodes for t in results(source))
        return sum(t.nbytes for t in results(node)) * SMALLER >= read

    def peak(self, given: Collection[fx.Node] = ()) -> int:
        """The most bytes at once; ``given`` are the inputs that are counted, each until its last use."""
        ends: dict[int, set[int]] = {}
        for key, at in self._last_reads().items():
            ends.setdefault(at, set()).add(key)
        alive = {key_of(t): t.untyped_storage().nbytes() for node in given for t in results(node)}
        # A kernel does not write over inputs of the graph.
        inputs = {key for node in self._nodes if node.op == "placeholder" for key in keys_of(node)}
        live = peak = sum(alive.values())
        for at, node in enumerate(self._nodes):
            freed = [key for key in ends.get(at, ()) if key in alive]
            if node.op == "call_function" and node not in self._inside:
                sizes = {key_of(t): t.untyped_storage().nbytes() for t in results(node)}
                new = {key: nbytes for key, nbytes in sizes.items() if key not in alive and key not in inputs}
                for nbytes in new.values() if node in self._fusible else ():
                    over = next((key for key in freed if key not in inputs and alive[key] == nbytes), None)
                    if over is not None:
                        freed.remove(over)
                        live -= alive.pop(over)
                alive.update(new)
                live += sum(new.values())
                peak = max(peak, live)
                # Results that nobody reads.
                freed += [key for key in new if key in ends.get(-1, ())]
            for key in freed:
                live -= alive.pop(key)
        return peak

    def _last_reads(self) -> dict[int, int]:
        """For each storage the place of the last kernel that reads it; -1 for results that nobody reads."""
        last = {key: -1 for node in self._nodes for key in keys_of(node)}
        for node in self._nodes:
            # Who reads one of several results does not read the others.
            for source in node.all_input_nodes if node.target is not getitem else ():
                at = len(self._nodes) if node.op == "output" else self._read_at[node]
                for key in keys_of(source):
                    last[key] = max(last[key], at)
        return last


def _name(node: fx.Node) -> str:
    return getattr(node.target, "_opname", "")


def results(node: fx.Node) -> list[Tensor]:
    """The results of a node, which are tensors without values."""
    value: object = node.meta.get("val")
    return [t for t in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(t, Tensor)]


def keys_of(node: fx.Node) -> set[int]:
    """The storages of the results of a node."""
    return {key_of(t) for t in results(node)}


def peak_if_fused(forward: fx.GraphModule, backward: fx.GraphModule) -> int:
    """The most bytes at once in forward or backward, without parameters, buffers and inputs of the model.

    Elementwise functions are computed inside other kernels.
    """
    is_fusible = compiler_parts().op_list().is_fusible
    before = {node.name for node in forward.graph.nodes if node.op == "placeholder"}
    given = [node for node in backward.graph.nodes if node.op == "placeholder" and node.name not in before]
    return max(Buffers(forward.graph, is_fusible).peak(), Buffers(backward.graph, is_fusible).peak(given))
