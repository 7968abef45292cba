"""The rule of what backward may compute from packed values: the column ``reads`` of ``op_table.py`` in a graph.

A value that backward computes is exact, or a *copy*: it follows packed values, its *roots*.  A copy reads other copies
by FOLLOWS, FACTOR and SLOPE alone, and an activation that is linear on both sides of a kink follows if its side is
known exactly.  So |v~ - v| <= a h for a copy v, where h are steps of its roots, and a depends on no input.

* **Steady factors.**  A factor is steady if it is a number, a function of parameters, or bounded.  Any other factor of
  a copy is one number for each group of its root, and the copy is *affine* in it: only such factors, and summands,
  have come between.  Then the step of the copy is what packing the copy itself would give, however large the factor is.
* **Norms** read affine copies alone, for the same reason.  Groups then lie inside of what has the same statistics
  (``Rounded.units``).
* **Gradients.**  Between two ends (a convolution, a matrix product with a weight, a norm, a sum of many values) a
  gradient has the errors of slopes and factors that are packed: at most a h |g| for each element.  Beside such an error
  it is multiplied by steady factors alone.  Any other factor may be large just where the gradient is small, so that
  a h |g| has no bound in terms of the result: then what brought the error is exact.  A slope counts as such a factor
  too.  One unsteady factor may be packed, or one slope.  At an end the gradient becomes a sum over many values, and
  errors and gradients are scaled alike.
"""

import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ...ops.layout import layout_of
from ...ops.low_bit.spec import SMOOTH_BITS, lines_of
from ..graph import (
    SMALL,
    Joint,
    calls_view,
    hint_of,
    hinted,
    is_op,
    is_tensor,
    name_of,
    node_at,
    reads_size_alone,
    row_of,
    size_of,
    tensors_of,
    value_of,
)
from ..op_table import FACTOR, FIRST, FOLLOWS, NORM, PASSES, ROWS, SLOPE, SUM
from ..plan import recompute
from ..plan.keep import Decision, call_node, is_view

# Gradients of activations that are linear between kinks.
BENT = {row.backward for row in ROWS if row.reads == FOLLOWS}
# Ops that change neither the place of a value nor the value, but for a factor and a summand.
AFFINE = ("clone", "_to_copy", "convert_element_type", "add", "sub", "rsub", "neg", "mul", "div")


def is_predicate(node: fx.Node) -> bool:
    """Whether the result of a node is true or false for each element."""
    value = value_of(node)
    return isinstance(value, Tensor) and value.dtype == torch.bool


def is_bounded(node: Any) -> bool:
    """Whether no value of a node is large, whatever the inputs are."""
    while (
        is_op(node) and len(node.all_input_nodes) == 1 and (calls_view(node) or row_of(node).reads in (FOLLOWS, FACTOR))
    ):
        if name_of(node) == "div" and is_tensor(node.args[1]):
            return False
        (node,) = node.all_input_nodes
    return isinstance(node, fx.Node) and (is_predicate(node) or row_of(node).bounded)


def _is_of_parameters(node: fx.Node, product: fx.Node) -> bool:
    """Whether a factor that is much smaller than the product follows from arguments of the graph alone."""
    if size_of(node) * SMALL > size_of(product):
        return False
    stack = [node]
    while stack:
        one = stack.pop()
        if one.op == "call_function" and (row_of(one).compute_intensive or not is_op(one)):
            return False
        stack += one.all_input_nodes
    return True


def is_steady(factor: Any, product: fx.Node) -> bool:
    """Whether a factor is a number, follows from parameters, or is bounded."""
    return not is_tensor(factor) or is_bounded(factor) or _is_of_parameters(factor, product)


def varying(factor: Any, value: Tensor) -> set[int]:
    """The dimensions of a value along which a factor of it varies."""
    if not is_tensor(factor):
        return set()
    of = value_of(factor)
    missing = value.dim() - of.dim()
    sizes = zip(hinted(of).shape, hinted(of).stride(), strict=True)
    return {place + missing for place, (size, stride) in enumerate(sizes) if size != 1 and stride != 0}


def run_of(value: Tensor) -> int | None:
    """The length of a plane in memory, or of a row of N x C values; 0 if channels are adjacent, None if nothing is."""
    value = hinted(value)
    if value.dim() < 2:
        return value.numel()
    if layout_of(value) is None:
        return None
    return value[(0,) * min(2, value.dim() - 1)].numel() if value.is_contiguous() else 0


