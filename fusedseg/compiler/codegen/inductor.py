"""What Inductor runs of this package while it compiles: passes over its graphs, which its caches can name."""

from pathlib import Path
from typing import Any

from torch import fx

from ... import _torch
from .. import passes
from ..graph import is_gradient, outputs_of
from ..settings import Settings

_parts = _torch.compiler_parts()
# Inductor's caches forget what this package has made once one of its files has changed.
FILES = tuple(map(str, sorted(Path(__file__).parents[2].rglob("*.py"))))
# The note of Inductor on the output of a graph: the places of the results whose strides the user sees.
PLACES = "user_visible_output_idxs"


class _Pass(_parts.CustomGraphPass):  # type: ignore[name-defined]
    """A pass that can be pickled, as the partitioner can."""

    def uuid(self) -> Any:
        return _parts.get_hash_for_files(FILES)


class WeightsAsTheyAre(_Pass):
    """A pass over the graph of forward, which then keeps weights without a copy.

    Inductor's layout optimization gives each convolution a weight in channels_last.  A weight that backward reads is
    returned by forward, and of what forward returns Inductor chooses the strides.  So backward would get the copy,
    which lives from forward to backward beside the parameter.  Here forward returns arguments in the strides that they
    have.
    """

    def __call__(self, graph: fx.Graph) -> None:
        end = graph.output_node()
        if PLACES in end.meta:
            results = enumerate(outputs_of(graph))
            given = {place for place, node in results if isinstance(node, fx.Node) and node.op == "placeholder"}
            end.meta[PLACES] = sorted({*end.meta[PLACES], *given})


class BeforeOthers(_Pass):
    """The first pass over a joint graph, and over one without a backward.

    It notes what eager mode keeps, before other passes change a joint graph.  It lays out a graph without a backward,
    which no partitioner sees.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def uuid(self) -> Any:
        return _parts.get_hash_for_files(FILES, self.settings.identity)

    def __call__(self, graph: fx.Graph) -> None:
        if any(map(is_gradient, graph.find_nodes(op="placeholder"))):
            passes.run(passes.Stage.TRACED, passes.JOINT, graph)
            return
        for stage in (passes.Stage.LAYOUT, passes.Stage.DIVIDED):
            passes.run(stage, passes.INFERENCE, graph, self.settings)
