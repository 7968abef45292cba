"""The option ``memory_format``: a captured graph whose images lie in channels_last from its inputs to its outputs.

Inputs and parameters with the dimensions of an image that lie otherwise are copied where the graph begins, and PyTorch
passes the format on from there.  Average pools of volumes, which would copy to contiguous, are replaced here;
so are norms of samples, by ``norms.py``.
"""

import torch
from torch import fx
from torch.nn import functional as F

from ...ops.avg_pool import avg_pool3d
from ...ops.layout import FORMATS
from ..graph import captured_value_of


def rewrite(module: fx.GraphModule, memory_format: torch.memory_format) -> None:
    """Lays a captured graph out in ``memory_format``."""
    graph = module.graph
    dims = next(dims for dims, known in FORMATS.items() if known == memory_format)
    places = graph.find_nodes(op="placeholder")
    for node in places:
        value = captured_value_of(node)
        image = value is not None and value.dim() == dims and value.is_floating_point()
        if image and not value.is_contiguous(memory_format=memory_format):
            with graph.inserting_after(places[-1]):
                laid_out = graph.call_method("contiguous", (node,), {"memory_format": memory_format})
            node.replace_all_uses_with(laid_out, delete_user_cb=lambda user, own=laid_out: user is not own)
    for node in graph.nodes:
        if node.op == "call_function" and node.target is F.avg_pool3d:
            node.target = avg_pool3d
    module.recompile()
