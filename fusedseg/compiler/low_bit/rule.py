"""The rule of what backward may compute from packed values: the column ``reads`` of ``op_table.py`` in a graph.

A value that backward computes is exact, or a *copy*: it follows packed values, its *roots*.  docs/low_bits.md has the
bound of each error, and its proof.

* **Copies** read copies by FOLLOWS, by FACTOR with a number or a vector of parameters, by INTERPOLATES if it enlarges,
  and by ADDS if the terms follow different layers.  SLOPE, CHOOSES and crops read *sized* copies, of which a norm has
  set the size.  A function with a kink follows if the side is known exactly.
* **Ends** are convolutions and matrix products with a weight.  They read copies for the weight's gradient.
* **Segments** are the gradients between ends.  Batch, instance and group norms read packed values, and activations
  sized copies, where all factors of the segment are *steady*: numbers, parameters, slopes, and 1 / sqrt(var + eps) of
  such norms.  Elsewhere they read exact values.  A norm reads 4 bits if its gradient follows from those of ends by
  functions that are linear beside kinks, and 8 bits otherwise.

The words in the graph of conv -> norm -> relu -> conv, with the gradient dz of its result::

    x = conv(image)              a root: forward packs it, and backward reads what it unpacks
    n = norm(x), y = relu(n)     copies, of which x is the root; both are sized
    dy, dw = conv'(dz, y)        an end: dw alone reads the copy y, so dy is exact; dy is plain
    dn = relu'(dy, y)            piecewise linear: it asks for the sign of y, which packing keeps; dn is plain too
    dx = norm'(dn, x)            dy, dn and dx are a segment without an unsteady factor, so it reads x, in 4 bits
    dw = conv'(dx, image)        an end, where the segment ends
"""

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...ops.layout import layout_of
from ...ops.low_bit.spec import SMOOTH_BITS, lines_of
from ...ops.norm.graph import GradientCall, NormCall
from ..graph import Joint, calls_view, hinted, is_op, is_tensor, name_of, node_at, row_of, size_of, value_of
from ..op_table import ADDS, CHOOSES, FACTOR, FIRST, FOLLOWS, FORM, INTERPOLATES, KEEPS, LINEAR, NORM, ROWS, SLOPE, SUM
from ..plan import recompute
from ..plan.decision import SMALL, Decision, call_node, is_view

# Gradients of activations that are linear between kinks.
PIECEWISE_LINEAR = {row.backward for row in ROWS if row.backward and row.reads == FOLLOWS}
# Gradients of activations, whose slopes are bounded.
OF_ACTIVATIONS = {row.backward for row in ROWS if row.backward}


def is_predicate(node: fx.Node) -> bool:
    """Whether the result of a node is true or false for each element."""
    return is_tensor(node) and value_of(node).dtype == torch.bool


def is_piecewise_linear(node: fx.Node) -> bool:
    """Whether a node is linear between kinks, or the gradient of an activation that is."""
    row = row_of(node)
    return row.pieces is not None or (bool(row.kinks) and row.reads == FOLLOWS) or name_of(node) in PIECEWISE_LINEAR


def _covers(window: tuple[Any, ...]) -> bool:
    """Whether windows of a pool leave no value out, so that none is far larger than the results around it."""
    size, step, _, dilation, *_ = window
    return all(map(operator.le, step, size)) and max(dilation) == 1


def _keeps_planes(node: fx.Node, source: fx.Node) -> bool:
    """Whether each plane of a copy follows a whole plane of a source."""
    if is_view(node):
        forms = [(v.shape[:2], v.stride()[:2], v.numel()) for v in map(hinted, map(value_of, (node, source)))]
        return forms[0] == forms[1]
    row = row_of(node)
    return size_of(source) <= size_of(node) and (row.layout == KEEPS or row.reads == ADDS or row.copies)


@dataclass
class Packed:
    """How a kept tensor is packed.  Masks and small integers have bits alone.

    Attributes:
        bits: the bits of a value.
        unit: the unit of its groups (``ops/low_bit/spec.py``).
        sign: what has an exact sign: a norm that reads the tensor, or the tensor itself; None if nothing asks for it.
        needed_by: the op that reads more bits than were asked for; "" without one.
    """

    bits: int
    unit: str = ""
    sign: "recompute.Norm | fx.Node | None" = None
    needed_by: str = ""

    def unit_for(self, norm_of_samples: bool) -> str:
        """The unit once such a norm reads the tensor too: planes, if any of its norms has statistics of samples."""
        return "plane" if norm_of_samples or self.unit == "plane" else "batch"

    def __str__(self) -> str:
        why = f" ({self.needed_by} reads them)" if self.needed_by else ""
        return f"{self.bits} bit{'s' if self.bits > 1 else ''}{why}"


