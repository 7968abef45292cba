"""What forward keeps in 8 or 4 bits a value, for the option "bits".

``settled`` says which kept values are packed, and what must be exact beside them, by its readers (``branches.py``).

A value is rounded once.  Everything that backward recomputes from it is a copy that reads the unpacked value.  A
predicate about such a copy, x <= 0, is answered in forward from exact values, and takes one bit a value.
"""

import math
import operator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import fx

from ... import _torch
from ...ops.low_bit.spec import DTYPES, FEWEST_VALUES, SMOOTH_BITS, lines_of
from ...ops.max_pool.op import max_pool_op
from ..graph import (
    SMALL,
    Joint,
    Outputs,
    behind,
    is_dense,
    is_op,
    is_tensor,
    name_of,
    nbytes_of,
    node_at,
    op_of,
    reads_size_alone,
    row_of,
    size_of,
    tensors_of,
    value_of,
)
from ..op_table import EXACT, FIRST, LINEAR, NOT_SECOND, SMOOTH
from ..plan import nearly_free, recompute
from ..plan.keep import Decision, call_node, decide, decision_of, is_free, is_view, leave, sources_of
from ..plan.min_cut import ENDLESS, Flow
from .branches import (
    is_multiplication,
    is_predicate,
    kind_of,
    may_divide_by_zero,
    pointwise_chain_of,
    write_pointwise_chain,
)

# The most positions in a window that are packed.
MOST_POSITIONS = 1 << 7
# A value is rounded only if this saves so many times the bytes of the answers that it needs.
LEAST_GAIN = 2


@dataclass
class Rounded:
    """What is not kept as it is.

    Attributes:
        bits: for each kept node the bits of a value.
        kinks: for some of these nodes the norm that reads them and whose sign is exact.
        integers: the kept nodes with masks or small integers, and the bits of a value.
        branching: ops of backward with a branch, which must be written as pointwise chains before anything can be
            decided.
    """

    bits: dict[fx.Node, int] = field(default_factory=dict)
    kinks: dict[fx.Node, recompute.NormActForm] = field(default_factory=dict)
    integers: dict[fx.Node, int] = field(default_factory=dict)
    branching: set[fx.Node] = field(default_factory=set)


def _has_size(node: fx.Node) -> bool:
    """Whether a kept result of forward is large, and lies in memory without gaps."""
    large = node.op == "call_function" and is_tensor(node) and size_of(node) >= FEWEST_VALUES
    return large and not _torch.depends_on_data(value_of(node)) and is_dense(value_of(node))


def _positions(node: fx.Node) -> int:
    """How many numbers there are, if a node numbers positions in windows; otherwise 0."""
    pool: Any = node.args[0] if node.target is operator.getitem and node.args[1] == 1 else None
    return math.prod(pool.args[1]) if row_of(pool).positions else 0


def _is_statistic(node: fx.Node) -> bool:
    """Whether a node is a mean or 1/sqrt(var + eps) of a norm, which enters gradients as a power."""
    is_item = node.target is operator.getitem
    first = row_of(node.args[0] if is_item else node).statistics
    place: Any = node.args[1] if is_item else 0
    return first is not None and bool(place >= first)


def bits_of(node: fx.Node, bits: int) -> int:
    """In how many bits a value of a kept node is packed before its readers are asked; 0 if it stays as it is."""
    if not _has_size(node) or _is_statistic(node) or may_divide_by_zero(node):
        # Where a divisor is 0, a quotient is no number until a mask hides it.  A group of values with it has no grid.
        return 0
    if value_of(node).dtype in DTYPES:
        return bits
    if is_predicate(node):
        return 1
    return (_positions(node) - 1).bit_length() if 1 < _positions(node) <= MOST_POSITIONS else 0


class Known(NamedTuple):
    """What earlier passes over a graph have found.

    stuck: ops of backward with branches for which there is no pointwise chain.
    exact: values whose rounding saves too little for the answers that it needs.
    """

    stuck: set[fx.Node]
    exact: set[fx.Node]


