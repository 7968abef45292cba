"""The registry and the rules of a scope with ``bits`` and a budget.

A call runs twice only if it reads exact values: the network's input, or what follows cheaply from the input.  Then its
output is exact too.  A call of rounded values would give a rounded output.  Its values are right on average, but their
signs and kinks are not, and norms in place and fused norms need these.  So in most networks the first convolutions are
chosen, which have large outputs for little arithmetic, and all other tensors are packed.

The graph of the step has packed bytes as the bytes of a tensor.  The values that are unpacked in backward are among the
other bytes that ``guide.Weigh`` counts.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from ..low_bit.spec import Packed
from . import recipes, twice
from .budgeted import BudgetRegistry
from .choice import Call
from .graph import Graph
from .guide import Guide
from .offers import Held, Linked, Offer
from .packed import PackedData, PackingRegistry, Rounding, packed_bytes
from .packing import PACKING_RULES
from .plain import Place, is_trained_leaf
from .replay import Node
from .saved import EXACT, Data, Hooks


class PackedBudgetRegistry(BudgetRegistry, PackingRegistry):
    """The registry of a scope with ``bits`` and a budget."""

    def __init__(self, outer: Hooks | None, guide: Guide, rounding: Rounding) -> None:
        PackingRegistry.__init__(self, outer, rounding)
        self.guide, self.graph, self.packed = guide, Graph(), None
        # What is packed, and the nodes of it.
        self._nodes: list[tuple[weakref.ref[PackedData], int]] = []

    def called(
        self,
        call: Call,
        out: Tensor,
        again: Callable[..., Tensor] | None,
        tensors: Sequence[Tensor],
        sources: Sequence[Tensor | Data] | None = None,
    ) -> None:
        index = len(self.graph.calls)
        exact = again is not None and all(map(self._is_exact, sources or tensors))
        super().called(call, out, again if exact else None, tensors, sources)
        node = self.graph.of_call[index]
        if node is not None:
            nbytes = packed_bytes(out, self.rounding.bits)
            self.graph.nodes[node] = self.graph.nodes[node]._replace(nbytes=nbytes)

    def called_ours(self, *call: Any) -> None:
        # When a convolution with its norm in place ran twice, more was kept: 633 MiB in place of 407 for a 3D U-Net.
        name, options, out, _, *rest = call
        super().called_ours(name, options, out, None, *rest)

    def _is_exact(self, t: Tensor | Data) -> bool:
        """Whether the value of an argument is exact in backward, without another call that runs twice."""
        if isinstance(t, Data) or t.dim() < 2 or is_trained_leaf(t):
            return True
        known = self.known(t)
        return _is_exact(known) if isinstance(known, Offer) else isinstance(known, Data)

    def has_recipe(self, x: Tensor) -> bool:
        # A norm in place reads the sign of its output.
        memory = self._find(x.untyped_storage())
        offer = None if memory is None else memory.offer_of(Place.of(x), x._version)
        return offer is not None and offer.bits >= EXACT

    def packs_anew(self, t: Tensor, overwritten: bool) -> bool:
        # The guide counts the values that backward unpacks, so no op reads codes.
        return False

    def _keep(self, t: Tensor, at: Place, memory: Any) -> Any:
        kept = PackingRegistry._keep(self, t, at, memory)
        nodes, nbytes = self.graph.nodes, t.untyped_storage().nbytes()
        if kept.node >= 0:
            return kept
        if isinstance(kept, Data):
            if memory.node < 0:
                memory.node = self.graph.add(Node(nbytes))
            nodes[memory.node] = nodes[memory.node]._replace(nbytes=nbytes)
            kept.node = memory.node
            return kept
        return self._noted(kept, memory)

    def keep_packed(self, t: Tensor, packed: Packed) -> PackedData:
        return self._noted(super().keep_packed(t, packed), self._memory(t.untyped_storage()))

    def _noted(self, kept: PackedData, memory: Any) -> PackedData:
        # The node of a call stands for its output, if the call does not run twice.
        is_output = memory.node >= 0 and self.graph.nodes[memory.node].call >= 0
        kept.node = memory.node if is_output else self.graph.add(Node(0))
        self._nodes.append((weakref.ref(kept), kept.node))
        return kept

    def finish(self) -> None:
        for ref, node in self._nodes:
            kept = ref()
            if kept is not None:
                self.graph.nodes[node] = self.graph.nodes[node]._replace(nbytes=kept.nbytes)
        super().finish()


def _is_exact(source: Any) -> bool:
    """Whether the value of an input of a recipe is exact, without a call that runs twice."""
    if isinstance(source, Linked):
        return isinstance(source._source(), Data)
    if isinstance(source, Held):
        # A large one may be packed.
        return not source.extra
    return not source.is_call and all(_is_exact(of) for of, _ in source.inputs)


# The rules of a scope with ``bits`` and a budget.
PACKED_BUDGET_RULES: dict[Any, Any] = PACKING_RULES | {
    func: partial(twice.rule, stock=PACKING_RULES.get(func)) for func in twice.FUNCTIONS
}
recipes.REGISTRIES.add(PackedBudgetRegistry)
