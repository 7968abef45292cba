"""The gradients of a concatenation in channels_last, for the codegen "aten".

They are slices of the channels of one gradient, which lie in its memory with gaps.  Elementwise ops read them there.
The ops of this file need memory without gaps, and would copy a slice themselves, by PyTorch's kernel, which takes its
values one by one.  So they get a copy by the kernel of ``ops/concat.py``.
"""

from typing import Any

import torch
from torch import fx

from .. import _backend
from ..ops.concat import dense, pitch_of
from ..ops.layout import FORMATS, suggests_channels_last
from .joint import has_symbols, is_op, is_tensor, name_of, op_of, value_of

# Ops, and functions of ``ops/norm/graph.py``, whose first argument is a gradient that they need without gaps.
READERS = {
    "convolution_backward", "native_batch_norm_backward", "native_group_norm_backward",
    "max_pool_backward", "norm_act_backward",
}  # fmt: skip


def rewrite(graph: fx.Graph) -> int:
    """Gives these ops their copies, and returns how many."""
    copies: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        source = node.args[0] if _called(node) in READERS else None
        if not isinstance(source, fx.Node) or not _is_slice(source):
            continue
        if source not in copies:
            value = value_of(source)
            with graph.inserting_before(node):
                copies[source] = graph.call_function(dense, (source,))
            copies[source].meta["val"] = torch.empty_like(value, memory_format=FORMATS[value.dim()])
        node.update_arg(0, copies[source])
    return len(copies)


def _called(node: fx.Node) -> str:
    """The name of the op or the function that a node calls, without a namespace and an overload."""
    if node.op != "call_function":
        return ""
    function: Any = node.target
    return op_of(node)._schema.name.rpartition("::")[2] if is_op(node) else function.__name__


def _is_slice(node: fx.Node) -> bool:
    """Whether a node is a slice of the channels of an image in channels_last, on a device of the kernel."""
    if name_of(node) != "slice" or node.args[1:2] != (1,) or not is_tensor(node):
        return False
    value = value_of(node)
    if value.dim() not in FORMATS or has_symbols(value) or not _backend.takes_triton(value.device):
        return False
    return pitch_of(value) not in (None, value.shape[1]) and suggests_channels_last(value)
