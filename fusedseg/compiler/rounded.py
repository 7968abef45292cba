"""What forward keeps in 8 or 4 bits a value, for the option "bits".

    choose   which kept values are packed and what must be exact beside them, by its readers (``branches.py``)
    Storage  the nodes that pack in forward and unpack in backward

A value is rounded once.  Everything that backward computes again from it is a copy that reads the unpacked value.  A
question about such a copy, x <= 0, is answered in forward from exact values, and takes one bit a value.
"""

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..ops.low_bit import graph as ops
from ..ops.low_bit.op import unpack_op
from ..ops.low_bit.spec import is_dense, lines_of
from ..ops.recompute.cheap import size_of
from ..ops.recompute.packed import DTYPES, FEWEST_VALUES, SMOOTH_BITS
from ..ops.recompute.registry import SMALL
from . import forms
from .branches import EXACT, LINEAR, PRODUCTS, SMOOTH, chain_of, is_question, kind_of
from .joint import Joint, call, is_op, is_tensor, name_of, value_of
from .keep import AGAIN, KEEP, LABEL, Plan, call_node, is_free, is_view, leave

BENDS = ("relu", "leaky_relu")  # they bend at 0 and do not change signs


@dataclass
class Rounded:
    """What is not kept as it is.

    Attributes:
        bits: for each kept node the bits of a value.
        kinks: for some of these nodes the norm that reads them and whose sign is exact.
        masks: the kept nodes that are true or false for each element.
    """

    bits: dict[fx.Node, int] = field(default_factory=dict)
    kinks: dict[fx.Node, forms.BatchNorm] = field(default_factory=dict)
    masks: set[fx.Node] = field(default_factory=set)


def _has_size(node: fx.Node) -> bool:
    """Whether a kept result of forward is large, and lies in memory without gaps."""
    if node.op != "call_function" or not is_tensor(node):
        return False
    value = value_of(node)
    if any(isinstance(n, torch.SymInt) for n in (*value.shape, *value.stride())):
        return False
    return value.numel() >= FEWEST_VALUES and is_dense(tuple(value.shape), value.stride())


class _Choice:
    def __init__(self, joint: Joint, found: Plan, bits: int) -> None:
        self.joint, self.found, self.least = joint, found, bits
        self.rounded = Rounded()
        self.questions: dict[Any, fx.Node] = {}
        self.own = set(found.reading)
        for node in found.kept:
            self._pack(node)

    def _pack(self, node: fx.Node) -> None:
        if node in self.joint.returned or not _has_size(node):
            return
        if value_of(node).dtype in DTYPES:
            self.rounded.bits[node] = self.least
        elif is_question(node):
            self.rounded.masks.add(node)

    def _roots(self) -> dict[fx.Node, set[fx.Node]]:
        """For each node the packed ones from which backward has it, and those that its gradient depends on."""
        roots: dict[fx.Node, set[fx.Node]] = {}
        for node in self.joint.graph.nodes:
            if node in self.rounded.bits:
                roots[node] = {node}
            elif (node in self.found.again or node in self.own) and not is_question(node):
                roots[node] = set().union(*(roots.get(source, ()) for source in self._followed(node)))
        return {node: of for node, of in roots.items() if of}

    def _followed(self, node: fx.Node) -> list[fx.Node]:
        """The sources whose rounding a result follows, element by element."""
        sources = self._sources(node)
        if node in self.joint.backward:
            if name_of(node) == "convolution_backward":
                # The gradient of the input does not depend on the input.
                return [sources[0], *sources[2:]]
            if name_of(node).endswith("norm_backward"):
                # It does, times a mean over many values.
                return sources[:1]
            if name_of(node) == "mul" and len(sources) == 2:
                # The same, as the compiler writes it.
                return [source for source in sources if size_of(source) * SMALL < size_of(node)] or sources
        return sources

    def _sources(self, node: fx.Node) -> list[fx.Node]:
        """What backward reads to compute a node."""
        instead = self.found.instead
        return self.found.again.get(node) or [instead.get(source, source) for source in node.all_input_nodes]

    def settle(self) -> bool:
        """One pass over all that backward reads; whether it has changed the choice."""
        roots, bits, changed = self._roots(), self.rounded.bits, False
        for node in list(self.joint.graph.nodes):
            again = node in self.found.again
            read = [roots[source] for source in self._sources(node) if source in roots]
            if not read or not (again or node in self.own):
                continue
            kind, of = self._kind(node, again, roots), set().union(*read)
            if kind == LINEAR and name_of(node) in PRODUCTS:
                kind, of = SMOOTH, _twice(read)
            if kind == SMOOTH:
                few = [root for root in of if bits[root] < SMOOTH_BITS]
                bits.update(dict.fromkeys(few, SMOOTH_BITS))
                changed |= bool(few)
            elif kind == EXACT and again:
                self._answer(node)
                return True
            elif kind == EXACT:
                for root in of:
                    del bits[root]
                    self.rounded.kinks.pop(root, None)
                return True
        return changed

    def _kind(self, node: fx.Node, again: bool, roots: dict[fx.Node, set[fx.Node]]) -> str:
        if self._has_exact_sign(node):
            return LINEAR
        form = forms.form_of(node) if again else None
        if isinstance(form, forms.BatchNorm):
            return LINEAR if form.rstd is not None else EXACT
        if form is not None:
            return LINEAR
        return kind_of(
            call_node(node) if again else node, lambda source: self.found.instead.get(source, source) in roots
        )

    def _has_exact_sign(self, node: fx.Node) -> bool:
        """Whether the node asks for the sign of a value that is rebuilt with the right one."""
        asks = name_of(node) in ("le", "gt") and node.args[1] == 0
        if not asks and name_of(node) not in BENDS:
            return False
        source: Any = node.args[0]
        if name_of(source) == "relu" and source in self.rounded.bits:
            # 0 is a value of the grid.
            return True
        source = _bent(source)
        norm = forms.form_of(source) if source in self.found.again else None
        if not isinstance(norm, forms.BatchNorm) or norm.rstd is None:
            return False
        x = norm.x
        while x not in self.rounded.bits and is_view(x):
            x = x.args[0]  # type: ignore[assignment]
        if x not in self.rounded.bits or self.rounded.kinks.get(x, norm) != norm:
            return False
        value, channels = value_of(x), value_of(norm.mean).numel()
        if channels % value.shape[1] or lines_of(value, channels).S * channels > value.numel():
            return False
        self.rounded.kinks[x] = norm
        return True

    def _answer(self, node: fx.Node) -> None:
        """Something that must read exact values is computed in forward: questions of it, or its result."""
        found = self.found
        if is_question(node):
            first = self.questions.setdefault(_asked(node), node)
            if first is not node:
                self._replace(node, first)
                return
        chain = None if is_question(node) or not is_op(node) else chain_of(self.joint.graph, node)
        sources = found.again[node]
        if chain is None or len(chain) != 1:
            del found.again[node]
            found.kept.add(node)
            if is_question(node) and len(node.all_input_nodes) == 1:
                # It may come from backward; here its source need not live until then.
                _after(node.all_input_nodes[0]).prepend(node)
            self._pack(node)
            leave(node, sources, found)
            return
        (result,) = chain
        self._add(result)
        found.again[node] = sources
        self._replace(node, result)

    def _replace(self, node: fx.Node, other: fx.Node) -> None:
        """Backward reads another node of the same value."""
        found = self.found
        sources, readers = found.again.pop(node), found.readers.pop(node, set())
        found.instead[node] = other
        found.readers.setdefault(other, set()).update(readers)
        for reader in readers:
            if reader in found.again:
                found.again[reader] = [other if source is node else source for source in found.again[reader]]
        leave(node, sources, found)

    def _add(self, result: fx.Node) -> None:
        """The nodes of a chain are computed again."""
        stack = [result]
        while stack:
            one = stack.pop()
            if one in self.found.again or one in self.found.kept or is_free(one):
                continue
            self.found.again[one] = list(one.all_input_nodes)
            for source in one.all_input_nodes:
                self.found.readers.setdefault(source, set()).add(one)
                stack.append(source)


