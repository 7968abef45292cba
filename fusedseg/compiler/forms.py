"""Calls that backward computes again in another form, because the same call would do more than compute its result.

Batch norm would move its running statistics again.  On a CPU its output is rebuilt in one pass, from the mean and
1 / sqrt(var + eps) that backward reads anyway: aten rounds weight / sqrt(var + eps) once in both calls, so the bits are
the same.  Elsewhere it runs again with the statistics of the batch.  Instance norm is traced as the batch norm of one
sample that has the channels of all samples.  Norms in eval mode run again as they are.

A group norm with parameters is written as such a batch norm too, which saves its pass over the statistics.  A layer
norm runs again: its rows lie in the cache, and one kernel takes less time than a difference, a product and a sum.

Dropout would draw another mask.  Its output is its input times the mask that backward reads anyway.
"""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx

from .. import _backend, _torch
from .joint import call, is_tensor, items_of, name_of, value_of

aten = torch.ops.aten
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
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

    def sources(self) -> list[fx.Node]:
        given = (self.x, self.weight, self.bias, self.mean, self.rstd)
        return [source for source in given if source is not None]

    def write(self, graph: fx.Graph, read: Read, before: fx.Node) -> fx.Node:
        """A node that computes the output again."""
        x, weight, bias, mean, rstd = map(read, (self.x, self.weight, self.bias, self.mean, self.rstd))
        if mean is None or rstd is None:
            again = call(graph, _torch.batch_norm_without_running, x, weight, bias, True, 0.0, self.eps, before=before)
        else:
            # A shape may be symbolic, so a node takes it from the statistics.
            one = call(graph, aten.full_like.default, mean, 1, before=before)
            scale = rstd if weight is None else call(graph, aten.mul.Tensor, rstd, weight, before=before)
            given = (x, scale, bias, mean, one, False, 0.0, 0.0)
            again = call(graph, aten.native_batch_norm.default, *given, before=before)
        return call(graph, operator.getitem, again, 0, before=before)


class GroupNorm(NamedTuple):
    """The output of a group norm, from its statistics of shape (N, groups)."""

    x: fx.Node
    weight: fx.Node
    bias: fx.Node
    mean: fx.Node
    rstd: fx.Node

    def sources(self) -> list[fx.Node]:
        return list(self)

    def write(self, graph: fx.Graph, read: Read, before: fx.Node) -> fx.Node:
        """A node that computes the output again."""
        x, weight, bias, mean, rstd = map(read, self)
        shape, (N, G) = value_of(x).shape, value_of(mean).shape
        C = shape[1]

        def make(op: Any, *args: Any, **kwargs: Any) -> fx.Node:
            return call(graph, op, *args, before=before, **kwargs)

        def spread(statistic: fx.Node, by: fx.Node) -> fx.Node:
            """The product of a value for each group and one for each channel, for all channels of all samples."""
            whole = make(aten.mul.Tensor, make(aten.unsqueeze.default, statistic, 2), by)
            return make(aten.view.default, whole, [N * C])

        value = value_of(mean)
        one = make(aten.full.default, [N * C], 1, dtype=value.dtype, device=value.device, pin_memory=False)
        per_channel = make(aten.view.default, one, [N, G, C // G])
        scale = spread(rstd, make(aten.view.default, weight, [G, C // G]))
        shift = make(aten.mul.Tensor, make(aten.view.default, one, [N, C]), bias)
        flat = make(aten.view.default, x, [1, N * C, value_of(x).numel() // (N * C)])
        given = (flat, scale, make(aten.view.default, shift, [N * C]), spread(mean, per_channel), one, False, 0.0, 0.0)
        again = make(operator.getitem, make(aten.native_batch_norm.default, *given), 0)
        return make(aten.view.default, again, list(shape))


class Dropout(NamedTuple):
    """The output of a dropout that has drawn a mask."""

    x: fx.Node
    mask: fx.Node
    p: float

    def sources(self) -> list[fx.Node]:
        return [self.x, self.mask]

    def write(self, graph: fx.Graph, read: Read, before: fx.Node) -> fx.Node:
        """A node that computes the output again, as dropout does; Inductor has no ``native_dropout_backward``."""
        scale = 1 / (1 - self.p) if self.p < 1 else 0.0
        left = call(graph, aten.mul.Tensor, read(self.x), read(self.mask), before=before)
        return call(graph, aten.mul.Tensor, left, scale, before=before)


# The batch norms, by name: the places of ``training`` and ``eps`` among their arguments.
NORMS = {
    "_native_batch_norm_legit_functional": (5, 7),
    "_native_batch_norm_legit": (5, 7),
    "native_batch_norm": (5, 7),
    "cudnn_batch_norm": (5, 7),
    "miopen_batch_norm": (5, 7),
}
WITHOUT_RUNNING = (3, 5)


def form_of(node: fx.Node) -> BatchNorm | GroupNorm | Dropout | None:
    """The form in which backward computes ``node`` again, if it is not the call itself."""
    if node.target is not operator.getitem or node.args[1] != 0:
        return None
    made: Any = node.args[0]
    name, items = name_of(made), items_of(made)
    if name == "native_dropout" and 1 in items and made.args[2] is not False:
        return Dropout(made.args[0], items[1], made.args[1])
    if name == "native_group_norm":
        return _group_norm(made, items)
    if name not in NORMS:
        return None
    training, eps = WITHOUT_RUNNING if made.target._overloadname == "no_stats" else NORMS[name]
    if made.args[training] is not True:
        return None
    norm = BatchNorm(made.args[0], made.args[1], made.args[2], made.args[eps], items.get(1), items.get(2))
    return norm if _is_certain(norm) else norm._replace(mean=None, rstd=None)


def _group_norm(made: Any, items: dict[int, fx.Node]) -> GroupNorm | None:
    """The norm if a batch norm gives the same bits, as it does in contiguous memory for parameters of one dtype."""
    x, weight, bias = made.args[:3]
    if weight is None or bias is None or not {1, 2} <= set(items):
        return None
    values = [value_of(t) for t in (x, weight, bias, items[1])]
    sizes = values[0].shape
    alike = values[0].dtype in (torch.float32, torch.float64) and len({t.dtype for t in values}) == 1
    if not alike or values[0].device.type != "cpu" or any(not isinstance(n, int) for n in sizes) or 0 in sizes:
        return None
    return GroupNorm(x, weight, bias, items[1], items[2]) if values[0].is_contiguous() else None


def _is_certain(norm: BatchNorm) -> bool:
    """Whether rebuilding from statistics gives the same bits.

    With parameters in half precision aten rounds the statistics; in memory with gaps or with another order of
    dimensions it multiplies in another order.
    """
    x = value_of(norm.x)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    # Where the ops of this package serve, ``triton_ops.py`` rebuilds the output.
    elsewhere = x.device.type != "cpu" or _backend.takes_triton(x.device)
    if norm.mean is None or norm.rstd is None or elsewhere or value_of(norm.mean).dtype != wide:
        return False
    dense = x.is_contiguous() or (x.dim() in FORMATS and x.is_contiguous(memory_format=FORMATS[x.dim()]))
    return dense and all(value_of(p).dtype == wide for p in (norm.weight, norm.bias) if is_tensor(p))


def forget_running(graph: fx.Graph) -> None:
    """Backward of a batch norm in training mode gets no running statistics, which it does not read.

    Otherwise forward would keep copies of them.
    """
    for node in graph.nodes:
        if name_of(node) == "native_batch_norm_backward" and node.args[7] is True:
            node.args = (*node.args[:3], None, None, *node.args[5:])
