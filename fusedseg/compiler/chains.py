"""Chains of a graph, norm [+ residual] and activation, and gradients of such chains, that the Triton ops compute.

An instance norm is traced as the batch norm of a view of its input.
"""

import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from .. import rules
from ..activation import TABLE, Activation
from ..ops.low_bit.graph import unpack_op
from ..ops.norm import sample_norm
from ..ops.norm.call import Norm as Spec
from .joint import arguments_of, is_alike, is_op, is_tensor, items_of, name_of, node_at, value_of
from .norm_calls import is_served

aten = torch.ops.aten
IDENTITY = Activation("identity", 0.0)


# The activations that the kernels compute, each with its ops in a graph.
ROWS = [
    (getattr(aten, row.ops[0]).default, getattr(aten, row.backward).default, row)
    for row in rules.ROWS
    if row.backward and row.name in TABLE and row.name != "selu"
]
OF_FORWARD, OF_BACKWARD = ({row[column] for row in ROWS} for column in (0, 1))
VIEWS = ("view", "_unsafe_view", "reshape")


def activation_of(node: fx.Node) -> Activation | None:
    """The activation that a node computes, or whose gradient it computes."""
    if node.target not in OF_FORWARD and node.target not in OF_BACKWARD:
        return None
    given = arguments_of(node)
    for forward, backward, row in ROWS:
        # relu itself has no threshold.
        if node.target in (forward, backward) and all(given.get(key, value) == value for key, value in row.fixed):
            return Activation(row.name, float(given[row.parameter]) if row.parameter else 0.0)
    return None


NORMS = {
    "_native_batch_norm_legit", "_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training",
    "native_batch_norm", "native_group_norm", "sample_norm",
}  # fmt: skip


class Norm(NamedTuple):
    """A norm of a graph, and the nodes that it reads: the running statistics, or those that its output is rebuilt from.

    rebuilt: whether its output is rebuilt; otherwise the node computes statistics, or reads running statistics.
    """

    node: fx.Node
    x: fx.Node
    weight: fx.Node | None
    bias: fx.Node | None
    mean: fx.Node | None
    second: fx.Node | None
    spec: Spec
    rebuilt: bool = False


def norm_of(node: fx.Node) -> Norm | None:
    """The norm that a node computes, if the ops of this package compute the same."""
    if name_of(node) not in NORMS:
        return None
    given = arguments_of(node)
    x = given["input"]
    if not is_served(x) or not is_alike(value_of(x), value_of(node)[0]):
        return None
    weight, bias, mean, var = (given.get(name) for name in ("weight", "bias", "running_mean", "running_var"))
    if name_of(node) == "native_group_norm":
        return Norm(
            node, x, weight, bias, None, None, Spec("input", IDENTITY, given["eps"], 0.0, True, "group", given["group"])
        )
    if name_of(node) == "sample_norm":
        known = given["mean"], given["rstd"]
        spec = sample_norm.norm_of(value_of(x).shape[1], given["group"], given["eps"])
        return Norm(node, x, weight, bias, *known, spec, rebuilt=known[0] is not None)
    spec = Spec("input", IDENTITY, given["eps"], given["momentum"] or 0.0, given.get("training", False))
    if spec.own or not isinstance(var, fx.Node) or name_of(var) != "full_like":
        return Norm(node, x, weight, bias, mean, var, spec)
    # ``forms.BatchNorm`` writes its output so: the weight is multiplied by rstd, and the variance is 1.
    scale = _before_cast(given["weight"])
    rstd, weight = (node_at(scale, 0), node_at(scale, 1)) if name_of(scale) == "mul" else (scale, None)
    bias, mean = bias and _before_cast(bias), mean and _before_cast(mean)
    return Norm(node, x, weight, bias, mean, rstd, spec._replace(own=True), rebuilt=True)


def _before_cast(node: fx.Node) -> fx.Node:
    return node_at(node, 0) if name_of(node) in ("_to_copy", "convert_element_type") else node


def content_of(value: object) -> object:
    """What a node computes: equal for two views, or two repetitions, of one tensor, or if both unpack the same."""
    if isinstance(value, (list, tuple)):
        return tuple(map(content_of, value))
    if is_op(value) and (name_of(value) in (*VIEWS, "repeat") or value.target is unpack_op._opoverload):
        return (value.target, *map(content_of, value.args))
    return value