class _Choice:
    def __init__(self, joint: Joint, found: Decision, bits: int, known: Known) -> None:
        self.joint, self.found, self.least, self.known = joint, found, bits, known
        self.rounded = Rounded()
        # The rounded values for which each answer is kept.
        self.answers: dict[fx.Node, set[fx.Node]] = {}
        self.predicates: dict[object, fx.Node] = {}
        self.own = set(found.reading)
        for node in found.kept:
            self._pack(node)

    def _pack(self, node: fx.Node) -> None:
        bits = 0 if node in self.joint.held or node in self.known.exact else bits_of(node, self.least)
        if bits:
            floating = value_of(node).dtype in DTYPES
            (self.rounded.bits if floating else self.rounded.integers)[node] = bits

    def _roots(self) -> dict[fx.Node, set[fx.Node]]:
        """For each node the packed ones from which backward has it, and those that its gradient depends on.

        ``near`` has those that the gradient of a norm depends on element by element, times a mean over many values.
        """
        roots: dict[fx.Node, set[fx.Node]] = {}
        self.near: dict[fx.Node, set[fx.Node]] = {}
        for node in self.joint.graph.nodes:
            if node in self.rounded.bits:
                roots[node] = {node}
            elif self._follows(node):
                followed = self._followed(node)
                roots[node] = set().union(*(roots.get(source, ()) for source in followed))
                # Where a result mixes values of many places, the rounding of one value hardly counts.
                mixes = row_of(node).compute_intensive
                if node in self.joint.backward and not mixes and not reads_size_alone(node):
                    self.near[node] = self._near(node, followed, roots)
        return {node: of for node, of in roots.items() if of}

    def _follows(self, node: fx.Node) -> bool:
        """Whether backward computes a value that can follow rounded ones."""
        computed = node in self.found.recomputed or node in self.own
        return computed and not is_predicate(node) and not self._is_mean(node)

    def _near(self, node: fx.Node, followed: list[fx.Node], roots: dict[fx.Node, set[fx.Node]]) -> set[fx.Node]:
        sources = self._sources(node)
        others = [source for source in sources if source not in followed and row_of(node).sign_of is None]
        return set().union(
            *(self.near.get(source, ()) for source in sources), *(roots.get(source, ()) for source in others)
        )

    def _is_mean(self, node: fx.Node) -> bool:
        """Whether a result of backward has the sum or mean of many values, on which one rounding hardly counts."""
        if node not in self.joint.backward or name_of(node) not in ("sum", "mean"):
            return False
        return size_of(node) * SMALL <= size_of(node.all_input_nodes[0])

    def _followed(self, node: fx.Node) -> list[fx.Node]:
        """The sources whose rounding a result follows, element by element."""
        sources = self._sources(node)
        if reads_size_alone(node):
            return []
        row = row_of(node)
        if node in self.joint.backward:
            if row.follows == NOT_SECOND:
                # The gradient of the input does not depend on the input.
                return [sources[0], *sources[2:]]
            if row.follows == FIRST or row.sign_of is not None:
                return sources[:1]
            if name_of(node) == "mul" and len(sources) == 2:
                # The same, as the compiler writes it.
                return [source for source in sources if size_of(source) * SMALL < size_of(node)] or sources
        return sources

    def _sources(self, node: fx.Node) -> list[fx.Node]:
        """What backward reads to compute a node."""
        instead = self.found.instead
        return self.found.recomputed.get(node) or [instead.get(source, source) for source in node.all_input_nodes]

    def settle(self) -> bool:
        """One pass over all that backward reads; whether it has changed the choice."""
        roots, changed = self._roots(), False
        for node in list(self.joint.graph.nodes):
            if not self._reads_rounded(node, roots):
                continue
            kind, of = self._demand(node, roots)
            if kind == SMOOTH:
                changed |= self._give_more_bits(of)
            elif kind == EXACT and node in self.found.recomputed:
                self._answer(node, of)
                return True
            elif kind == EXACT and of and node not in self.known.stuck:
                self.rounded.branching.add(node)
            elif kind == EXACT and of:
                self._keep_exact(of)
                return True
        return changed

    def _reads_rounded(self, node: fx.Node, roots: dict[fx.Node, set[fx.Node]]) -> bool:
        """Whether backward computes tensors of a node from rounded values; sizes are exact."""
        computed = node in self.found.recomputed or node in self.own
        if not computed or not tensors_of(node) or reads_size_alone(node):
            return False
        return any(source in roots for source in self._sources(node))

    def _demand(self, node: fx.Node, roots: dict[fx.Node, set[fx.Node]]) -> tuple[str, set[fx.Node]]:
        """How exact a node must be (``branches.py``), and the packed values for which this counts."""
        kind = self._kind(node, roots)
        if kind == LINEAR and is_multiplication(node):
            return SMOOTH, self._read_twice(node, roots)
        gradients = _gradients(node)
        of = set().union(*(roots.get(source, ()) for source in self._sources(node) if source not in gradients))
        # An op is linear in a gradient that it is given.
        return kind, of | self._read_twice(node, roots) if gradients else of

    def _give_more_bits(self, roots: set[fx.Node]) -> bool:
        """Smooth functions need ``SMOOTH_BITS``; whether some had fewer."""
        few = [root for root in roots if self.rounded.bits[root] < SMOOTH_BITS]
        self.rounded.bits.update(dict.fromkeys(few, SMOOTH_BITS))
        return bool(few)

    def _keep_exact(self, roots: set[fx.Node]) -> None:
        """Values that are not rounded after all."""
        for root in roots:
            del self.rounded.bits[root]
            self.rounded.kinks.pop(root, None)

    def _read_twice(self, node: fx.Node, roots: dict[fx.Node, set[fx.Node]]) -> set[fx.Node]:
        """The packed values of which more than one argument of a node follows."""
        return _twice([(roots.get(s, set()), self.near.get(s, set())) for s in self._sources(node)])

    def _kind(self, node: fx.Node, roots: dict[fx.Node, set[fx.Node]]) -> str:
        if self._has_exact_sign(node):
            return LINEAR
        recomputed = node in self.found.recomputed
        form = recompute.form_of(node) if recomputed else None
        if isinstance(form, recompute.BatchNorm) or (
            isinstance(form, recompute.NormActForm) and form.own and form.rstd is None
        ):
            return EXACT
        if form is not None:
            return LINEAR
        return kind_of(
            call_node(node) if recomputed else node, lambda source: self.found.instead.get(source, source) in roots
        )

    def _has_exact_sign(self, node: fx.Node) -> bool:
        """Whether the node asks for the sign of a value that is rebuilt with the right one."""
        source = _asked_for_its_sign(node)
        if source is None:
            return False
        if name_of(source) == "relu" and source in self.rounded.bits:
            # 0 is a value of the grid.
            return True
        source = _bent(source)
        norm = recompute.form_of(source) if source in self.found.recomputed else None
        if not isinstance(norm, recompute.NormActForm) or norm.mean is None or norm.rstd is None:
            return False
        x = norm.x
        while x not in self.rounded.bits and is_view(x):
            x = node_at(x, 0)
        if x not in self.rounded.bits or self.rounded.kinks.get(x, norm) != norm:
            return False
        value = value_of(x)
        kinks = value.shape[1] * (value.shape[0] if norm.of_samples else 1)
        if lines_of(value, kinks).S * kinks > value.numel():
            return False
        self.rounded.kinks[x] = norm
        return True

    def _answer(self, node: fx.Node, roots: set[fx.Node]) -> None:
        """Something that must read exact values is computed in forward: predicates of it, or its result.

        It reads these rounded values.
        """
        found = self.found
        if is_predicate(node):
            first = self.predicates.setdefault(_key_of(node), node)
            if first is not node:
                self._replace(node, first)
                return
        chain = None if is_predicate(node) or not is_op(node) else pointwise_chain_of(self.joint.graph, node)
        sources = found.recomputed[node]
        if chain is None or len(chain) != 1:
            del found.recomputed[node]
            found.kept.add(node)
            self.answers[node] = roots
            self._early(node)
            self._pack(node)
            leave(node, sources, found)
            return
        (result,) = chain
        self._add(result)
        found.recomputed[node] = sources
        self._replace(node, result)

    def _early(self, node: fx.Node) -> None:
        """Puts a result right behind its sources.  Where backward stood, they would live until the end of forward."""
        for source in node.all_input_nodes:
            if source.op == "call_function" and source not in self.joint.forward:
                self._early(source)
        sources = [source for source in node.all_input_nodes if source.op == "call_function"]
        if sources and node not in self.joint.forward:
            behind(max(sources)).prepend(node)

    def dear(self) -> set[fx.Node]:
        """The values whose rounding saves too little for the answers that it needs: a minimum cut.

        All answers of a value that is rounded are kept, each once.
        """
        flow, vertices = Flow(), dict[fx.Node, int]()
        for root in self.rounded.bits:
            vertices[root] = flow.vertex()
            flow.edge(0, vertices[root], nbytes_of(root) - self._kept_bytes(root))
        for answer, roots in self.answers.items():
            cost = LEAST_GAIN * self._kept_bytes(answer) if answer in self.found.kept else 0
            own = flow.vertex()
            flow.edge(own, 1, cost)
            for root in roots & vertices.keys():
                flow.edge(vertices[root], own, ENDLESS)
        flow.augment()
        paid = flow.after_the_start()
        return {root for root, vertex in vertices.items() if not paid[vertex]}

    def forget(self, dear: set[fx.Node]) -> None:
        """Max-pools of values that these alone made inexact run again, instead of picking values by positions."""
        for root in dear:
            del self.rounded.bits[root]
        roots = self._roots()
        for node in self.joint.graph.nodes:
            if node.target is max_pool_op._opoverload:
                x = node_at(node, 0)
                if x not in roots and (x in self.found.recomputed or x in self.found.kept):
                    node.meta.pop(recompute.ROUNDED, None)

    def _kept_bytes(self, node: fx.Node) -> int:
        bits = self.rounded.bits.get(node) or self.rounded.integers.get(node)
        return size_of(node) * bits // 8 if bits else nbytes_of(node)

    def _replace(self, node: fx.Node, other: fx.Node) -> None:
        """Backward reads another node of the same value."""
        found = self.found
        sources, readers = found.recomputed.pop(node), found.readers.pop(node, set())
        found.instead[node] = other
        found.readers.setdefault(other, set()).update(readers)
        for reader in readers:
            if reader in found.recomputed:
                found.recomputed[reader] = [other if source is node else source for source in found.recomputed[reader]]
        leave(node, sources, found)

    def _add(self, result: fx.Node) -> None:
        """The nodes of a pointwise chain are recomputed."""
        stack = [result]
        while stack:
            one = stack.pop()
            if one in self.found.recomputed or one in self.found.kept or is_free(one):
                continue
            self.found.recomputed[one] = list(one.all_input_nodes)
            for source in one.all_input_nodes:
                self.found.readers.setdefault(source, set()).add(one)
                stack.append(source)


