"""Calls that backward recomputes in another form, because the same call would do more than compute its result.

A norm of this package (``capture/stock_norms.py``) is rebuilt in one pass, from the mean and 1 / sqrt(var + eps) that
backward reads anyway.  On a CPU PyTorch rounds weight / sqrt(var + eps) once in both calls, so the bits are the same.
So is a batch norm of PyTorch, as which PyTorch computes instance norms too; where it has rounded its statistics to half
precision, it runs again with those of the batch.  Norms in eval mode and group norms run again as they are.  So does a
layer norm: its rows lie in the cache, and one kernel takes less time than a difference, a product and a sum.

Dropout would draw another mask.  Its output is its input times the mask that backward reads anyway.

With the option "bits" the input is rounded.  Then a max-pool of this package picks the values at the positions that
backward reads anyway, because the maximum of rounded values would be too large on average.
"""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx

from ... import _torch
from ...ops.check import wide_dtype
from ...ops.max_pool.pool import max_pool_op, max_pool_pick_op
from ...ops.norm.graph import NormCall, norm_op
from ..graph import arguments_of, call, has_same_form, items_of, name_of, node_at, value_of

aten = torch.ops.aten
# The mark of calls whose inputs may be rounded in backward.
ROUNDED = "fusedseg_rounded"
# Returns the node that backward reads in place of a node of forward.
Read = Callable[[Any], Any]


class BatchNorm(NamedTuple):
    """The output of PyTorch's batch norm in training mode, from its statistics.

    mean, rstd: None if the statistics are rounded, or if the graph has no nodes of them.
    """

    x: fx.Node
    weight: fx.Node | None
    bias: fx.Node | None
    mean: fx.Node | None
    rstd: fx.Node | None
    eps: float

    def write(self, graph: fx.Graph, read: Read, before: fx.Node) -> fx.Node:
        x, weight, bias, mean, rstd = map(read, self[:5])
        if mean is not None:
            scale = rstd if weight is None else call(graph, aten.mul.Tensor, rstd, weight, before=before)
            return _normed(graph, x, scale, bias, mean, before)
        recomputed = call(graph, _torch.batch_norm_without_running, x, weight, bias, True, 0.0, self.eps, before=before)
        return call(graph, operator.getitem, recomputed, 0, before=before)


class Norm(NormCall):
    """The output of a norm of this package, from its statistics.

    Its mean and rstd are None if the norm uses running statistics, or if the graph has no nodes of its own statistics,
    which are recomputed then.
    """

    def write(self, graph: fx.Graph, read: Read, before: fx.Node) -> fx.Node:
        again = NormCall(self.norm, *map(read, self.tensors))
        recomputed = call(graph, norm_op, *again.arguments, before=before)
        return call(graph, operator.getitem, recomputed, 0, before=before)


def _widened(graph: fx.Graph, x: fx.Node, t: fx.Node, before: fx.Node) -> fx.Node:
    """A vector in the dtype of the arithmetic on ``x``."""
    wide = wide_dtype(value_of(x).dtype)
    if value_of(t).dtype == wide:
        return t
    return call(graph, torch.ops.prims.convert_element_type.default, t, wide, before=before)


def _normed(
    graph: fx.Graph, x: fx.Node, scale: fx.Node, bias: fx.Node | None, mean: fx.Node, before: fx.Node
) -> fx.Node:
    """(x - mean) scale + bias for each channel, in one pass: a batch norm in eval mode, whose variance is 1."""
    scale, mean = _widened(graph, x, scale, before), _widened(graph, x, mean, before)
    # A shape may be symbolic, so a node takes it from the statistics.  Norms of as many channels share it.
    ones = graph.find_nodes(op="call_function", target=aten.full_like.default)
    found = (node for node in ones if node.args[1:] == (1,) and has_same_form(value_of(node), value_of(mean)))
    one = next(found, None) or call(graph, aten.full_like.default, mean, 1, before=before)
    given = (x, scale, bias, mean, one, False, 0.0, 0.0)
    return call(
        graph, operator.getitem, call(graph, aten.native_batch_norm.default, *given, before=before), 0, before=before
    )


