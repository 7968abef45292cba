"""The memory format of the images of a captured graph: the option ``memory_format``.

With a format, images lie in channels_last from the graph's inputs to its outputs.  Inputs and parameters with the
dimensions of an image that lie otherwise are copied where the graph begins.

Without the option (``by_itself``), convolutions in half precision on a GPU compute in channels_last, because tensor
cores do; cuDNN would transpose the images of each call.  Such a convolution reads its image and its weight in
channels_last, and the graph returns its results in the strides that they have in eager mode.

PyTorch passes the format on from a convolution.  Average pools of volumes, which would copy to contiguous planes, are
replaced here; so are norms of samples, by ``norms.py``.
"""

import operator
from collections.abc import Iterator

import torch
from torch import Tensor, fx
from torch.fx.node import Argument
from torch.nn import functional as F

from ... import _torch
from ...ops.avg_pool import avg_pool3d
from ...ops.check import HALF
from ...ops.layout import FORMATS
from ..graph import outputs_of
from ..settings import KEEP, Settings
from .dead_bias import CONVOLUTIONS, argument
from .norms import ACTIVATIONS

avg_pool_op = _torch.composite_op(
    "fusedseg::avg_pool3d",
    "(Tensor input, int[3] kernel_size, int[3]? stride=None, int[3] padding=0, bool ceil_mode=False, "
    "bool count_include_pad=True, int? divisor_override=None) -> Tensor",
    avg_pool3d,
)
# Calls that give a view of a contiguous tensor and a copy of one in channels_last, by what never refuses one.
RESHAPING = {"view": "reshape", "view_as": "reshape_as", "reshape": "reshape", "reshape_as": "reshape_as"}
FLATTENING = {"flatten", "unflatten", "ravel", torch.flatten, torch.reshape, torch.ravel, torch.unflatten}
# Calls that read memory as it lies.
OF_MEMORY = {"as_strided", "as_strided_", "set_", torch.as_strided, torch.view_as_complex, torch.view_as_real}
# Calls that write to their first argument, beside those whose name says so.
WRITING = {operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv}
# Functions whose last argument says whether they do.
WITH_FLAG = {*ACTIVATIONS, F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout}


def rewrite(module: fx.GraphModule, settings: Settings) -> bool:
    """Lays a captured graph out as the settings say, and returns whether it computes in channels_last."""
    asked = settings.memory_format
    if asked == KEEP:
        return False
    if asked is None:
        laid_out = by_itself(module)
    else:
        assert isinstance(asked, torch.memory_format)
        _lay_out(module.graph, asked)
        laid_out = True
    if laid_out:
        for node in module.graph.nodes:
            if node.op == "call_function" and node.target is F.avg_pool3d:
                node.target = avg_pool_op
        module.recompile()
    return laid_out


def _lay_out(graph: fx.Graph, memory_format: torch.memory_format) -> None:
    """Copies what has the dimensions of an image where the graph begins."""
    dims = next(dims for dims, known in FORMATS.items() if known == memory_format)
    places = graph.find_nodes(op="placeholder")
    for node in places:
        value = _value(node)
        image = value is not None and value.dim() == dims and value.is_floating_point()
        if value is not None and image and not value.is_contiguous(memory_format=memory_format):
            with graph.inserting_after(places[-1]):
                rows = graph.call_method("contiguous", (node,), {"memory_format": memory_format})
            node.replace_all_uses_with(rows, delete_user_cb=lambda user, rows=rows: user is not rows)


def is_faster_in_rows(value: Tensor) -> bool:
    """Whether a convolution with this result is faster in channels_last."""
    return value.is_cuda and value.dtype in HALF


def by_itself(module: fx.GraphModule) -> bool:
    """Lets convolutions of a captured graph compute in channels_last; returns whether one does."""
    graph = module.graph
    found = list(_convolutions(graph))
    if not found or _reads_memory(graph):
        return False
    weights: dict[fx.Node, fx.Node] = {}
    for node in found:
        x, weight = argument(node, 0, "input"), argument(node, 1, "weight")
        if weight not in weights:
            made = _in_rows(graph, weight, node)
            # A parameter is converted once for all its readers.
            weights |= {weight: made} if weight.op in ("placeholder", "get_attr") else {}
        node.replace_input_with(x, _in_rows(graph, x, node))
        node.replace_input_with(weight, weights.get(weight, made))
    for node in graph.find_nodes(op="call_method", target="view"):
        node.target = RESHAPING["view"]
    for node in graph.find_nodes(op="call_method", target="view_as"):
        node.target = RESHAPING["view_as"]
    _return_as_before(graph)
    return True


