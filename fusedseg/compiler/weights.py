"""Weights that Inductor keeps without a copy.

Inductor's layout optimization gives each convolution a weight in channels_last.  A weight that backward reads is
returned by forward, and of what forward returns Inductor chooses the strides.  So backward would get the copy, which
lives from forward to backward beside the parameter.  Here forward returns arguments in the strides that they have.
"""

from typing import Any

from torch import fx

from .. import _torch
from .joint import outputs_of
from .partition import FILES

_parts = _torch.compiler_parts()
# The note of Inductor on the output of a graph: the places of the results whose strides the user sees.
PLACES = "user_visible_output_idxs"


class WeightsAsTheyAre(_parts.CustomGraphPass):  # type: ignore[name-defined]
    """A pass of Inductor over the graph of forward.  It can be pickled, so that Inductor's caches work."""

    def uuid(self) -> Any:
        return _parts.get_hash_for_files(FILES)

    def __call__(self, graph: fx.Graph) -> None:
        end = next(node for node in reversed(graph.nodes) if node.op == "output")
        if PLACES in end.meta:
            results = enumerate(outputs_of(graph))
            given = {place for place, node in results if isinstance(node, fx.Node) and node.op == "placeholder"}
            end.meta[PLACES] = sorted({*end.meta[PLACES], *given})