def _gradients(node: fx.Node) -> set[fx.Node]:
    """The gradients that an op of backward is given.  PyTorch's schemas name them so."""
    if not is_op(node):
        return set()
    pairs = zip(op_of(node)._schema.arguments, node.args, strict=False)
    return {given for argument, given in pairs if argument.name.startswith("grad") and isinstance(given, fx.Node)}


def _twice(factors: list[tuple[set[fx.Node], set[fx.Node]]]) -> set[fx.Node]:
    """The roots of one factor that are roots of another one, or near to it."""
    found: set[fx.Node] = set()
    for place, (roots, near) in enumerate(factors):
        for others, near_others in factors[:place]:
            found |= (roots & others) | (near & others) | (roots & near_others)
    return found


def _asked_for_its_sign(node: fx.Node) -> fx.Node | None:
    """The argument whose sign a node asks for; None if there is none, or if it compares with another number than 0."""
    name, place = name_of(node), row_of(node).sign_of
    if place is None or (name in ("le", "gt") and node.args[1] != 0):
        return None
    if name == "threshold_backward" and node.args[2] != 0:
        return None
    return node_at(node, place)


def _bent(node: fx.Node) -> fx.Node:
    """The argument of an activation that does not change signs, or the node itself."""
    while row_of(node).keeps_sign:
        slope = node.args[1] if len(node.args) > 1 else 1
        if not isinstance(slope, (int, float)) or slope <= 0:
            break
        node = node_at(node, 0)
    return node


