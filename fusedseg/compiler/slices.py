"""The gradients of a concatenation in channels_last, for the codegen "aten".

They are slices of the channels of one gradient, which lie in its memory with gaps.  Elementwise ops read them there.
The ops of this file need memory without gaps, and would copy a slice themselves, by PyTorch's kernel, which takes its
values one by one.  So they get a copy by the kernel of ``ops/concat.py``.
"""

import torch
from torch import fx

from .. import _backend
from ..ops.concat import dense, pitch_of
from ..ops.layout import FORMATS, suggests_channels_last
from .joint import has_symbols, is_tensor, name_of, op_of, value_of
from .norm_calls import Backward

aten = torch.ops.aten
# Ops whose first argument is a gradient that they need without gaps.
READERS = {
    aten.convolution_backward.default,
    aten.native_batch_norm_backward.default,
    aten.native_group_norm_backward.default,
    torch.ops.fusedseg.sample_norm_backward.default,
    torch.ops.fusedseg.max_pool_backward.default,
}


def rewrite(graph: fx.Graph) -> int:
    """Gives these ops their copies, and returns how many."""
    copies: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        reads = op_of(node) in READERS or isinstance(node.target, Backward)
        source = node.args[0] if reads else None
        if not isinstance(source, fx.Node) or not _is_slice(source):
            continue
        if source not in copies:
            value = value_of(source)
            with graph.inserting_before(node):
                copies[source] = graph.call_function(dense, (source,))
            copies[source].meta["val"] = torch.empty_like(value, memory_format=FORMATS[value.dim()])
        node.update_arg(0, copies[source])
    return len(copies)


def _is_slice(node: fx.Node) -> bool:
    """Whether a node is a slice of the channels of an image in channels_last, on a device of the kernel."""
    if name_of(node) != "slice" or node.args[1:2] != (1,) or not is_tensor(node):
        return False
    value = value_of(node)
    if value.dim() not in FORMATS or has_symbols(value) or not _backend.takes_triton(value.device):
        return False
    return pitch_of(value) not in (None, value.shape[1]) and suggests_channels_last(value)
