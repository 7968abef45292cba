"""Calls that backward computes again in another form, because the same call would do more than compute its result.

Batch norm would move its running statistics again.  On a CPU its output is rebuilt in one pass, from the mean and
1 / sqrt(var + eps) that backward reads anyway: aten rounds weight / sqrt(var + eps) once in both calls, so the bits are
the same.  Triton rebuilds it in this way too.  Elsewhere it runs again with the statistics of the batch.  Instance norm
is traced as the batch norm of one sample that has the channels of all samples.  Norms in eval mode run again as they
are.

A group norm with parameters is written as such a batch norm too, which saves its pass over the statistics.  A layer
norm runs again: its rows lie in the cache, and one kernel takes less time than a difference, a product and a sum.

Dropout would draw another mask.  Its output is its input times the mask that backward reads anyway.

With the option "bits" the input is rounded, so last bits do not count.  Then every norm is rebuilt from its statistics,
on all devices and in all dtypes, layer norm too; and a max-pool of this package picks the values at the positions that
backward reads anyway, because the maximum of rounded values would be too large on average.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx

from .. import _torch
from ..ops.low_bit.spec import wide_dtype
from ..ops.max_pool.op import max_pool_op, max_pool_pick_op
from ..ops.norm.sample_norm import sample_norm_op
from .joint import arguments_of, call, form_in, is_tensor, items_of, name_of, node_at, value_of
from .norm_calls import is_planes_or_rows, is_served

aten = torch.ops.aten
# The mark of calls whose inputs may be rounded in backward.
ROUNDED = "fusedseg_rounded"
# The mark of nodes that may lie in channels_last although the trace says that they are contiguous.
ROWS = "fusedseg_rows"
# What gives the node that backward reads in place of a node of forward.
Read = Callable[[Any], Any]


class BatchNorm(NamedTuple):
    """The output of a batch norm that uses the statistics of its input.

    mean, rstd: the nodes of its statistics if the output is rebuilt from them.
    """

    x: fx.Node
    weight: fx.Node | None
    bias: fx.Node | None
    eps: float
    mean: fx.Node | None
    rstd: fx.Node | None

    def write(self, graph: fx.Graph, read: Read, before: fx.Node) -> fx.Node:
        """A node that computes the output again."""
        x, weight, bias, mean, rstd = map(read, (self.x, self.weight, self.bias, self.mean, self.rstd))
        if mean is None or rstd is None:
            again = call(graph, _torch.batch_norm_without_running, x, weight, bias, True, 0.0, self.eps, before=before)
        else:
            scale = rstd if weight is None else call(graph, aten.mul.Tensor, rstd, weight, before=before)
            return _normed(graph, x, scale, bias, mean, before)
        return call(graph, operator.getitem, again, 0, before=before)


class _FromStatistics(NamedTuple):
    x: fx.Node
    weight: fx.Node | None
    bias: fx.Node | None
    mean: fx.Node
    rstd: fx.Node


class GroupNorm(_FromStatistics):
    """The output of a group norm, from its statistics of shape (N, groups)."""

    def write(self, graph: fx.Graph, read: Read, before: fx.Node) -> fx.Node:
        """A node that computes the output again."""
        x, weight, bias, *statistics = map(read, self)
        # PyTorch traces statistics in half precision that are fp32 where they are computed.
        mean, rstd = (_widened(graph, x, t, before) for t in statistics)
        shape, G = form_in(graph, x, before)[0], value_of(mean).shape[1]
        N, C = shape[:2]
        make = functools.partial(call, graph, before=before)

        def spread(statistic: fx.Node, by: fx.Node) -> fx.Node:
            """The product of a value for each group and one for each channel, for all channels of all samples."""
            return make(aten.view.default, make(aten.mul.Tensor, make(aten.unsqueeze.default, statistic, 2), by), [-1])

        value = value_of(mean)
        options = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
        ones = make(aten.full.default, [N, C], 1, **options)
        per_channel = make(aten.view.default, ones, [N, G, C // G])
        by_weight = per_channel if weight is None else make(aten.view.default, weight, [G, C // G])
        shift = None if bias is None else make(aten.view.default, make(aten.mul.Tensor, ones, bias), [-1])
        # One sample with the channels of all samples; its number of positions follows.
        channels = N * C if isinstance(N, int) and isinstance(C, int) else make(operator.mul, N, C)
        flat = make(aten.view.default, x, [1, channels, -1])
        again = _normed(graph, flat, spread(rstd, by_weight), shift, spread(mean, per_channel), before)
        return make(aten.view.default, again, list(shape))


class SampleNorm(NamedTuple):
    """The output of a norm by samples of this package, from its statistics of shape (N, groups)."""

    x: fx.Node
    weight: fx.Node | None
    bias: fx.Node | None
    mean: fx.Node
    rstd: fx.Node
    groups: int
    eps: float

    def write(self, graph: fx.Graph, read: Read, before: fx.Node) -> fx.Node:
        """A node that computes the output again."""
        given = (*map(read, self[:5]), self.groups, self.eps)
        again = call(graph, sample_norm_op._opoverload, *given, before=before)
        return call(graph, operator.getitem, again, 0, before=before)


class LayerNorm(_FromStatistics):
    """The output of a layer norm, from the statistics of its rows; only for rounded inputs."""

    def write(self, graph: fx.Graph, read: Read, before: fx.Node) -> fx.Node:
        """A node that computes the output again: the batch norm of one sample whose channels are the rows."""
        x, weight, bias, mean, rstd = map(read, self)
        make = functools.partial(call, graph, before=before)
        shape = form_in(graph, x, before)[0]
        rstd, mean = (make(aten.view.default, statistic, [-1]) for statistic in (rstd, mean))
        rows = form_in(graph, mean, before)[0]
        flat = make(aten.view.default, x, [1, *rows, -1])
        again = make(aten.view.default, _normed(graph, flat, rstd, None, mean, before), list(shape))
        if weight is not None:
            again = make(aten.mul.Tensor, again, weight)
        return again if bias is None else make(aten.add.Tensor, again, bias)


def _widened(graph: fx.Graph, x: fx.Node, t: fx.Node, before: fx.Node) -> fx.Node:
    """A vector in the dtype of the arithmetic on ``x``."""
    wide = wide_dtype(value_of(x).dtype)
    if value_of(t).dtype == wide:
        return t
    return call(graph, torch.ops.prims.convert_element_type.default, t, wide, before=before)


def _normed(
    graph: fx.Graph, x: fx.Node, scale: fx.Node, shift: fx.Node | None, mean: fx.Node, before: fx.Node
) -> fx.Node:
    """(x - mean) scale + shift for each channel, in one pass: a batch norm in eval mode."""
    scale, mean = _widened(graph, x, scale, before), _widened(graph, x, mean, before)
    shift = None if shift is None else _widened(graph, x, shift, before)
    # A shape may be symbolic, so a node takes it from the statistics.
    one = call(graph, aten.full_like.default, mean, 1, before=before)
    given = (x, scale, shift, mean, one, False, 0.0, 0.0)
    return call(
        graph, operator.getitem, call(graph, aten.native_batch_norm.default, *given, before=before), 0, before=before
    )


class MaxPool(NamedTuple):
    """The output of a max-pool of this package; only for rounded inputs."""

    x: fx.Node
    codes: fx.Node
    window: tuple[Any, ...]

    def write(self, graph: fx.Graph, read: Read, before: fx.Node) -> fx.Node:
        """A node that picks the values at the positions of the maxima."""
        # The op asks for the size and the format of x, which its transpose needs.
        rows = not value_of(self.codes).is_contiguous()
        given = (read(self.x), read(self.codes), [], rows, *self.window)
        return call(graph, max_pool_pick_op._opoverload, *given, before=before)


class Dropout(NamedTuple):
    """The output of a dropout that has drawn a mask."""

    x: fx.Node
    mask: fx.Node
    p: float

    def write(self, graph: fx.Graph, read: Read, before: fx.Node) -> fx.Node:
        """A node that computes the output again, as dropout does; Inductor has no ``native_dropout_backward``."""
        scale = 1 / (1 - self.p) if self.p < 1 else 0.0
        left = call(graph, aten.mul.Tensor, read(self.x), read(self.mask), before=before)
        return call(graph, aten.mul.Tensor, left, scale, before=before)


BATCH_NORMS = {
    "_native_batch_norm_legit_functional", "_native_batch_norm_legit", "native_batch_norm", "cudnn_batch_norm",
    "miopen_batch_norm",
}  # fmt: skip
CALLS = {"native_dropout", "native_group_norm", "native_layer_norm", "sample_norm", *BATCH_NORMS}
# The norms that multiply and shift each channel.
OF_CHANNELS = BatchNorm, GroupNorm, SampleNorm
Form = BatchNorm | GroupNorm | SampleNorm | LayerNorm | Dropout | MaxPool


def sources_of(form: Form) -> list[fx.Node]:
    """The nodes that the form reads."""
    return [source for source in form if isinstance(source, fx.Node)]


def round_inputs(graph: fx.Graph) -> None:
    """Says that backward may read rounded values, so that the last bits of what it rebuilds do not count."""
    for node in graph.nodes:
        node.meta[ROUNDED] = True


def mark_rows(graph: fx.Graph) -> None:
    """Marks what may lie in channels_last although PyTorch's trace says that it is contiguous.

    Group norm on a CPU keeps channels_last, which the trace does not know.  Neither does what follows from its output.
    """
    for node in graph.nodes:
        begins = name_of(node) == "native_group_norm" and not value_of(node_at(node, 0)).is_contiguous()
        if begins or any(ROWS in source.meta for source in node.all_input_nodes):
            node.meta[ROWS] = True


def form_of(node: fx.Node) -> Form | None:
    """The form in which backward computes ``node`` again, if it is not the call itself."""
    if node.target is not operator.getitem or node.args[1] != 0:
        return None
    made = node_at(node, 0)
    name, items, rounded = name_of(made), items_of(made), ROUNDED in made.meta
    if rounded and made.target is max_pool_op._opoverload and 1 in items:
        return MaxPool(node_at(made, 0), items[1], made.args[1:6])
    if name not in CALLS:
        return None
    given = arguments_of(made)
    x, weight, bias = given["input"], given.get("weight"), given.get("bias")
    if name == "native_dropout":
        return Dropout(x, items[1], given["p"]) if 1 in items and given["train"] is not False else None
    if name not in BATCH_NORMS:
        if not {1, 2} <= set(items):
            return None
        if name == "sample_norm":
            return SampleNorm(x, weight, bias, items[1], items[2], given["group"], given["eps"])
        if name == "native_group_norm":
            return _group_norm(GroupNorm(x, weight, bias, items[1], items[2]), rounded)
        return _layer_norm(LayerNorm(x, weight, bias, items[1], items[2])) if rounded else None
    if given["training"] is not True:
        return None
    eps = given["eps"] if "eps" in given else given["epsilon"]
    norm = BatchNorm(x, weight, bias, eps, items.get(1), items.get(2))
    if rounded and norm.mean is not None and norm.rstd is not None:
        return norm
    return norm if _is_certain(norm) else norm._replace(mean=None, rstd=None)


def _group_norm(norm: GroupNorm, rounded: bool) -> GroupNorm | None:
    """The norm if a batch norm gives the same bits, as it does in contiguous memory for parameters of one dtype."""
    x, weight, bias, mean, _ = norm
    if not value_of(x).is_contiguous() or value_of(x).dim() < 3:
        return None
    if rounded:
        return norm
    if ROWS in x.meta or weight is None or bias is None or is_served(x):
        # ``triton_ops.py`` computes the output from the statistics, or the call runs again.
        return None
    values = [value_of(t) for t in (x, weight, bias, mean)]
    sizes = values[0].shape
    alike = values[0].dtype in (torch.float32, torch.float64) and len({t.dtype for t in values}) == 1
    if not alike or values[0].device.type != "cpu" or any(not isinstance(n, int) for n in sizes) or 0 in sizes:
        return None
    return norm


def _layer_norm(norm: LayerNorm) -> LayerNorm | None:
    """The norm, unless it has parameters of another dtype, by which a product would be another one too."""
    x = value_of(norm.x)
    alike = all(value_of(t).dtype == x.dtype for t in (norm.weight, norm.bias) if t is not None)
    return norm if x.is_contiguous() and alike else None


def _is_certain(norm: BatchNorm) -> bool:
    """Whether rebuilding from statistics gives the same bits.

    With parameters in half precision aten rounds the statistics; in memory with gaps or with another order of
    dimensions it multiplies in another order.
    """
    x = value_of(norm.x)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    if norm.mean is None or norm.rstd is None:
        return False
    if is_served(norm.x):
        # ``triton_ops.py`` rebuilds the output, whose last bits may differ.
        return True
    if x.device.type != "cpu" or value_of(norm.mean).dtype != wide:
        return False
    return is_planes_or_rows(x) and all(value_of(p).dtype == wide for p in (norm.weight, norm.bias) if is_tensor(p))


def forget_running(graph: fx.Graph) -> None:
    """Backward of a batch norm in training mode gets no running statistics, which it does not read.

    Otherwise forward would keep copies of them.
    """
    for node in graph.nodes:
        if name_of(node) == "native_batch_norm_backward" and node.args[7] is True:
            node.args = (*node.args[:3], None, None, *node.args[5:])