class Affine(NamedTuple):
    """A copy that is a sum of roots with a factor for each group.

    run: how many adjacent values follow a plane of each root (``run_of``).
    units: for each root the unit of groups that the factors need.
    """

    run: int
    units: dict[fx.Node, str]

    def unit(self, root: fx.Node, value: Tensor, varies: set[int]) -> str | None:
        """The unit of groups of a root in which nothing varies that varies along these dimensions of the copy.

        None: there is no such unit.
        """
        value, last = hinted(value), max(varies, default=-1)
        of = value_of(root)
        planes = value.dim() == of.dim() > 1 and hint_of(of.shape[0]) == value.shape[0] and run_of(value) == self.run
        if last < 0 or (planes and varies == {1}):
            return "" if last < 0 else "batch"
        if self.run == 0:
            return "plane" if planes and last < 2 else None
        constant = value[(0,) * (last + 1)].numel() if value.is_contiguous() else 1
        return "plane" if constant % self.run == 0 else None


class Rule:
    """One pass over a graph, with what is packed.

    Args:
        joint: the graph.
        found: what backward recomputes.
        rounded: what is packed.  The bits that slopes need are noted there, and the units that readers need.
        branching: ops of backward with a branch, which must be written as pointwise chains before anything can be
            decided, are noted there.
        stuck: such ops for which there is no chain.

    Attributes:
        roots: for each copy its roots.
    """

    def __init__(self, joint: Joint, found: Decision, rounded: Any, stuck: set[fx.Node]) -> None:
        self.joint, self.found, self.rounded, self.stuck = joint, found, rounded, stuck
        self.own = set(found.reading)
        self.roots: dict[fx.Node, set[fx.Node]] = {}
        self.affine: dict[fx.Node, Affine] = {}
        # For each gradient the roots that have brought an error since the last end, and those with unsteady factors.
        self.noise: dict[fx.Node, set[fx.Node]] = {}
        self.unsteady: set[fx.Node] = set()

    def broken(self) -> set[fx.Node]:
        """The values that must be exact where the rule is broken first: roots, and values that are recomputed."""
        for node in self.joint.graph.nodes:
            if exact := self._visit(node):
                return exact
        return set()

    def _visit(self, node: fx.Node) -> set[fx.Node]:
        if node in self.rounded.bits:
            self.roots[node] = {node}
            if (run := run_of(value_of(node))) is not None:
                self.affine[node] = Affine(run, {node: ""})
            return set()
        needed = node in self.own or (node in self.found.recomputed and node in self.found.readers)
        if not needed or not tensors_of(node) or reads_size_alone(node):
            return set()
        if node in self.joint.backward:
            return self._gradient(node)
        copies = [source for source in self.sources(node) if source in self.roots]
        if not copies or (is_predicate(node) and self._has_exact_sign(node)):
            return set()
        exact = self._copy(node, copies)
        if node in exact and node not in self.found.recomputed:
            return self._of(copies)
        self.roots[node] = self._of(copies)
        return exact

    def sources(self, node: fx.Node) -> list[fx.Node]:
        """What backward reads to compute a node."""
        return self.found.recomputed.get(node) or [self._read(source) for source in node.all_input_nodes]

    def _read(self, source: Any) -> Any:
        return self.found.instead.get(source, source)

    def _of(self, copies: Iterable[fx.Node]) -> set[fx.Node]:
        return set().union(*(self.roots.get(copy, ()) for copy in copies))

    def _copy(self, node: fx.Node, copies: list[fx.Node]) -> set[fx.Node]:
        """What must be exact so that a value may follow copies."""
        call, form = call_node(node), recompute.form_of(node) if node in self.found.recomputed else None
        if form is not None:
            return self._form(node, form)
        row = row_of(call)
        if is_tensor(node) and not value_of(node).is_floating_point():
            return {node}
        if calls_view(call) or not is_op(call):
            if size_of(node) == size_of(copies[0]) and copies[0] in self.affine:
                self.affine[node] = self.affine[copies[0]]
            return set()
        if row.kinks:
            return set() if row.reads == FOLLOWS and self._has_exact_sign(node) else {node}
        if row.reads == FOLLOWS:
            self._note_affine(node, copies)
            return set()
        if row.reads == SLOPE:
            self._give_more_bits(copies)
            return set()
        return self._product(node, copies) if row.reads == FACTOR else {node}

    def _form(self, node: fx.Node, form: Any) -> set[fx.Node]:
        if isinstance(form, recompute.MaxPool | recompute.Dropout):
            return set()
        if isinstance(form, recompute.BatchNorm) or (isinstance(form, recompute.NormActForm) and form.rstd is None):
            # It would find the statistics of rounded values.
            return set() if isinstance(form, recompute.NormActForm) and not form.own else {node}
        return self._norm(call_node(node), self._read(form.x))

    def _norm(self, call: fx.Node, x: fx.Node) -> set[fx.Node]:
        """What must be exact or packed so that a norm or its gradient may read x: an affine copy."""
        if x not in self.roots or self._take(x, call, x):
            return set()
        while x not in self.rounded.bits and is_view(x) and x in self.found.recomputed:
            (x,) = self.sources(x)
        return {x} if x in self.found.recomputed or x in self.rounded.bits else self._of([x])

    def _take(self, copy: fx.Node, factor: Any, product: fx.Node) -> bool:
        """Whether a copy is affine, and one number of a factor of it, or of the statistics of a norm, is for each group
        of its roots, which get units for that."""
        if copy not in self.affine:
            return False
        value, needed = value_of(product), dict[fx.Node, str]()
        varies = norm_varies(factor, value) if is_norm(factor) else varying(factor, value)
        for root, before in self.affine[copy].units.items():
            unit = self.affine[copy].unit(root, value, varies)
            if unit is None or not self._can_have(root, max(before, unit)):
                return False
            needed[root] = max(before, unit)
        self._need(needed)
        return True

    def _need(self, units: dict[fx.Node, str]) -> None:
        for root, unit in units.items():
            self.rounded.units[root] = max(unit, self.rounded.units.get(root, ""))

    def _can_have(self, root: fx.Node, unit: str) -> bool:
        """Whether groups can have this unit too: those of N x C values are rows or columns."""
        return value_of(root).dim() != 2 or {unit, self.rounded.units.get(root, "")} != {"batch", "plane"}

    def _note_affine(self, node: fx.Node, copies: list[fx.Node]) -> None:
        """Notes a sum of affine copies, or one with a factor for each group; pools and interpolations are sums too."""
        if not all(copy in self.affine for copy in copies):
            return
        value, name = value_of(node), name_of(node)
        runs = {self.affine[copy].run for copy in copies}
        parts = sorted((unit, root) for copy in copies for root, unit in self.affine[copy].units.items())
        # The last one of a root counts, which is the largest.
        units = {root: unit for unit, root in parts}
        if row_of(node).layout == PASSES:
            planes = all(run_of(value_of(copy)) == self.affine[copy].run for copy in copies)
            run = run_of(value)
            if planes and run is not None and all((run == 0) == (of == 0) for of in runs):
                self.affine[node] = Affine(run, units)
        elif name in AFFINE and len(runs) == 1 and (name == "add" or len(copies) == 1):
            strides = {hinted(value_of(one)).stride() for one in (node, *copies)}
            found = Affine(runs.pop(), units)
            for other in map(self._read, node.args[:2] if name != "add" else ()):
                for root in units if other not in copies else ():
                    unit = found.unit(root, value, varying(other, value))
                    if unit is None:
                        return
                    units[root] = max(unit, units[root])
            if len(strides) == 1:
                self.affine[node] = found

    def _product(self, node: fx.Node, copies: list[fx.Node]) -> set[fx.Node]:
        factors = [self._read(factor) for factor in node.args[:2]]
        inexact = [factor for factor in factors if factor in self.roots]
        if name_of(node) == "div" and (factors[1] in inexact or "rounding_mode" in node.kwargs):
            return {node}
        if len(inexact) != 1:
            return set() if any(map(is_bounded, inexact)) else {node}
        (copy,) = inexact
        (other,) = (factor for factor in factors if factor is not copy)
        if is_steady(other, node) or self._take(copy, other, node):
            self._note_affine(node, copies)
            return set()
        # A copy that is not affine becomes a root, which is, where each of its planes has one factor.
        planes = copy not in self.affine and _is_constant_in_planes(other, node)
        return {copy} if planes and copy in self.found.recomputed and not is_view(copy) else {node}

    def _give_more_bits(self, copies: list[fx.Node]) -> None:
        self.rounded.bits.update({root: max(SMOOTH_BITS, self.rounded.bits[root]) for root in self._of(copies)})

    def _gradient(self, node: fx.Node) -> set[fx.Node]:
        """What must be exact so that backward may compute a gradient."""
        sources, call = self.sources(node), call_node(node)
        before = set().union(*(self.noise.get(source, ()) for source in sources))
        wild = any(source in self.unsteady for source in sources)
        copies = [source for source in sources if source in self.roots]
        row, new, is_new = row_of(call), set[fx.Node](), False
        if node.target is operator.getitem or calls_view(call) or row.reads == FIRST or self._has_exact_sign(node):
            pass
        elif row.reads == NORM:
            return self._norm(node, self._read(node.args[1]))
        elif _is_end(node) or (row.reads == FACTOR and _is_summed(node)):
            return set()
        elif row.reads == FACTOR:
            if name_of(node) == "div" and copies:
                return self._of(copies)
            if self._is_packed_term(node, copies):
                # It has the error of a product that is packed itself, whatever the gradient is.
                before, wild = before | self._of(copies), False
            else:
                new = self._of(copies)
                is_new = not all(self._is_steady(factor, node, before) for factor in node.args[:2])
                # The gradient may have had a factor for each plane.
                self._need({root: "plane" for root in new if is_new and self._can_have(root, "plane")})
        elif row.reads in (FOLLOWS, SUM, SLOPE) and not row.kinks:
            new, is_new = self._of(copies), row.reads == SLOPE
            if is_new:
                self._give_more_bits(copies)
        elif copies:
            if node in self.stuck or (row.pieces is None and name_of(node) not in BENT):
                return self._of(copies)
            self.rounded.branching.add(node)
        else:
            is_new = True
        if exact := (before if is_new else set()) | (new if wild else set()):
            return exact
        self.noise[node] = before | new
        if wild or is_new:
            self.unsteady.add(node)
        return set()

    def _is_packed_term(self, node: fx.Node, copies: list[fx.Node]) -> bool:
        """Whether a product is an affine copy times a gradient that is one number for each group."""
        factors = [factor for factor in node.args[:2] if self._read(factor) not in copies]
        return len(copies) == 1 and len(factors) == 1 and self._take(copies[0], factors[0], node)

    def _is_steady(self, factor: Any, product: fx.Node, noise: set[fx.Node]) -> bool:
        """Whether a factor of a gradient is steady, or one number for each group of what has brought errors."""
        factor = self._read(factor)
        if factor in self.joint.backward or is_steady(factor, product):
            return True
        if factor in self.roots:
            return False
        value = value_of(product)
        if not noise:
            return _is_constant_in_planes(factor, product)
        varies, runs = varying(factor, value), {root: run_of(value_of(root)) for root in noise}
        units = {root: Affine(run, {}).unit(root, value, varies) for root, run in runs.items() if run is not None}
        found = {root: unit for root, unit in units.items() if unit is not None and self._can_have(root, unit)}
        if len(found) == len(noise):
            self._need(found)
        return len(found) == len(noise)

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
        if not self._can_have(x, unit) or lines_of(value, unit).S * kinks > value.numel():
            return False
        self.rounded.kinks[x] = norm
        self.rounded.units[x] = unit
        return True