def _key_of(predicate: fx.Node) -> object:
    """What is equal for two predicates with the same answer: relu(x) <= 0 and x <= 0.

    A value that a cast to 16 bits would round to 0 counts with its own sign.
    """
    source, *rest = predicate.args
    if isinstance(source, fx.Node) and name_of(predicate) in ("le", "gt") and rest == [0]:
        while (before := _with_its_sign(source)) is not source:
            source = before
    return predicate.target, source, *rest


def _with_its_sign(node: fx.Node) -> fx.Node:
    """What a node has its sign from: the argument of an activation, as the compiler writes it too, or of a cast."""
    if name_of(node) in ("convert_element_type", "_to_copy") and value_of(node).is_floating_point():
        source = node_at(node, 0)
        return source if value_of(source).is_floating_point() else node
    if name_of(node) != "where" or not all(isinstance(argument, fx.Node) for argument in node.args):
        return _bent(node)
    # leaky_relu: where(x > 0, x, slope * x)
    asked, x, scaled = (node_at(node, place) for place in range(3))
    if name_of(asked) != "gt" or name_of(scaled) != "mul" or asked.args != (x, 0) or scaled.args[0] is not x:
        return node
    slope = scaled.args[1]
    return x if isinstance(slope, (int, float)) and slope > 0 else node


