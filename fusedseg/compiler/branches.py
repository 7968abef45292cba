"""How an op of a graph reads a value that was rounded, and ops with branches as chains of simpler ones.

    linear     a value that is right on average gives a result that is right on average
    smooth     the derivative varies slowly: values in at least 8 bits
    exact      all others: comparisons, and ops that nothing is known about

A result of an op that must read exact values is computed in forward, and is kept; that of a comparison takes one bit a
value.  An op with a branch, such as an activation with a kink, is written as comparisons, choices and linear ops first:
by the compiler's own decomposition, or by one of ``OWN``.  So a new activation needs no row here.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from .. import _torch
from .joint import is_op, is_tensor, items_of, name_of, outputs_of, value_of

aten = torch.ops.aten
LINEAR, SMOOTH, EXACT = "linear", "smooth", "exact"

# Linear in each tensor.  Norms read their statistics, which are exact, and ops of backward are linear in the gradient
# in any case.
_LINEAR = {
    "add", "sub", "rsub", "neg", "where", "sum", "mean", "cat", "stack", "constant_pad_nd", "clone", "copy",
    "_to_copy", "_unsafe_view", "repeat", "convert_element_type", "index", "_unsafe_index", "masked_fill",
    "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "upsample_nearest1d",
    "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d",
    "upsample_bicubic2d", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d",
    "_native_batch_norm_legit_no_training", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d",
    "replication_pad1d", "replication_pad2d", "replication_pad3d",
}  # fmt: skip
# Products of tensors, linear in each alone: right on average where the tensors do not come from the same rounding.
PRODUCTS = {
    "mul", "addcmul", "convolution", "convolution_backward", "mm", "addmm", "bmm", "baddbmm", "div",
    "native_batch_norm_backward", "native_dropout_backward", "native_group_norm_backward", "native_layer_norm_backward",
}  # fmt: skip
_SMOOTH = {
    "exp", "tanh", "sigmoid", "erf", "silu", "silu_backward", "gelu", "gelu_backward", "mish", "mish_backward",
    "sigmoid_backward", "tanh_backward", "expm1", "log1p", "sin", "cos",
}  # fmt: skip
_OURS = {"interpolate", "interpolate_backward", "max_pool_pick", "max_pool_backward", "low_bit_round"}


def kind_of(node: fx.Node, reads: Callable[[Any], bool]) -> str:
    """How a node reads its inputs; ``reads`` tells which of them are rounded."""
    if not is_op(node):
        return LINEAR  # one of several results
    target: Any = node.target
    if target.namespace == "fusedseg":
        return LINEAR if target._schema.name.partition("::")[2] in _OURS else EXACT
    name = name_of(node)
    given: Any = node.args
    if name == "div":
        return SMOOTH if reads(given[1]) else LINEAR if "rounding_mode" not in node.kwargs else EXACT
    if name == "pow":
        return SMOOTH if given[1] in (1, 2, 3) else EXACT
    if name == "where" and reads(given[0]):
        return EXACT
    if name == "native_batch_norm" and given[5]:
        return EXACT
    if target.is_view or name in _LINEAR or name in PRODUCTS:
        return LINEAR
    return SMOOTH if name in _SMOOTH else EXACT


# Chains that differ from the compiler's: ReLU and its backward ask the same question, x <= 0, and nothing asks twice.
OWN: dict[str, Callable[..., Any]] = {
    "relu": lambda x: torch.where(x <= 0, 0.0, x),
    "threshold_backward": lambda g, y, t: torch.where(y <= t, 0.0, g),
    "leaky_relu": lambda x, slope=0.01: torch.where(x > 0, x, x * slope),
    "leaky_relu_backward": lambda g, x, slope, of_result: torch.where(x > 0, g, g * slope),
    "abs": lambda x: torch.where(x < 0, -x, x),
    "maximum": lambda a, b: torch.where(a >= b, a, b),
    "minimum": lambda a, b: torch.where(a <= b, a, b),
    "_prelu_kernel": lambda x, w: torch.where(x > 0, x, w * x),
    "_prelu_kernel_backward": lambda g, x, w: (torch.where(x > 0, g, w * g), torch.where(x > 0, 0.0, x * g)),
}


def _clamp(x: Tensor, low: Any = None, high: Any = None) -> Tensor:
    if low is not None:
        x = torch.where(x < low, low, x)
    return x if high is None else torch.where(x > high, high, x)


OWN |= {
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": lambda x, high: _clamp(x, None, high),
    "hardtanh": lambda x, low=-1.0, high=1.0: _clamp(x, low, high),
}


def is_question(node: fx.Node) -> bool:
    """Whether the result of a node is true or false for each element."""
    value = value_of(node)
    return isinstance(value, Tensor) and value.dtype == torch.bool


def _is_elementwise(node: fx.Node) -> bool:
    if not is_op(node):
        return False
    target: Any = node.target
    return torch.Tag.pointwise in target.tags or target.is_view or not node.all_input_nodes


def chain_of(graph: fx.Graph, node: fx.Node) -> list[fx.Node] | None:
    """The results of a node computed by a chain of simpler nodes right before it; None if no chain is known."""
    function = OWN.get(name_of(node)) or _torch.decomposition(node.target)
    sources = node.all_input_nodes
    values = [value_of(source) for source in sources]
    mode = next((v.fake_mode for v in values if isinstance(v, _torch.FakeTensor)), None)
    if function is None or mode is None or not all(isinstance(v, Tensor) for v in values):
        return None
    places = dict(zip(sources, range(len(sources)), strict=True))

    def run(*tensors: Tensor) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: tensors[places[source]])
        return function(*args, **kwargs)

    with mode, _torch.python_dispatcher():
        traced = make_fx(run, tracing_mode="real")(*values)
    inside = list(traced.graph.nodes)
    if not all(inner.op in ("placeholder", "output") or _is_elementwise(inner) for inner in inside):
        return None
    env: dict[fx.Node, Any] = dict(zip((n for n in inside if n.op == "placeholder"), sources, strict=True))
    with graph.inserting_before(node):
        for inner in inside:
            if inner.op == "call_function":
                env[inner] = graph.node_copy(inner, env.__getitem__)
    results = outputs_of(traced.graph)
    return [env[result] for result in results]


def write_chain(graph: fx.Graph, node: fx.Node) -> bool:
    """Writes an op of backward as a chain, so that its questions can be answered in forward; whether there is one."""
    chain = chain_of(graph, node)
    if chain is None:
        return False
    if len(chain) == 1 and is_tensor(node):
        node.replace_all_uses_with(chain[0])
    else:
        for place, item in items_of(node).items():
            item.replace_all_uses_with(chain[place])
            graph.erase_node(item)
    graph.erase_node(node)
    return True