def _convolutions(graph: fx.Graph) -> Iterator[fx.Node]:
    """The convolutions of images that are faster in channels_last; grouped ones were not measured.

    ``torch.convolution`` is left out, whose arguments have other places.
    """
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in CONVOLUTIONS - {torch.convolution}:
            continue
        value, weight = _value(node), _value(argument(node, 1, "weight"))
        groups = node.kwargs.get("groups", node.args[6] if len(node.args) > 6 else 1)
        if value is None or weight is None or value.dim() not in FORMATS or weight.dim() != value.dim():
            continue
        if groups == 1 and is_faster_in_rows(value):
            yield node


def _in_rows(graph: fx.Graph, source: fx.Node, reader: fx.Node) -> fx.Node:
    """The source in channels_last and in the dtype of the reader, which autocast would give it."""
    value, wanted = _value(source), _value(reader)
    assert wanted is not None
    with graph.inserting_before(reader):
        options: dict[str, Argument] = {"dtype": wanted.dtype, "memory_format": FORMATS[wanted.dim()]}
        rows = graph.call_method("to", (source,), options)
    if value is not None:
        # In memory of its own, as nobody writes to it.
        rows.meta["example_value"] = value.new_empty(value.shape, dtype=wanted.dtype)
    return rows


def _reads_memory(graph: fx.Graph) -> bool:
    """Whether a result of the graph depends on how images lie, which would change it.

    A call reads memory as it lies, or it makes a view of a contiguous tensor, which in channels_last is a copy, and
    something is written to that memory later.
    """
    views = set[int]()
    for node in graph.nodes:
        if node.target in OF_MEMORY or (node.target == "view" and any(isinstance(a, torch.dtype) for a in node.args)):
            return True
        value = _value(node)
        if node.target in RESHAPING or node.target in FLATTENING:
            views |= _memory(value) & _memory(_value(node.args[0] if node.args else None))
        elif _writes(node) and not views.isdisjoint(_memory(_value(node.args[0] if node.args else None))):
            return True
    return False


def _writes(node: fx.Node) -> bool:
    """Whether a call may write to its first argument."""
    if node.op not in ("call_function", "call_method"):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if (name.endswith("_") and not name.endswith("__")) or node.target in WRITING:
        return True
    return node.kwargs.get("inplace") is True or (node.target in WITH_FLAG and node.args[-1:] == (True,))


def strided_as(x: Tensor, stride: list[int]) -> Tensor:
    """``x`` with these strides, as far as they matter; a copy if it has others."""
    if all(n == 1 or mine == wanted for n, mine, wanted in zip(x.shape, x.stride(), stride, strict=True)):
        return x.view_as(x)
    return torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)


strided_op = _torch.composite_op("fusedseg::strided_as", "(Tensor(a) x, int[] stride) -> Tensor(a)", strided_as)


def _return_as_before(graph: fx.Graph) -> None:
    """The graph returns its results in the strides that they have in eager mode."""
    end = graph.output_node()
    for node in outputs_of(graph):
        value = _value(node)
        if value is None or not isinstance(node, fx.Node) or (node.op != "call_function" and node.op != "call_method"):
            continue
        with graph.inserting_before(end):
            if value.is_contiguous():
                same = graph.call_method("contiguous", (node,))
            elif all(isinstance(step, int) for step in value.stride()):
                same = graph.call_function(strided_op, (node, list(value.stride())))
            else:
                continue
        same.meta = dict(node.meta)
        end.replace_input_with(node, same)


def _value(node: object) -> Tensor | None:
    """The result of a node of a captured graph, without values."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) else None


def _memory(value: Tensor | None) -> set[int]:
    """What names the memory of a tensor."""
    return set() if value is None else {value.untyped_storage()._cdata}