def _choose(joint: Joint, found: Decision, bits: int, known: Known) -> Rounded:
    """In how many bits each kept node is kept; ``found`` is changed where something must be exact.

    A value whose rounding is too dear becomes a known one, and what follows from it alone is as without bits.
    """
    choice = _Choice(joint, found, bits, known)
    while choice.settle():
        pass
    if not choice.rounded.branching and (dear := choice.dear()):
        known.exact.update(dear)
        choice.forget(dear)
    return choice.rounded


def settled(
    graph: fx.Graph, outputs: Outputs, bits: int, chosen: Decision | None = None
) -> tuple[Joint, Decision, Rounded]:
    """What is kept, and in how many bits; ops of backward with branches become pointwise chains where they need exact
    values.

    chosen: what backward recomputes, where a budget has chosen it.
    """
    known = Known(set(), set())
    before = set(graph.nodes)
    while True:
        joint = Joint(graph, outputs)
        if chosen is None:
            decided = decide(joint, nearly_free.scores)
        else:
            chains = {node for node in graph.nodes if node not in before and sources_of(node, joint) is not None}
            decided = decision_of(joint, chains.union(chosen.recomputed))
            decided.goal = chosen.goal
        exact = len(known.exact)
        found = _choose(joint, decided, bits, known)
        if not found.branching and len(known.exact) == exact:
            return joint, decided, found
        # In the order of the graph, so that nodes have the same names in every process, which caches ask for.
        branching = [node for node in graph.nodes if node in found.branching]
        known.stuck.update(node for node in branching if not write_pointwise_chain(graph, node))
        graph.eliminate_dead_code()
