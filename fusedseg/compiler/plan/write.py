"""Writes a decision into a joint graph: backward gets copies of what it recomputes.

It notes the policies of nodes, which are those of a checkpoint, and ``partition.divide_along_policies`` writes them, so
that PyTorch's own partitioner divides the graph along them.
"""

import functools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from ..graph import POLICY, Joint, behind, call, copied, nodes_from
from . import recompute
from .decision import RECOMPUTE, SAVE, Decision, call_node

# For each kept value that is packed the call that unpacks it.
Unpacking = Mapping[fx.Node, tuple[Any, ...]]


def apply(
    joint: Joint, decided: Decision, packing: Sequence[fx.Node] = (), unpacking: Unpacking = MappingProxyType({})
) -> None:
    """Lets backward read what it recomputes and unpacks; ``decided`` gets its policies.  ``packing`` packs."""
    policies = decided.policies = dict.fromkeys(packing, SAVE)
    copies: dict[fx.Node, fx.Node] = {}
    for node in [node for node in joint.graph.nodes if node in decided.saved and node not in unpacking]:
        if node in joint.changeable:
            copies[node] = call(joint.graph, torch.ops.aten.clone.default, node, before=behind(node))
            policies[copies[node]] = SAVE
            continue
        policies.update((one, SAVE) for one in (node, call_node(node)) if POLICY not in one.meta)
    writer = _Writer(joint, decided, unpacking, copies)
    for reader in decided.backward:
        read = functools.partial(writer.read, before=reader)
        reader.args, reader.kwargs = fx.map_arg((reader.args, reader.kwargs), read)
    (returned,) = joint.end.args
    gradients = set(joint.gradients)
    joint.end.args = (
        fx.map_arg(returned, lambda n: writer.read(n, joint.end) if n in gradients and n not in joint.returned else n),
    )


class _Writer:
    """Gives backward the nodes that it reads."""

    def __init__(self, joint: Joint, decided: Decision, unpacking: Unpacking, copies: dict[fx.Node, fx.Node]) -> None:
        self.joint, self.graph, self.decided = joint, joint.graph, decided
        self.unpacking, self.copies = unpacking, copies
        self.made: dict[fx.Node, fx.Node] = {}

    def read(self, node: fx.Node, before: fx.Node) -> fx.Node:
        """What backward reads in place of a node of forward: the node itself, or a copy with other inputs."""
        node = self.decided.replacements.get(node, node)
        if node not in self.unpacking and node not in self.decided.recomputed:
            return self.copies.get(node, node)
        if node not in self.made:
            self.made[node] = self._recompute(node, before)
        return self.made[node]

    def _recompute(self, node: fx.Node, before: fx.Node) -> fx.Node:
        if node in self.unpacking:
            return self._noted(call(self.graph, *self.unpacking[node], before=before))
        other = recompute.recomputation_of(node)
        if other is not None:
            last = before.prev
            made = other.write(self.graph, functools.partial(self.read, before=before), before)
            for new in nodes_from(last.next, before):
                self._noted(new)
            return made
        whole = call_node(node)
        swapped = {source: self.read(source, before) for source in whole.all_input_nodes}
        if node not in self.joint.changeable and all(source is other for source, other in swapped.items()):
            return self._noted(node, whole)
        if node is whole:
            return self._noted(copied(self.graph, node, swapped, before))
        if whole not in self.made:
            self.made[whole] = self._noted(copied(self.graph, whole, swapped, before))
        return self._noted(copied(self.graph, node, {whole: self.made[whole]}, before))

    def _noted(self, node: fx.Node, *others: fx.Node) -> fx.Node:
        self.decided.policies.update(dict.fromkeys((node, *others), RECOMPUTE))
        return node