def _twice(sets: list[set[fx.Node]]) -> set[fx.Node]:
    """What is in more than one of some sets."""
    return set().union(*(one & other for place, one in enumerate(sets) for other in sets[:place]))


def _bent(node: Any) -> Any:
    """The argument of an activation that does not change signs, or the node itself."""
    while name_of(node) in BENDS and (len(node.args) < 2 or node.args[1] > 0):
        node = node.args[0]
    return node


def _asked(question: fx.Node) -> Any:
    """What is equal for two questions with the same answer: relu(x) <= 0 and x <= 0."""
    source, *rest = question.args
    if name_of(question) in ("le", "gt") and rest == [0]:
        source = _bent(source)
    return question.target, source, *rest


def choose(joint: Joint, found: Plan, bits: int) -> Rounded:
    """Decides in how many bits each kept node is kept; ``found`` is changed where something must be exact."""
    choice = _Choice(joint, found, bits)
    while choice.settle():
        pass
    return choice.rounded


class Storage:
    """The nodes that pack, right after a value is computed, and those that unpack, before its first reader."""

    def __init__(self, graph: fx.Graph, rounded: Rounded, seed: int) -> None:
        self.graph = graph
        self.packed: dict[fx.Node, Any] = {}
        self.made: dict[fx.Node, fx.Node] = {}
        first = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
        order = [node for node in graph.nodes if node in rounded.bits or node in rounded.masks]
        key = call(graph, ops.rounding_key._opoverload, seed, before=first) if rounded.bits else None
        for place, node in enumerate(order):
            after, stride = _after(node), list(value_of(node).stride())
            if node in rounded.masks:
                self.packed[node] = _keep(call(graph, ops.bits_pack._opoverload, node, stride, before=after))
                continue
            bits, kink = rounded.bits[node], None
            if node in rounded.kinks:
                norm = rounded.kinks[node]
                after = _after(call_node(norm.mean))  # type: ignore[arg-type]
                of_norm = (norm.mean, norm.rstd, norm.weight, norm.bias, value_of(norm.mean).numel())
                kink = _keep(call(graph, ops.norm_kink._opoverload, *of_norm, before=after))
            given = (node, bits, key, place, kink, stride)
            codes = _keep(call(graph, ops.round_op._opoverload, *given, before=after))
            results = [_keep(call(graph, operator.getitem, codes, k, before=after)) for k in range(3)]
            self.packed[node] = (*results, kink, bits)

    def read(self, node: fx.Node, before: fx.Node) -> fx.Node:
        """The unpacked value of a node, for a reader in backward."""
        if node not in self.made:
            value, packed = value_of(node), self.packed[node]
            form = (list(value.shape), list(value.stride()))
            if isinstance(packed, fx.Node):
                made = call(self.graph, ops.bits_unpack._opoverload, packed, *form, before=before)
            else:
                made = call(self.graph, unpack_op._opoverload, *packed, *form, before=before)
            made.meta[LABEL] = AGAIN
            self.made[node] = made
        return self.made[node]


def _keep(node: fx.Node) -> fx.Node:
    node.meta[LABEL] = KEEP
    return node


def _after(node: fx.Node) -> fx.Node:
    """The node before which the value is packed: right behind it and its other results."""
    after = node.next
    while after.target is operator.getitem or after.op == "placeholder":
        after = after.next
    return after
