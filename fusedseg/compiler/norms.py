"""Rebuilding the output of a batch norm without moving its running statistics again.

Instance norm is traced as the batch norm of one sample that has the channels of all samples, so it is one too.  On a
CPU the output is rebuilt in one pass, from the mean and 1 / sqrt(var + eps) that backward reads anyway: aten rounds
weight / sqrt(var + eps) once in both calls, so the bits are the same.  Elsewhere the norm runs again with the
statistics of the batch.  Norms in eval mode, group norms and layer norms have no such state, and run again as they are.
"""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx

from .joint import call, is_tensor, items_of, name_of, value_of

aten = torch.ops.aten
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


class BatchNorm(NamedTuple):
    """The call of a batch norm with the statistics of its input."""

    x: fx.Node
    weight: fx.Node | None
    bias: fx.Node | None
    eps: float


# The ops, by name: the places of ``training`` and ``eps`` among their arguments.
FORMS = {
    "_native_batch_norm_legit_functional": (5, 7),
    "_native_batch_norm_legit": (5, 7),
    "native_batch_norm": (5, 7),
    "cudnn_batch_norm": (5, 7),
    "miopen_batch_norm": (5, 7),
}
WITHOUT_RUNNING = (3, 5)


def norm_of(node: fx.Node) -> BatchNorm | None:
    """The batch norm of which ``node`` is the output, if it uses the statistics of its input."""
    if node.target is not operator.getitem or node.args[1] != 0:
        return None
    norm: Any = node.args[0]
    if name_of(norm) not in FORMS:
        return None
    training, eps = WITHOUT_RUNNING if norm.target._overloadname == "no_stats" else FORMS[name_of(norm)]
    if norm.args[training] is not True:
        return None
    return BatchNorm(*norm.args[:3], norm.args[eps])


def rebuilt(graph: fx.Graph, node: fx.Node, norm: BatchNorm, read: Callable[[Any], Any], before: fx.Node) -> fx.Node:
    """A node that computes the output ``node`` again.

    read: gives what backward reads in place of a node of forward.
    """
    items = items_of(node.args[0])  # type: ignore[arg-type]
    x, weight, bias = read(norm.x), read(norm.weight), read(norm.bias)
    if by_statistics(node, norm):
        mean, rstd = read(items[1]), read(items[2])
        scale = rstd if weight is None else call(graph, aten.mul.Tensor, rstd, weight, before=before)
        value = value_of(items[1])
        one = call(graph, aten.full.default, list(value.shape), 1, dtype=value.dtype, device=value.device,
                   pin_memory=False, before=before)  # fmt: skip
        again = call(graph, aten.native_batch_norm.default, x, scale, bias, mean, one, False, 0.0, 0.0, before=before)
    else:
        op = aten._native_batch_norm_legit.no_stats
        again = call(graph, op, x, weight, bias, True, 0.0, norm.eps, before=before)
    return call(graph, operator.getitem, again, 0, before=before)


def by_statistics(node: fx.Node, norm: BatchNorm) -> bool:
    """Whether the output ``node`` is rebuilt from the mean and 1 / sqrt(var + eps) of forward."""
    items = items_of(node.args[0])  # type: ignore[arg-type]
    return 1 in items and 2 in items and _is_certain(norm, value_of(items[1]))


def _is_certain(norm: BatchNorm, mean: Any) -> bool:
    """Whether rebuilding from statistics gives the same bits.

    With parameters in half precision aten rounds the statistics; in memory with gaps or with another order of
    dimensions it multiplies in another order.
    """
    x = value_of(norm.x)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    if x.device.type != "cpu" or mean.dtype != wide:
        return False
    dense = x.is_contiguous() or (x.dim() in FORMATS and x.is_contiguous(memory_format=FORMATS[x.dim()]))
    return dense and all(value_of(p).dtype == wide for p in norm[1:3] if is_tensor(p))


def forget_running(graph: fx.Graph) -> None:
    """Backward of a batch norm in training mode gets no running statistics, which it does not read.

    Otherwise forward would keep copies of them.
    """
    for node in graph.nodes:
        name = name_of(node)
        if name == "native_batch_norm_backward" and node.args[7] is True:
            _without(node, 3, 4)


def _without(node: fx.Node, *places: int) -> None:
    node.args = tuple(None if place in places else value for place, value in enumerate(node.args))
