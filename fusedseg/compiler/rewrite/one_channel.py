"""Images of one channel, which lie in both memory formats at once.

PyTorch decides by strides alone which of the formats such an image has.  Those that ``x.contiguous(memory_format=...)``
leaves say contiguous, because nothing is to be copied.  For a convolution, the format of the weight counts too.  Its
backward on a GPU asks the image alone, and copies a gradient in channels_last to contiguous, which cuDNN copies back:
about 3 of 30 ms of kernels in a step of nnU-Net's 3D network on an H100 (``bench/gpu/NOTES.md``).

So backward reads the image as a view with the strides of channels_last, where the gradient has them.
"""

import torch
from torch import Tensor, fx

from ...ops.layout import FORMATS, is_rows, suggests_channels_last
from ..graph import call, has_symbols, is_tensor, name_of, value_of


def view_in_channels_last(graph: fx.Graph) -> int:
    """Gives gradients of convolutions such views, and returns their number."""
    count = 0
    for node in graph.nodes:
        if name_of(node) != "convolution_backward":
            continue
        dy, x, *rest = node.args
        if is_tensor(x) and _is_ambiguous(value_of(x)) and is_rows(value_of(dy)):
            form = torch.empty_like(value_of(x), memory_format=FORMATS[value_of(x).dim()])
            view = call(graph, torch.ops.aten.as_strided.default, x, list(form.shape), list(form.stride()), before=node)
            node.args = (dy, view, *rest)
            count += 1
    return count


def _is_ambiguous(x: Tensor) -> bool:
    """Whether an image of one channel has strides that say contiguous."""
    one = x.dim() in FORMATS and not has_symbols(x) and x.shape[1] == 1
    return one and x.is_contiguous() and not suggests_channels_last(x)