class Chain(NamedTuple):
    """An activation's input, as far as the norm: ``view`` of the norm's output, or None, and what is added to it."""

    norm: Norm
    view: fx.Node | None
    residual: fx.Node | None
    inner: list[fx.Node]


def chain_of(y: object) -> Chain | None:
    """The norm whose output, perhaps in another view and with a residual, is ``y``."""
    if not isinstance(y, fx.Node):
        return None
    ways: list[tuple[fx.Node, fx.Node | None]] = [(y, None)]
    if y.target in (aten.add.Tensor, aten.add_.Tensor) and not y.kwargs and all(map(is_tensor, y.args)):
        one, other = node_at(y, 0), node_at(y, 1)
        ways = [(one, other), (other, one)]
    for way, residual in ways:
        inner = [] if residual is None else [y]
        view = way if name_of(way) in VIEWS else None
        out = way if view is None else node_at(view, 0)
        first = out.target is operator.getitem and out.args[1] == 0
        norm = norm_of(node_at(out, 0)) if first else None
        if norm is None or (view is not None and name_of(norm.x) not in VIEWS):
            continue
        if residual is not None and not is_alike(value_of(residual), value_of(way)):
            continue
        inner += [out] if view is None else [view, out]
        return Chain(norm, view, residual, inner)
    return None


# The backward ops of norms, with the names of what they read: the gradient, the mean, and the rstd.
GRADIENTS = {
    "native_batch_norm_backward": ("grad_out", "save_mean", "save_invstd"),
    "native_group_norm_backward": ("grad_out", "mean", "rstd"),
    "sample_norm_backward": ("grad_out", "mean", "rstd"),
}


def statistics_of(graph: fx.Graph) -> dict[Any, tuple[fx.Node, fx.Node]]:
    """By what they compute, the group norms whose gradients a graph has, and their mean and rstd."""
    found = {}
    for node in graph.nodes:
        if name_of(node) == "native_group_norm_backward":
            given = arguments_of(node)
            found[content_of([given["input"], given["weight"]])] = given["mean"], given["rstd"]
    return found


class Gradient(NamedTuple):
    """The gradients of a chain: the backward ops of norm and activation, perhaps with a view between them."""

    node: fx.Node
    view: fx.Node | None
    slope: fx.Node
    chain: Chain
    act: Activation
    mean: fx.Node
    second: fx.Node

    @property
    def sources(self) -> tuple[fx.Node | None, ...]:
        """What is read beside the gradient."""
        norm = self.chain.norm
        return norm.x, norm.weight, norm.bias, self.chain.residual, self.mean, self.second


def gradient_of(node: fx.Node) -> Gradient | None:
    """The gradients that end at the backward op of a norm."""
    given, names = arguments_of(node), GRADIENTS[name_of(node)]
    g, mean, second = (given[name] for name in names)
    view = g if name_of(g) in VIEWS else None
    slope = g if view is None else view.args[0]
    act = activation_of(slope) if is_op(slope) and slope.target in OF_BACKWARD else None
    chain = None if act is None else chain_of(_argument_of(slope, act))
    if act is None or chain is None or (chain.view is None) != (view is None):
        return None
    alone = len(slope.users) == 1 and (view is None or len(view.users) == 1)
    if not (alone or chain.residual is not None) or not _belongs(chain.norm, node, given):
        return None
    if not given.get("train", True):
        mean, second = given["running_mean"], given["running_var"]
    return Gradient(node, view, slope, chain, act, mean, second)


def _argument_of(slope: fx.Node, act: Activation) -> Any:
    """The argument of the activation with this gradient: some gradients read it, others read the result."""
    given = arguments_of(slope)
    y = given["self_or_result"] if "self_or_result" in given else given["self"]
    out = y
    while name_of(out) in VIEWS:
        # An activation that writes over a view is traced with views of its output there and back.
        out = out.args[0]
    if isinstance(out, fx.Node) and activation_of(out) == act and is_alike(value_of(out), value_of(y)):
        return out.args[0]
    return y


def _belongs(norm: Norm, node: fx.Node, given: dict[str, Any]) -> bool:
    """Whether a backward op, with its arguments by name, is that of a norm."""
    if content_of([norm.x, norm.weight]) != content_of([given["input"], given["weight"]]):
        return False
    dx = items_of(node).get(0)
    return norm.spec.own == given.get("train", True) and dx is not None and is_alike(value_of(norm.x), value_of(dx))