class Facts:
    """What is known of a graph before anything is packed.

    Attributes:
        layers: for each value the last layers with weights, and arguments, that it follows.
        of_arguments: the values that follow arguments alone, without such a layer: parameters, and the network's input.
        sized: the values of forward of which norms have set the size.
        plain: the gradients that ends have made, and what follows from these by functions that are linear beside kinks.
        unsteady: the gradients of segments with an unsteady factor.
    """

    def __init__(self, joint: Joint) -> None:
        self.joint = joint
        self.layers: dict[fx.Node, frozenset[fx.Node]] = {}
        self.of_arguments, self.sized, self.plain = set[fx.Node](), set[fx.Node](), set[fx.Node]()
        self.note(list(joint.graph.nodes))
        self.unsteady = self._of_unsteady_segments()

    def note(self, nodes: list[fx.Node]) -> None:
        """Notes nodes, each of which stands behind its sources; those that are new belong to forward."""
        for node in nodes:
            is_argument = node.op != "call_function"
            is_layer = is_argument or row_of(node).compute_intensive
            before = [self.layers[source] for source in node.all_input_nodes]
            self.layers[node] = frozenset({node}) if is_layer else frozenset[fx.Node]().union(*before)
            if is_argument or (is_op(node) and not is_layer and self.of_arguments.issuperset(node.all_input_nodes)):
                self.of_arguments.add(node)
        for node in nodes:
            if node not in self.joint.backward:
                if self._is_sized(node):
                    self.sized.add(node)
            elif self._is_end(node) or (self._is_linear_beside_kinks(node) and self.follows_ends(node)):
                self.plain.add(node)

    def _is_constant(self, value: fx.Node) -> bool:
        """Whether a value follows nothing, or is an integer or a predicate."""
        return not self.layers[value] or (is_tensor(value) and not value_of(value).is_floating_point())

    def _is_sized(self, node: fx.Node) -> bool:
        """Whether a norm or a bounded function has set the size of a value: no input of the graph makes it large."""
        row, norm = row_of(node), NormCall.of(node)
        if row.bounded:
            return norm is None or bool(norm.norm.own)
        sources = [source for source in node.all_input_nodes if not self._is_constant(source)]
        if row.reads == SUM:
            sources = [source for source in sources if source in self.sized or source not in self.of_arguments]
        follows = calls_view(node) or not is_op(node) or row.reads in (*LINEAR, SLOPE, SUM)
        is_product = row.reads == FACTOR and sources == [node.args[0]]
        is_known = follows or is_product or row.positions
        return is_known and bool(sources) and self.sized.issuperset(sources)

    def _is_end(self, node: fx.Node) -> bool:
        """Whether a gradient is a result of a convolution or matrix product with a weight."""
        return self.read_exactly(call_node(node)) is not None

    def read_exactly(self, node: fx.Node) -> list[fx.Node] | None:
        """What an end reads for other gradients than that of a weight; None for another op."""
        of_forward = [source for source in node.all_input_nodes if source not in self.joint.backward]
        if row_of(node).reads != SUM:
            return None
        if name_of(node) == "convolution_backward":
            # The second result is the gradient of the weight.  The first one reads the weight.
            is_last = all(self.is_returned(user) for user in node.users if user.args[1] == 1)
            weight = node_at(node, 2)
            return None if weight not in self.of_arguments else [weight] if is_last else of_forward
        if self.is_returned(node):
            return []
        return of_forward if self.of_arguments.intersection(of_forward) else None

    def follows_ends(self, node: fx.Node) -> bool:
        """Whether all gradients that a node reads are plain."""
        gradients = self.joint.backward.intersection(node.all_input_nodes)
        return bool(gradients) and self.plain.issuperset(gradients)

    def is_linear(self, node: fx.Node) -> bool:
        """Whether a node is linear in what it reads, but for sizes, positions, and steady factors."""
        row = row_of(node)
        if row.reads != FACTOR:
            return calls_view(node) or not is_op(node) or (row.reads in LINEAR and not row.kinks)
        factors = node.args[:2] if row.commutative else node.args[1:2]
        return "rounding_mode" not in node.kwargs and any(self._is_steady_factor(factor, node) for factor in factors)

    def _is_linear_beside_kinks(self, node: fx.Node) -> bool:
        return self.is_linear(node) or is_piecewise_linear(node)

    def _is_steady_factor(self, factor: Any, product: fx.Node) -> bool:
        """Whether a factor is a number, or a vector of parameters that is much smaller than the product.

        What follows from the network's input follows from arguments too, and differs from position to position.
        """
        if not is_tensor(factor):
            return True
        is_vector = size_of(factor) == max(hinted(value_of(factor)).shape, default=1)
        return is_vector and size_of(factor) * SMALL <= size_of(product) and factor in self.of_arguments

    def is_returned(self, node: fx.Node) -> bool:
        """Whether linear ops alone read a node, and nothing reads the last ones."""
        return all(user.op == "output" or (self.is_linear(user) and self.is_returned(user)) for user in node.users)

    def _is_steady(self, node: fx.Node) -> bool:
        """Whether a gradient is linear in those it reads, with steady factors, or the gradient of a parameter."""
        if self._is_linear_beside_kinks(node) or row_of(node).reads == NORM or name_of(node) in OF_ACTIVATIONS:
            return True
        return name_of(node) == "mul" and self.is_returned(node)

    def _of_unsteady_segments(self) -> set[fx.Node]:
        """The gradients that are joined to an unsteady one without an end between them."""
        between = {node for node in self.joint.backward if not self._is_end(node)}
        found, stack = set[fx.Node](), [node for node in between if not self._is_steady(node)]
        while stack:
            node = stack.pop()
            if node not in found:
                found.add(node)
                stack += between.intersection(node.users)
                stack += self.joint.backward.intersection(node.all_input_nodes) if node in between else ()
        return found