class MaxPool(NamedTuple):
    """The output of a max-pool of this package, picked at the positions of the maxima; only for rounded inputs."""

    x: fx.Node
    codes: fx.Node
    window: tuple[Any, ...]

    def write(self, graph: fx.Graph, read: Read, before: fx.Node) -> fx.Node:
        # The op asks for the size and the format of x, which its transpose needs.
        channels_last = not value_of(self.codes).is_contiguous()
        given = (read(self.x), read(self.codes), [], channels_last, *self.window)
        return call(graph, max_pool_pick_op, *given, before=before)


class Dropout(NamedTuple):
    """The output of a dropout that has drawn a mask."""

    x: fx.Node
    mask: fx.Node
    p: float

    def write(self, graph: fx.Graph, read: Read, before: fx.Node) -> fx.Node:
        # Inductor has no ``native_dropout_backward``.
        x = value_of(self.x)
        scale = 1 / (1 - self.p) if self.p < 1 else 0.0
        if x.device.type == "cpu":
            # There the op rounds the factor to the dtype of x first.  On a GPU it does not.
            scale = torch.tensor(scale, dtype=x.dtype).item()
        left = call(graph, aten.mul.Tensor, read(self.x), read(self.mask), before=before)
        return call(graph, aten.mul.Tensor, left, scale, before=before)


# Each writes a node that recomputes the output before another node.
Recomputation = BatchNorm | Norm | Dropout | MaxPool


def read_by(made: Recomputation) -> list[fx.Node]:
    """The nodes from which a value is recomputed."""
    return [source for source in made if isinstance(source, fx.Node)]


def round_inputs(graph: fx.Graph) -> None:
    """Says that backward may read rounded values, so that the last bits of what it rebuilds do not count."""
    for node in graph.nodes:
        node.meta[ROUNDED] = True


def recomputation_of(node: fx.Node) -> Recomputation | None:
    """The form in which backward recomputes ``node``, if it is not the call itself."""
    if node.target is not operator.getitem or node.args[1] != 0:
        return None
    made = node_at(node, 0)
    items = items_of(made)
    if ROUNDED in made.meta and made.target is max_pool_op and 1 in items:
        return MaxPool(node_at(made, 0), items[1], made.args[1:6])
    made_by = RECOMPUTATIONS.get(name_of(made))
    return None if made_by is None else made_by(made, arguments_of(made), items)


def _batch_norm(made: fx.Node, given: dict[str, Any], items: dict[int, fx.Node]) -> BatchNorm | None:
    eps = given["eps"] if "eps" in given else given["epsilon"]
    x = given["input"]
    exact = {1, 2} <= set(items) and value_of(items[1]).dtype == wide_dtype(value_of(x).dtype)
    mean, rstd = (items[1], items[2]) if exact else (None, None)
    norm = BatchNorm(x, given["weight"], given["bias"], mean, rstd, eps)
    return norm if given["training"] is True else None


def _dropout(made: fx.Node, given: dict[str, Any], items: dict[int, fx.Node]) -> Dropout | None:
    return Dropout(given["input"], items[1], given["p"]) if 1 in items and given["train"] is not False else None


def _norm(made: fx.Node, given: dict[str, Any], items: dict[int, fx.Node]) -> Norm | None:
    norm = NormCall.of(made)
    if norm is None:
        return None
    again = Norm(*norm)
    if again.norm.own:
        again = again._replace(running_mean=None, running_var=None)
    return again._replace(mean=items[1], rstd=items[2]) if {1, 2} <= set(items) else again


# The ops that run again in another form, and the function that returns the form.
RECOMPUTATIONS: dict[str, Callable[[fx.Node, dict[str, Any], dict[int, fx.Node]], Recomputation | None]] = {
    "native_dropout": _dropout,
    "norm": _norm,
    "_native_batch_norm_legit_functional": _batch_norm,
    "_native_batch_norm_legit": _batch_norm,
    "native_batch_norm": _batch_norm,
    "cudnn_batch_norm": _batch_norm,
    "miopen_batch_norm": _batch_norm,
}
