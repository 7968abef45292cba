"""A 1x1 convolution of an interpolated tensor runs before the interpolation, at the small size.

A 1x1 convolution W and an interpolation U commute, because the weights of an interpolation sum to one:

    W U x + b = U (W x + b)

So forward convolves a quarter of the positions (an eighth in 3D), and interpolates the channels of the result instead
of those of x.  The same holds for backward.  Last bits differ, because additions have another order.
"""

from inspect import getcallargs
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from ...ops.check import HALF
from ...ops.upsample import BACKWARD
from ..graph import captured_arguments_of, captured_tensors_of, captured_value_of, nodes_from
from ..settings import Settings

NOT_TRANSPOSED = (torch.conv1d, torch.conv2d, torch.conv3d)
# The arguments of a convolution after its weight, and their values where it looks at one position.
ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
AT_ONE_POSITION: dict[str, object] = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}


def swap_interpolations(module: fx.GraphModule, settings: Settings) -> int:
    """Swaps such convolutions and interpolations in a graph of Dynamo, and returns their number."""
    graph, count = module.graph, 0
    for node in list(graph.nodes):
        found = _interpolation(node) if node.target in NOT_TRANSPOSED else None
        if found is not None and _is_shorter(node, *found, settings) and _may_wait(node, *found):
            _swap(graph, node, *found)
            count += 1
    if count:
        module.recompile()
    return count


def _interpolation(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The interpolation that a convolution alone reads, and the tensor that is interpolated."""
    made = captured_arguments_of(node, ARGUMENTS).get("input")
    if not isinstance(made, fx.Node) or made.target is not F.interpolate or set(made.users) != {node}:
        return None
    given = getcallargs(F.interpolate, *made.args, **made.kwargs)
    small, value = given["input"], captured_value_of(made)
    if value is None or given["antialias"] or (given["mode"], value.dim() - 2) not in BACKWARD:
        return None
    return (made, small) if isinstance(small, fx.Node) else None


def _is_shorter(node: fx.Node, made: fx.Node, small: fx.Node, settings: Settings) -> bool:
    """Whether the convolution ``node`` and the interpolation ``made`` commute, and then move fewer bytes."""
    named = captured_arguments_of(node, ARGUMENTS)
    x, large, weight, y = map(captured_value_of, (small, made, named["weight"], node))
    if x is None or large is None or weight is None or y is None or x.dim() != weight.dim():
        return False
    if any(not isinstance(n, int) for t in (x, large, weight) for n in t.shape):
        # A question about symbolic sizes would become a guard.
        return False
    if any(named.get(name, unit) not in (unit, (unit,) * (x.dim() - 2)) for name, unit in AT_ONE_POSITION.items()):
        return False
    fewer = x.shape[2:].numel() < large.shape[2:].numel() and weight.shape[0] <= weight.shape[1]
    if not fewer or weight.shape[2:].numel() > 1 or weight.shape[1] != x.shape[1]:
        return False
    if x.is_cpu and (x.dtype in HALF or y.dtype != x.dtype):
        # PyTorch's interpolation adds in half precision on a CPU, or autocast interpolates in fp32 there.
        return False
    return settings.may_round(x.device)


def _may_wait(node: fx.Node, made: fx.Node, small: fx.Node) -> bool:
    """Whether the small tensor can be read where the convolution is.

    Nothing may write over it in between, and no mode may change there, such as that of autograd.
    """
    between = nodes_from(made.next, node)
    nodes = [node for node in between if node.op not in ("placeholder", "get_attr")]
    if not nodes:
        return True
    # A change of a mode has no result, and a call whose result nobody reads may write to its arguments.
    if any(not captured_tensors_of(node) or not node.users for node in nodes):
        return False
    value = captured_value_of(small)
    return value is not None and not value.is_inference() and value._version == 0


def _swap(graph: fx.Graph, node: fx.Node, made: fx.Node, x: fx.Node) -> None:
    value, convolution = captured_value_of(node), node.target
    assert value is not None
    assert callable(convolution)
    interpolate: Any = F.interpolate
    of_made = getcallargs(interpolate, *made.args, **made.kwargs)
    with graph.inserting_before(node):
        small = graph.call_function(convolution, kwargs=captured_arguments_of(node, ARGUMENTS) | {"input": x})
        large = graph.call_function(interpolate, kwargs=of_made | {"input": small})
    x_value = captured_value_of(x)
    assert x_value is not None
    small.meta = {**node.meta, "example_value": value.new_empty((*value.shape[:2], *x_value.shape[2:]))}
    large.meta = {**made.meta, "example_value": value}
    node.replace_all_uses_with(large)
    graph.erase_node(node)
    graph.erase_node(made)