class Rule:
    """One pass over a graph.

    Attributes:
        found: what is recomputed.
        packed: how kept nodes are packed; what their readers need is noted there.
        branching: ops of backward that must be written as pointwise chains before anything can be decided.
        roots: for each copy its roots.
    """

    def __init__(self, facts: Facts, found: Decision, packed: dict[fx.Node, Packed]) -> None:
        self.facts, self.found, self.packed = facts, found, packed
        self.branching: set[fx.Node] = set()
        self.own = set(found.backward)
        self.roots: dict[fx.Node, set[fx.Node]] = {}

    def broken(self) -> set[fx.Node]:
        """The values that must be exact where the rule is broken first: roots, and values that are recomputed."""
        return next(filter(None, map(self._visit, self.facts.joint.graph.nodes)), set())

    def _visit(self, node: fx.Node) -> set[fx.Node]:
        if node in self.packed and value_of(node).is_floating_point():
            self.roots[node] = {node}
            return set()
        copied = self._of(self._sources(node))
        if not copied:
            return set()
        if node in self.facts.joint.backward:
            return self._gradient(node, copied)
        if is_predicate(node) and self._has_exact_sign(node):
            return set()
        exact = self._copy(node, copied)
        if node in exact and node not in self.found.recomputed:
            return copied
        self.roots[node] = copied
        return exact

    def _sources(self, node: fx.Node) -> list[fx.Node]:
        """What backward reads the values of to compute a node."""
        is_needed = node in self.own or (node in self.found.recomputed and node in self.found.readers)
        if not is_needed or not size_of(node) or row_of(node).reads == FORM:
            return []
        if row_of(node).reads == FIRST:
            return [self._read(node_at(node, 0))]
        return self.found.recomputed.get(node) or [self._read(source) for source in node.all_input_nodes]

    def _read(self, source: Any) -> Any:
        return self.found.replacements.get(source, source)

    def _of(self, copies: Iterable[fx.Node]) -> set[fx.Node]:
        return set().union(*(self.roots.get(copy, ()) for copy in copies))

    def _copy(self, node: fx.Node, copied: set[fx.Node]) -> set[fx.Node]:
        """What must be exact so that a value may follow copies."""
        made, other = call_node(node), recompute.recomputation_of(node) if node in self.found.recomputed else None
        if isinstance(other, recompute.Norm) and (other.rstd is not None or not other.norm.own):
            return set() if other.rstd is None else self._norm(made, other.x)
        if isinstance(other, recompute.MaxPool) and (_covers(other.window) or self._reads_sized(node)):
            return set()
        row = row_of(made)
        if is_tensor(node) and not value_of(node).is_floating_point():
            return {node}
        if row.reads == SLOPE and self._reads_sized(node):
            self._give_more_bits(copied, node)
            return set()
        is_linear = self.facts.is_linear(made) and not self._may_be_small(node)
        return set() if is_linear or (row.reads == FOLLOWS and self._has_exact_sign(node)) else {node}

    def _reads_sized(self, node: fx.Node) -> bool:
        return all(source in self.facts.sized for source in self._sources(node) if source in self.roots)

    def _may_be_small(self, node: fx.Node) -> bool:
        """Whether a linear result, or what a kink leaves of it, may be small beside the steps of what it follows.

        Such are means, x - mean(x), whose terms follow the same layer, x - 1.5 before a ReLU, and what a choice or a
        crop leaves of values of any size.
        """
        made = call_node(node)
        reads, terms = row_of(made).reads, [*filter(is_tensor, made.all_input_nodes)]
        if reads == ADDS:
            return len(terms) < 2 or not self.facts.layers[terms[0]].isdisjoint(self.facts.layers[terms[1]])
        is_part = size_of(node) < size_of(terms[0])
        if reads == FIRST or (reads == INTERPOLATES and is_part):
            return True
        return (is_part or reads == CHOOSES) and not self._reads_sized(node)

    def _norm(self, norm: fx.Node, x: fx.Node) -> set[fx.Node]:
        """What must be exact, or packed, so that a norm or its gradient may read x: it follows planes of roots."""
        stack = [self._read(x)]
        while stack:
            one = stack.pop()
            if one not in self.roots:
                continue
            if one not in self.packed:
                sources = self._sources(one)
                if not all(_keeps_planes(one, source) for source in sources):
                    return {one} if one in self.found.recomputed else self.roots[one]
                stack += sources
                continue
            value, made = hinted(value_of(one)), NormCall.of(norm) or GradientCall.of(norm)
            if value.dim() < 3 or value.shape[0] != hinted(value_of(x)).shape[0] or layout_of(value) is None:
                return self.roots[one]
            of_samples = "group" in name_of(norm) if made is None else made.norm.over.of_samples
            self.packed[one].unit = self.packed[one].unit_for(of_samples)
        return set()

    def _give_more_bits(self, roots: set[fx.Node], reader: fx.Node) -> None:
        for packed in map(self.packed.__getitem__, roots):
            if packed.bits < SMOOTH_BITS:
                packed.bits = SMOOTH_BITS
                packed.needed_by = name_of(reader)

    def _gradient(self, node: fx.Node, copied: set[fx.Node]) -> set[fx.Node]:
        """What must be exact so that backward may compute a gradient from copies."""
        if (sources := self.facts.read_exactly(node)) is not None:
            return self._of(map(self._read, sources))
        if self._has_exact_sign(node):
            return set()
        row = row_of(node)
        if node not in self.facts.unsteady:
            if row.reads == NORM:
                if not self.facts.follows_ends(node):
                    self._give_more_bits(copied, node)
                return self._norm(node, node_at(node, 1))
            if row.reads == SLOPE and self._reads_sized(node):
                self._give_more_bits(copied, node)
                return set()
            if name_of(node) == "mul" and self.facts.is_returned(node):
                return set()
        if is_piecewise_linear(node):
            self.branching.add(node)
            return set()
        return copied

    def _has_exact_sign(self, node: fx.Node) -> bool:
        """Whether the node asks for the sign of a value that is rebuilt with the right one."""
        source = asked_for_its_sign(node)
        if source is None:
            return False
        if name_of(source) == "relu" and source in self.packed:
            own = self.packed[source]
            own.sign = own.sign or source
            return own.sign is source
        source = source_of_sign(source)
        norm = recompute.recomputation_of(source) if source in self.found.recomputed else None
        if not isinstance(norm, recompute.Norm) or norm.rstd is None:
            return False
        x = norm.x
        while x not in self.packed and is_view(x):
            x = node_at(x, 0)
        if x not in self.packed or self.packed[x].sign not in (None, norm):
            return False
        value, unit = hinted(value_of(x)), self.packed[x].unit_for(norm.of_samples)
        kinks = value.shape[1] * (value.shape[0] if norm.of_samples else 1)
        if value.dim() < 3 or lines_of(value, unit).S * kinks > value.numel():
            return False
        self.packed[x].sign = norm
        self.packed[x].unit = unit
        return True


def asked_for_its_sign(node: fx.Node) -> fx.Node | None:
    """The argument whose sign a node asks for; None if there is none, or if it compares with another number than 0."""
    places = row_of(node).sign_of
    if not places or any(node.args[place] != 0 for place in places[1:]):
        return None
    return node_at(node, places[0])


def source_of_sign(node: fx.Node) -> fx.Node:
    """The argument of activations and casts that do not change signs, or the node itself.

    A value that a cast rounds to 0 counts with its own sign.
    """
    while (row := row_of(node)).copies or row.keeps_sign:
        source, slope = node_at(node, 0), node.args[1] if row.keeps_sign and len(node.args) > 1 else 1
        are_real = all(value_of(one).is_floating_point() for one in (node, source))
        if not are_real or not isinstance(slope, (int, float)) or slope <= 0:
            break
        node = source
    return node