def _is_end(node: fx.Node) -> bool:
    """Whether a gradient begins anew, as a sum of many values."""
    row = row_of(node)
    if name_of(node) in ("sum", "mean"):
        return size_of(node) * SMALL <= size_of(node.all_input_nodes[0])
    return row.reads == NORM or (row.compute_intensive and not row.batched)


def _is_summed(node: fx.Node) -> bool:
    """Whether all readers of a product are sums of many values, or views that such sums read."""
    return all(_is_end(user) or (calls_view(user) and _is_summed(user)) for user in node.users)


def _is_constant_in_planes(factor: Any, product: fx.Node) -> bool:
    value = value_of(product)
    run = run_of(value)
    return run is not None and Affine(run, {}).unit(product, value, varying(factor, value)) is not None


def is_norm(call: Any) -> bool:
    return isinstance(call, fx.Node) and (row_of(call).statistics == 1 or row_of(call).reads == NORM)


def norm_varies(call: fx.Node, x: Tensor) -> set[int]:
    """The dimensions along which the statistics of a norm, or of its gradient, vary."""
    name = name_of(call)
    if "layer_norm" in name or "rms_norm" in name:
        shape: Any = call.args[2 if "backward" in name else 1]
        return set(range(x.dim() - len(shape)))
    return {1} if "batch" in name or "batch" in call.args else {0, 1}


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
