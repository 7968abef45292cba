"""Norm and activation as the Triton ops of this package, for the codegen "aten" where these serve the device.

The pass runs on forward and on backward after they have been divided, so what is kept is the same with and without it.

    forward     act(norm(x) [+ residual])                   one call, which writes over x where nobody else reads x
    rebuild     the same in backward                        one call from the mean and the rstd that are kept
    backward    norm_backward(act_backward(dz, ...), x)     one call, which writes over dz where nobody else reads dz

An instance norm is traced as the batch norm of a view of its input; the activation moves to that view.  Norms without
an activation stay PyTorch's.  Which device is served follows from the graph and from ``fusedseg.backend``.
"""

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from .. import _backend, _torch
from ..activation import Activation
from ..ops.check import ACTIVATION_DTYPES
from ..ops.layout import FORMATS, dense, like
from ..ops.norm import passes
from ..ops.norm.spec import Passed, Saved, Spec, Wanted
from .joint import is_alike, is_op, is_tensor, items_of, name_of, value_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Forward:
    """The function of a node: z, mean, and rstd (the running variance if the norm uses running statistics)."""

    spec: Spec
    in_place: bool = False
    __name__ = "norm_act"

    def __call__(self, x: Tensor, *vectors: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
        weight, bias, residual, running_mean, running_var = vectors
        source, layout = dense(x)
        laid = None if residual is None else like(residual, source)
        passed = Passed(source, weight, bias, laid, None, running_mean, running_var)
        out = source if self.in_place else None
        z, mean, second, *_ = passes.forward(passed, self.spec, self.spec.layout(source, layout), None, out)
        if self.spec.kind == "group" and mean is not None:
            mean, second = (v.view(x.shape[0], -1) for v in (mean, second))
        return z, mean, second


@dataclass(frozen=True)
class Rebuild:
    """The function of a node: z again, from x and its statistics."""

    spec: Spec
    __name__ = "norm_act_rebuild"

    def __call__(self, x: Tensor, *tensors: Any) -> Tensor:
        weight, bias, residual, mean, second = tensors
        saved = Saved(dense(x)[0], weight, bias, residual, None, mean.flatten(), second.flatten())
        return passes.rebuild(saved, self.spec)


@dataclass(frozen=True)
class Backward:
    """The function of a node: the gradients of x, weight, bias and residual."""

    spec: Spec
    affine: bool
    in_place: bool = False
    __name__ = "norm_act_backward"

    def __call__(self, dz: Tensor, x: Tensor, *tensors: Any) -> tuple[Tensor | None, ...]:
        weight, bias, residual, mean, second = tensors
        source, layout = dense(x)
        saved = Saved(source, weight, bias, residual, None, mean.flatten(), second.flatten())
        into = dz if self.in_place and dz.stride() == source.stride() else None
        wanted = Wanted(self.affine, residual is not None, into)
        return passes.backward(dz, saved, self.spec, self.spec.layout(source, layout), None, wanted)[:4]


class Row(NamedTuple):
    """An activation: its name in this package, and its ops in a graph.

    ``parameter`` is the name of the argument that is its parameter; ``fixed`` has the values of other arguments.
    """

    name: str
    forward: Any
    backward: Any
    parameter: str = ""
    fixed: tuple[tuple[str, Any], ...] = ()


ROWS = (
    Row("relu", aten.relu.default, aten.threshold_backward.default, fixed=(("threshold", 0),)),
    Row("leaky_relu", aten.leaky_relu.default, aten.leaky_relu_backward.default, "negative_slope"),
    Row("elu", aten.elu.default, aten.elu_backward.default, "alpha", (("scale", 1), ("input_scale", 1))),
    Row("silu", aten.silu.default, aten.silu_backward.default),
    Row("gelu", aten.gelu.default, aten.gelu_backward.default, fixed=(("approximate", "none"),)),
    Row("gelu_tanh", aten.gelu.default, aten.gelu_backward.default, fixed=(("approximate", "tanh"),)),
    Row("mish", aten.mish.default, aten.mish_backward.default),
    Row("hardswish", aten.hardswish.default, aten.hardswish_backward.default),
    Row("relu6", aten.hardtanh.default, aten.hardtanh_backward.default, fixed=(("min_val", 0), ("max_val", 6))),
    Row("softplus", aten.softplus.default, aten.softplus_backward.default, fixed=(("beta", 1), ("threshold", 20))),
)
OF_FORWARD, OF_BACKWARD = ({row[column] for row in ROWS} for column in (1, 2))
VIEWS = ("view", "_unsafe_view", "reshape")


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """The arguments of an op by their names in its schema, with defaults."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    given = {arg.name: arg.default_value for arg in schema if arg.has_default_value()}
    return given | dict(zip((arg.name for arg in schema), node.args, strict=False)) | node.kwargs


def activation_of(node: fx.Node) -> Activation | None:
    """The activation that a node computes, or whose gradient it computes."""
    if node.target not in OF_FORWARD and node.target not in OF_BACKWARD:
        return None
    given = arguments_of(node)
    for name, forward, backward, parameter, fixed in ROWS:
        # relu itself has no threshold.
        if node.target in (forward, backward) and all(given.get(key, value) == value for key, value in fixed):
            return Activation(name, float(given[parameter]) if parameter else 0.0)
    return None


NORMS = {
    "_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "native_batch_norm", "native_group_norm",
}  # fmt: skip


class Norm(NamedTuple):
    """A norm of a graph, and the nodes that it reads."""

    node: fx.Node
    x: fx.Node
    weight: fx.Node | None
    bias: fx.Node | None
    mean: fx.Node | None
    var: fx.Node | None
    spec: Spec


def norm_of(node: fx.Node) -> Norm | None:
    """The norm that a node computes, if the ops of this package compute the same."""
    if name_of(node) not in NORMS:
        return None
    given = arguments_of(node)
    x = given["input"]
    if not is_served(x) or not is_alike(value_of(x), value_of(node)[0]):
        return None
    identity = Activation("identity", 0.0)
    if name_of(node) == "native_group_norm":
        spec = Spec("input", identity, given["eps"], kind="group", groups=given["group"])
        return Norm(node, x, given["weight"], given["bias"], None, None, spec)
    mean, var, own = given.get("running_mean"), given.get("running_var"), given.get("training", False)
    if own and mean is not None and node.target is not _torch.writing_batch_norm:
        # New running statistics are results of this op.
        return None
    spec = Spec("input", identity, given["eps"], given["momentum"] or 0.0, own)
    return Norm(node, x, given["weight"], given["bias"], mean, var, spec)


def is_served(x: Any) -> bool:
    """Whether the Triton ops serve a dense tensor of this device and dtype; ``x`` has no values."""
    x = value_of(x) if is_tensor(x) else None
    if x is None or x.dtype not in ACTIVATION_DTYPES or not _backend.takes_triton(x.device):
        return False
    return x.is_contiguous() or (x.dim() in FORMATS and x.is_contiguous(memory_format=FORMATS[x.dim()]))


def content_of(value: Any) -> Any:
    """What a node computes: equal for two views, or two repetitions, of one tensor."""
    if isinstance(value, (list, tuple)):
        return tuple(map(content_of, value))
    return (value.target, *map(content_of, value.args)) if name_of(value) in (*VIEWS, "repeat") else value


class Chain(NamedTuple):
    """An activation's input, as far as the norm: ``view`` of the norm's output, or None, and what is added to it."""

    norm: Norm
    view: fx.Node | None
    residual: fx.Node | None
    inner: list[fx.Node]


def chain_of(y: Any) -> Chain | None:
    """The norm whose output, perhaps in another view and with a residual, is ``y``."""
    ways: list[tuple[Any, Any]] = [(y, None)]
    if is_op(y) and y.target in (aten.add.Tensor, aten.add_.Tensor) and not y.kwargs and all(map(is_tensor, y.args)):
        ways = [(y.args[0], y.args[1]), (y.args[1], y.args[0])]
    for way, residual in ways:
        inner = [] if residual is None else [y]
        view = way if name_of(way) in VIEWS else None
        out = way if view is None else view.args[0]
        if not isinstance(out, fx.Node) or out.target is not operator.getitem or out.args[1] != 0:
            continue
        made: Any = out.args[0]
        norm = norm_of(made)
        if norm is None or (view is not None and name_of(norm.x) not in VIEWS):
            continue
        if residual is not None and not is_alike(value_of(residual), value_of(way)):
            continue
        inner += [out] if view is None else [view, out]
        return Chain(norm, view, residual, inner)
    return None


def rewrite(graph: fx.Graph) -> int:
    """Puts the ops of this package into a forward or backward graph, and returns how many."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    statistics = dict(_statistics(graph))
    count = sum(_backward(graph, node, place) for node in list(graph.nodes) if name_of(node) in GRADIENTS)
    _sweep(graph)
    count += sum(_forward(graph, node, statistics, place) for node in list(graph.nodes) if node.target in OF_FORWARD)
    _sweep(graph)
    return count


# The backward ops of norms, with the names of what they read: the gradient, the mean, and the rstd.
GRADIENTS = {
    "native_batch_norm_backward": ("grad_out", "save_mean", "save_invstd"),
    "native_group_norm_backward": ("grad_out", "mean", "rstd"),
}


def _statistics(graph: fx.Graph) -> Iterator[tuple[Any, tuple[fx.Node, fx.Node]]]:
    """The mean and the rstd of each norm whose gradients the graph computes."""
    for node in graph.nodes:
        if name_of(node) in GRADIENTS:
            given, (_, mean, rstd) = arguments_of(node), GRADIENTS[name_of(node)]
            if given.get("train", True):
                yield content_of([given["input"], given["weight"]]), (given[mean], given[rstd])


def _backward(graph: fx.Graph, node: fx.Node, place: dict[fx.Node, int]) -> bool:
    """The gradients of a norm and of the activation after it become one call."""
    given, names = arguments_of(node), GRADIENTS[name_of(node)]
    g, mean, second = (given[name] for name in names)
    view = g if name_of(g) in VIEWS else None
    slope = g if view is None else view.args[0]
    act = activation_of(slope) if is_op(slope) and slope.target in OF_BACKWARD else None
    if act is None or 0 not in items_of(node):
        return False
    of_act = arguments_of(slope)
    # Some gradients read the output of the activation, others its input.
    y = of_act["self_or_result"] if "self_or_result" in of_act else of_act["self"]
    out = y
    while name_of(out) in VIEWS:
        # An activation that writes over a view is traced with views of its output there and back.
        out = out.args[0]
    if isinstance(out, fx.Node) and activation_of(out) == act and is_alike(value_of(out), value_of(y)):
        y = out.args[0]
    chain, dz = chain_of(y), of_act["grad_output"]
    if chain is None or (chain.view is None) != (view is None):
        return False
    norm = chain.norm
    alike = content_of([norm.x, norm.weight]) == content_of([given["input"], given["weight"]])
    alike = alike and norm.spec.own == given.get("train", True)
    alone = len(slope.users) == 1 and (view is None or len(view.users) == 1)
    if not alike or not (alone or chain.residual is not None):
        return False
    if not is_alike(value_of(norm.x), value_of(items_of(node)[0])):
        return False
    if not norm.spec.own:
        mean, second = given["running_mean"], given["running_var"]
    sources = [norm.x, norm.weight, norm.bias, chain.residual, mean, second]
    if any(source is not None and place[source] >= place[slope] for source in sources):
        return False
    with graph.inserting_before(slope):
        dz, residual = (_viewed(graph, t, chain) for t in (dz, chain.residual))
        spec = norm.spec._replace(act=act, momentum=0.0)
        run = Backward(spec, any(given["output_mask"][1:]))
        made = graph.call_function(run, (dz, norm.x, norm.weight, norm.bias, residual, mean, second))
        made.meta["val"] = (*value_of(node), value_of(norm.x))
        found = [graph.call_function(operator.getitem, (made, i)) for i in range(4)]
        for item, value in zip(found, made.meta["val"], strict=True):
            item.meta["val"] = value
        whole = _back(graph, found[3], chain)
        whole.meta["val"] = value_of(slope)
    place.update(dict.fromkeys((*found, whole), place[slope]))
    for i, item in items_of(node).items():
        item.replace_all_uses_with(found[i])
        graph.erase_node(item)
    graph.erase_node(node)
    if view is not None and not view.users:
        graph.erase_node(view)
    slope.replace_all_uses_with(whole)
    return True


def _viewed(graph: fx.Graph, t: Any, chain: Chain) -> Any:
    """A tensor of the activation's shape in the shape of the norm's input."""
    if t is None or chain.view is None:
        return t
    made = graph.call_function(aten.reshape.default, (t, chain.norm.x.args[1]))
    made.meta["val"] = value_of(chain.norm.x)
    return made


def _back(graph: fx.Graph, t: fx.Node, chain: Chain) -> fx.Node:
    """A tensor of the shape of the norm's input in the shape of the activation."""
    return t if chain.view is None else graph.call_function(aten.view.default, (t, chain.view.args[1]))


def _forward(graph: fx.Graph, node: fx.Node, statistics: dict[Any, Any], place: dict[fx.Node, int]) -> bool:
    """A norm and the activation after it become one call."""
    act, chain = activation_of(node), chain_of(node.args[0])
    if act is None or chain is None or any(len(inner.users) != 1 for inner in chain.inner):
        return False
    norm, items = chain.norm, items_of(chain.norm.node)
    spec = norm.spec._replace(act=act)
    others = [item for i, item in items.items() if i > 0]
    # The statistics of the norm may be read before the activation, whose residual is known by then or not.
    early = chain.residual is None or place[chain.residual] < place[norm.node]
    if not early and any(user.op != "output" for item in others for user in item.users):
        return False
    known = statistics.get(content_of([norm.x, norm.weight])) if spec.own and norm.mean is None and not others else None
    first = norm.node if early else node
    if known is not None and any(place[source] >= place[first] for source in known):
        known = None
    with graph.inserting_before(first):
        given = (norm.x, norm.weight, norm.bias, _viewed(graph, chain.residual, chain))
        if known is None:
            made = graph.call_function(Forward(spec), (*given, norm.mean, norm.var))
            made.meta["val"] = value_of(norm.node)
            z = graph.call_function(operator.getitem, (made, 0))
        else:
            z = graph.call_function(Rebuild(spec), (*given, *known))
        z.meta["val"] = value_of(chain.inner[-1])
        for item in others:
            moved = graph.call_function(operator.getitem, (made, item.args[1]))
            moved.meta = dict(item.meta)
            place[moved] = place[first]
            item.replace_all_uses_with(moved)
    with graph.inserting_before(node):
        whole = _back(graph, z, chain)
        whole.meta["val"] = value_of(node)
    place[whole] = place[node] if chain.view is not None else place[first]
    node.replace_all_uses_with(whole)
    for old in (node, *chain.inner, *others, norm.node):
        graph.erase_node(old)
    return True


def _sweep(graph: fx.Graph) -> None:
    """Erases what nobody reads any more."""
    for node in reversed(list(graph.nodes)):
        pure = node.target is operator.getitem or (is_op(node) and not node.target._schema.is_mutable)
        if node.op == "call_function" and pure and not node.users:
            graph.erase_node(node)
