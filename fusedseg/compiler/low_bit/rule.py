"""The rule of what backward may compute from packed values: the column ``reads`` of ``op_table.py`` in a graph.

A value that backward computes is exact, or a *copy*: it follows packed values, its *roots*, with an error of at most
a h, where h are their steps, and a depends on no input.

* **Copies** read copies by FOLLOWS, by FACTOR with a number or a parameter, and by MIXES if the terms of the sum follow
  different layers.  SLOPE reads *sized* values: a norm has set their size, so no input makes h large beside the width
  of a slope.  A function with a kink follows if the side is known exactly.
* **Ends** are convolutions and matrix products with a weight.  They read copies for its gradient, a sum of g v~ with
  the error of the sum of g e, and nothing reads that sum.
* **Between two ends** a gradient meets packed values or *unsteady* factors, in any order, and never both.  A norm and
  an activation that read packed values bring an error of at most a h |g|.  Other factors are bounded, so it stays that,
  and the weights at both ends have as large an error anyway.  All else is unsteady: a factor may be large just where
  the gradient is small, or sums may leave little of it.
* **Norms** read roots whose groups lie inside of what has the same statistics: planes, channels, or rows.  Then the
  error of 8 bits is at most .09 standard deviations in the root mean square, for every input, and that of 4 bits 1.6.
  A norm reads 4 bits only if its gradient follows from those of ends by linear functions, beside kinks: the gradient
  of the weight there has errors of the same size.
* **Rows.**  A layer norm divides each row by a number of its own, so it is unsteady, and each row of the gradient has
  an error that is small beside this row.  It stays so while each value of the gradient follows from values of the same
  place.  Until the next end, only layer norms of the same rows may then bring more errors, or more unsteady factors.
  No sum over places may come before, as that of x - mean(x): rows that are nearly equal would leave little of it.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx

from ...ops.layout import layout_of
from ...ops.low_bit.spec import SMOOTH_BITS, lines_of
from ...ops.norm.graph import GradientCall, NormCall
from ..graph import (
    SMALL,
    Joint,
    calls_view,
    hinted,
    is_op,
    is_tensor,
    name_of,
    node_at,
    op_of,
    reads_size_alone,
    row_of,
    size_of,
    tensors_of,
    value_of,
)
from ..op_table import FACTOR, FIRST, FOLLOWS, MIXES, NORM, OF_ROWS, PASSES, ROWS, SLOPE, SUM
from ..plan import recompute
from ..plan.keep import Decision, call_node, is_view

# Gradients of activations that are linear between kinks.
BENT = {row.backward for row in ROWS if row.reads == FOLLOWS}
# Gradients of activations, whose slopes are bounded.
BOUNDED = {row.backward for row in ROWS if row.backward}
CASTS = ("clone", "_to_copy", "convert_element_type")
SUMS = ("add", "sub", "rsub")
CHOICES = ("where", "masked_fill")
# What a gradient has met since the last end: steady factors alone; sums over several places too; factors of rows, and
# no sums; or anything else.
STEADY, MIXED, IN_ROWS, UNSTEADY = range(4)


def is_predicate(node: fx.Node) -> bool:
    """Whether the result of a node is true or false for each element."""
    value = value_of(node)
    return isinstance(value, Tensor) and value.dtype == torch.bool


def _is_of_arguments(value: fx.Node) -> bool:
    """Whether a value follows from arguments of the graph without a convolution or a matrix product: a parameter."""
    stack, seen = [value], set[fx.Node]()
    while stack:
        one = stack.pop()
        if one.op == "call_function" and (row_of(one).compute_intensive or not is_op(one)):
            return False
        seen.add(one)
        stack += [source for source in one.all_input_nodes if source not in seen]
    return True


def _is_constant(value: fx.Node) -> bool:
    """Whether a value reads nothing, or is an integer or a predicate."""
    is_whole = is_tensor(value) and not value_of(value).is_floating_point()
    return is_whole or (value.op == "call_function" and not value.all_input_nodes)


def _is_steady(factor: Any, product: fx.Node) -> bool:
    """Whether a factor is a number, or is much smaller than the product and follows from arguments of the graph."""
    if not is_tensor(factor):
        return True
    return size_of(factor) * SMALL <= size_of(product) and _is_of_arguments(factor)


def _is_linear(node: fx.Node) -> bool:
    """Whether a node is linear in what it reads, but for steady factors, sizes and positions."""
    row = row_of(node)
    if row.reads == FACTOR:
        first, second = node.args[:2]
        is_product = name_of(node) == "mul" and _is_steady(first, node)
        return "rounding_mode" not in node.kwargs and (is_product or _is_steady(second, node))
    return calls_view(node) or not is_op(node) or (row.reads in (FOLLOWS, MIXES, FIRST) and not row.kinks)


def _is_returned(node: fx.Node) -> bool:
    """Whether linear ops alone read a node, and nothing reads the last ones."""
    return all(user.op == "output" or (_is_linear(user) and _is_returned(user)) for user in node.users)


def _keeps_planes(node: fx.Node) -> bool:
    """Whether each plane of a copy follows planes of its sources that lie at the same place."""
    shapes = [hinted(value_of(one)).shape for one in (node, *node.all_input_nodes) if is_tensor(one)]
    if is_view(node):
        return shapes[0][:2] == shapes[1][:2]
    row = row_of(node)
    if name_of(node) in SUMS:
        return shapes == shapes[:1] * len(shapes)
    return name_of(node) in CASTS or (row.layout == PASSES and row.reads in (FOLLOWS, MIXES))


def _keeps_values(node: fx.Node) -> bool:
    """Whether no value of a gradient follows from several values of another one, unless in a row."""
    return not is_op(node) or row_of(node).reads == OF_ROWS or torch.Tag.pointwise in op_of(node).tags


def _keeps_places(node: fx.Node, source: fx.Node) -> bool:
    """Whether each value of a gradient follows from values of the same place, or row, of a source."""
    sizes = [hinted(value_of(one)).shape for one in (node, source) if is_tensor(one)]
    return _keeps_values(node) and (len(sizes) < 2 or sizes[0] == sizes[1])


def _is_of_rows(node: fx.Node) -> bool:
    """Whether a node is the gradient of a norm over the last dimension."""
    shape: Any = node.args[2] if row_of(node).reads == OF_ROWS else ()
    return len(shape) == 1


def _unit(norm: fx.Node, x: Tensor, root: Tensor) -> str | None:
    """The unit of groups of a root in which the statistics of a norm of x are constant; None without one."""
    if _is_of_rows(norm):
        # The planes of tokens, (N, T, C), are their rows.
        return "plane" if root.dim() in (2, 3) and root.shape == x.shape and root.is_contiguous() else None
    if x.shape[0] != root.shape[0] or root.dim() < 3 or layout_of(root) is None:
        return None
    call = NormCall.of(norm) or GradientCall.of(norm)
    of_batch = "batch" in name_of(norm) if call is None else not call.norm.over.of_samples
    return "batch" if of_batch else "plane"


class Rule:
    """One pass over a graph, with what is packed.

    Args:
        joint: the graph.
        found: what backward recomputes.
        rounded: what is packed.  The bits that slopes need are noted there, the units that readers need, and ops of
            backward with a branch, which must be written as pointwise chains before anything can be decided.
        stuck: ops of backward with branches for which there is no pointwise chain.

    Attributes:
        roots: for each copy its roots.
        noise: for each gradient the roots that have brought an error since the last end.
        levels: the factors that each gradient has met since then; STEADY if it is not named.
        plain: the gradients that ends have made, and what follows from these by functions that are linear beside kinks.
        sized: the values of forward of which norms have set the size.
        layers: for each value of forward the last layers with weights, and arguments, that it follows.
    """

    def __init__(self, joint: Joint, found: Decision, rounded: Any, stuck: set[fx.Node]) -> None:
        self.joint, self.found, self.rounded, self.stuck = joint, found, rounded, stuck
        self.own = set(found.reading)
        self.roots: dict[fx.Node, set[fx.Node]] = {}
        self.noise: dict[fx.Node, set[fx.Node]] = {}
        self.levels: dict[fx.Node, int] = {}
        self.plain: set[fx.Node] = set()
        self.sized: set[fx.Node] = set()
        self.layers: dict[fx.Node, frozenset[fx.Node]] = {}

    def broken(self) -> set[fx.Node]:
        """The values that must be exact where the rule is broken first: roots, and values that are recomputed."""
        return next(filter(None, map(self._visit, self.joint.graph.nodes)), set())

    def _visit(self, node: fx.Node) -> set[fx.Node]:
        if node not in self.joint.backward:
            is_layer = row_of(node).compute_intensive or not node.all_input_nodes
            before = [self.layers.get(source, frozenset()) for source in node.all_input_nodes]
            self.layers[node] = frozenset({node}) if is_layer else frozenset[fx.Node]().union(*before)
            if self._is_sized(node):
                self.sized.add(node)
        if node in self.rounded.bits:
            self.roots[node] = {node}
            return set()
        needed = node in self.own or (node in self.found.recomputed and node in self.found.readers)
        if not needed or not tensors_of(node) or reads_size_alone(node):
            return set()
        sources = self.sources(node)
        copied = self._of(sources)
        if node in self.joint.backward:
            return self._gradient(node, sources, copied)
        if not copied or (is_predicate(node) and self._has_exact_sign(node)):
            return set()
        exact = self._copy(node, copied)
        if node in exact and node not in self.found.recomputed:
            return copied
        self.roots[node] = copied
        return exact

    def _is_sized(self, node: fx.Node) -> bool:
        """Whether a norm or a bounded function has set the size of a value: no input of the graph makes it large."""
        row, norm = row_of(node), NormCall.of(node)
        if (row.statistics == 1 and row.reads != FOLLOWS) or name_of(node) in ("sigmoid", "tanh"):
            return norm is None or bool(norm.norm.own)
        tensors = [source for source in node.all_input_nodes if not _is_constant(source)]
        sized = [source for source in tensors if source in self.sized]
        if row.reads == SUM:
            return bool(sized) and all(source in self.sized or _is_of_arguments(source) for source in tensors)
        if row.reads == FACTOR:
            return sized == tensors == [node.args[0]]
        follows = calls_view(node) or not is_op(node) or row.positions or row.reads in (FOLLOWS, MIXES, FIRST, SLOPE)
        return bool(sized) and len(sized) == len(tensors) and follows

    def sources(self, node: fx.Node) -> list[fx.Node]:
        """What backward reads to compute a node."""
        return self.found.recomputed.get(node) or [self._read(source) for source in node.all_input_nodes]

    def _read(self, source: Any) -> Any:
        return self.found.instead.get(source, source)

    def _of(self, copies: Iterable[fx.Node]) -> set[fx.Node]:
        return set().union(*(self.roots.get(copy, ()) for copy in copies))

    def _copy(self, node: fx.Node, copied: set[fx.Node]) -> set[fx.Node]:
        """What must be exact so that a value may follow copies."""
        call, form = call_node(node), recompute.form_of(node) if node in self.found.recomputed else None
        if form is not None:
            return self._form(node, form)
        row = row_of(call)
        if is_tensor(node) and not value_of(node).is_floating_point():
            return {node}
        if row.reads == SLOPE and self._reads_sized(node):
            self._give_more_bits(copied)
            return set()
        is_linear = _is_linear(call) and not self._may_cancel(call)
        return set() if is_linear or (row.reads == FOLLOWS and self._has_exact_sign(node)) else {node}

    def _reads_sized(self, node: fx.Node) -> bool:
        return all(source in self.sized for source in self.sources(node) if source in self.roots)

    def _may_cancel(self, node: fx.Node) -> bool:
        """Whether a linear result, or what a kink leaves of it, may be small beside what it follows.

        Such are means, what becomes smaller, x - mean(x), whose terms follow the same layer, x - 1.5 before a ReLU, and
        what a choice leaves of values of any size.
        """
        reads, terms = row_of(node).reads, [*filter(is_tensor, node.all_input_nodes)]
        if name_of(node) in SUMS:
            layers = [self.layers.get(term, frozenset()) for term in terms]
            return len(layers) < 2 or not layers[0].isdisjoint(layers[1])
        if name_of(node) in CHOICES:
            return not self._reads_sized(node)
        return reads == FIRST or (reads == MIXES and size_of(node) < size_of(terms[0]))

    def _form(self, node: fx.Node, form: Any) -> set[fx.Node]:
        if isinstance(form, recompute.NormActForm) and form.rstd is not None:
            return self._norm(call_node(node), self._read(form.x))
        # A norm would find the statistics of rounded values.
        has_own = form.norm.own if isinstance(form, recompute.NormActForm) else isinstance(form, recompute.BatchNorm)
        return {node} if has_own else set()

    def _norm(self, norm: fx.Node, x: fx.Node) -> set[fx.Node]:
        """What must be exact or packed so that a norm or its gradient may read x: a root, or planes of roots."""
        stack = [x] if x in self.roots else []
        while stack:
            one = stack.pop()
            if one not in self.rounded.bits and one in self.found.recomputed and _keeps_planes(one):
                stack += [source for source in self.sources(one) if source in self.roots]
                continue
            unit = _unit(norm, hinted(value_of(x)), hinted(value_of(one)))
            if unit is None or not (one in self.rounded.bits or one in self.found.recomputed):
                return self._of([one])
            if one not in self.rounded.bits:
                return {one}
            self.rounded.units[one] = max(unit, self.rounded.units.get(one, ""))
        return set()

    def _give_more_bits(self, roots: set[fx.Node]) -> None:
        self.rounded.bits.update({root: max(SMOOTH_BITS, self.rounded.bits[root]) for root in roots})

    def _gradient(self, node: fx.Node, sources: list[fx.Node], copied: set[fx.Node]) -> set[fx.Node]:
        """What must be exact so that backward may compute a gradient."""
        level = self._level(node, sources)
        if self._ends(node, copied, level):
            self.plain.add(node)
            return set()
        noise = set[fx.Node]().union(*(self.noise.get(source, ()) for source in sources))
        if self._is_norm(node, level, noise):
            own = IN_ROWS if _is_of_rows(node) else MIXED
            exact = self._norm(node, self._read(node.args[1])) if level <= own else copied
            if not self._is_of_ends(sources):
                self._give_more_bits(copied)
            return self._note(node, noise | copied, max(level, own), exact)
        if copied and self._is_slope(node, level):
            self._give_more_bits(copied)
            return self._note(node, noise | copied, level)
        if self._has_exact_sign(node) or self._is_bounded(node, copied):
            if (_is_linear(node) or name_of(node) in BENT) and self._is_of_ends(sources):
                self.plain.add(node)
            return self._note(node, noise, level)
        if copied and node not in self.stuck and (row_of(node).pieces is not None or name_of(node) in BENT):
            self.rounded.branching.add(node)
            return set()
        return self._note(node, noise, UNSTEADY, copied | noise)

    def _ends(self, node: fx.Node, copied: set[fx.Node], level: int) -> bool:
        """Whether a gradient becomes a sum that nothing reads: at an end, and at a parameter that is a factor."""
        is_of_factor = copied and level < UNSTEADY and name_of(node) == "mul" and _is_returned(node)
        return bool(is_of_factor) or (row_of(node).reads == SUM and self._is_end(node, copied))

    def _is_bounded(self, node: fx.Node, copied: set[fx.Node]) -> bool:
        """Whether a gradient is a linear function of gradients, whose factors are steady, and follow no copies."""
        if row_of(node).reads == FIRST:
            return self._read(node_at(node, 0)) not in self.roots
        return not copied and (_is_linear(node) or name_of(node) in BOUNDED)

    def _is_of_ends(self, sources: list[fx.Node]) -> bool:
        """Whether all gradients among the sources follow from those of ends by linear functions."""
        gradients = [source for source in sources if source in self.joint.backward]
        return bool(gradients) and self.plain.issuperset(gradients)

    def _is_norm(self, node: fx.Node, level: int, noise: set[fx.Node]) -> bool:
        """Whether a node is the gradient of a norm that may read copies, here or further on."""
        may_be_of_rows = level == IN_ROWS or (level == STEADY and not noise)
        return row_of(node).reads == NORM or (may_be_of_rows and _is_of_rows(node))

    def _is_slope(self, node: fx.Node, level: int) -> bool:
        """Whether a node is the gradient of an activation that may read a sized copy."""
        return row_of(node).reads == SLOPE and level <= MIXED and self._read(node.args[1]) in self.sized

    def _note(self, node: fx.Node, noise: set[fx.Node], level: int, exact: Iterable[fx.Node] = ()) -> set[fx.Node]:
        self.noise[node], self.levels[node] = noise, level
        return set(exact)

    def _level(self, node: fx.Node, sources: list[fx.Node]) -> int:
        """What a gradient has met if only its own factors do not count."""
        levels = {source: self.levels.get(source, STEADY) for source in sources}
        level = max(levels.values(), default=STEADY)
        if level == STEADY:
            return STEADY if calls_view(node) or _keeps_values(node) else MIXED
        if level != IN_ROWS:
            return level
        rows = [source for source in sources if levels[source] == IN_ROWS]
        others = any(levels[source] == MIXED or self.noise.get(source) for source in sources if source not in rows)
        return UNSTEADY if others or not all(_keeps_places(node, source) for source in rows) else IN_ROWS

    def _is_end(self, node: fx.Node, copied: set[fx.Node]) -> bool:
        """Whether a convolution or a matrix product has a weight, and reads copies for the weight's gradient alone."""
        if name_of(node) == "convolution_backward":
            # The second result is the gradient of the weight.  The first one reads the weight.
            results = [user for user in node.users if user.args[1] == 1]
            is_copy = self._read(node.args[1]) in self.roots
            return _is_of_arguments(self._read(node.args[2])) and (not is_copy or all(map(_is_returned, results)))
        factors = [self._read(factor) for factor in node.all_input_nodes if factor not in self.joint.backward]
        return _is_returned(node) or (not copied and any(map(_is_of_arguments, factors)))

    def _has_exact_sign(self, node: fx.Node) -> bool:
        """Whether the node asks for the sign of a value that is rebuilt with the right one."""
        source = asked_for_its_sign(node)
        if source is None:
            return False
        if name_of(source) == "relu" and source in self.rounded.bits:
            # 0 is a value of the grid.
            return True
        source = bent(source)
        norm = recompute.form_of(source) if source in self.found.recomputed else None
        if not isinstance(norm, recompute.NormActForm) or norm.mean is None or norm.rstd is None:
            return False
        x = norm.x
        while x not in self.rounded.bits and is_view(x):
            x = node_at(x, 0)
        if x not in self.rounded.bits or self.rounded.kinks.get(x, norm) != norm:
            return False
        value, unit = hinted(value_of(x)), "plane" if norm.of_samples else "batch"
        unit = max(unit, self.rounded.units.get(x, ""))
        kinks = value.shape[1] * (value.shape[0] if norm.of_samples else 1)
        if value.dim() < 3 or lines_of(value, unit).S * kinks > value.numel():
            return False
        self.rounded.kinks[x] = norm
        self.rounded.units[x] = unit
        return True


def asked_for_its_sign(node: fx.Node) -> fx.Node | None:
    """The argument whose sign a node asks for; None if there is none, or if it compares with another number than 0."""
    name, place = name_of(node), row_of(node).sign_of
    if place is None or (name in ("le", "gt") and node.args[1] != 0):
        return None
    if name == "threshold_backward" and node.args[2] != 0:
        return None
    return node_at(node, place)


def bent(node: fx.Node) -> fx.Node:
    """The argument of an activation that does not change signs, or the node itself."""
    while row_of(node).keeps_sign:
        slope = node.args[1] if len(node.args) > 1 else 1
        if not isinstance(slope, (int, float)) or slope <= 0:
            break
        node = node_at(node, 0)
    return node
