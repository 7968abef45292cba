"""The option ``memory_format``: a captured graph whose images lie in channels_last from its inputs to its outputs.

Inputs and parameters with the dimensions of an image that lie otherwise are copied where the graph begins, and PyTorch
passes the format on from there.  The functions that would copy to contiguous planes are replaced: instance norm,
average pools of volumes and, on a GPU, group norm (``ops/norm/sample_norm.py``).
"""

from collections.abc import Callable
from inspect import getcallargs
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from ..ops.avg_pool import avg_pool3d
from ..ops.layout import FORMATS, is_rows
from ..ops.norm.sample_norm import in_pieces, sample_norm_op


def _op(x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float) -> Tensor:
    return sample_norm_op(x, weight, bias, None, None, groups, eps)[0]


def _norms(norm: Callable[..., Tensor]) -> dict[Any, Callable[..., Tensor]]:
    """PyTorch's norms of samples, computed by ``norm`` where they would copy."""

    def instance_norm(*args: Any, **kwargs: Any) -> Tensor:
        given = getcallargs(F.instance_norm, *args, **kwargs)
        x, own = given["input"], given["running_mean"] is None and given["use_input_stats"]
        # PyTorch raises an error for a single position.
        if not own or not is_rows(x) or x[0, 0].numel() == 1:
            return F.instance_norm(*args, **kwargs)
        return norm(x, given["weight"], given["bias"], x.shape[1], given["eps"])

    def group_norm(*args: Any, **kwargs: Any) -> Tensor:
        given = getcallargs(F.group_norm, *args, **kwargs)
        x, groups = given["input"], given["num_groups"]
        # PyTorch's own keeps the format on a CPU.
        if x.is_cpu or not is_rows(x) or x.shape[1] % groups:
            return F.group_norm(*args, **kwargs)
        return norm(x, given["weight"], given["bias"], groups, given["eps"])

    return {F.instance_norm: instance_norm, F.group_norm: group_norm}


OF_ATEN = {**_norms(_op), F.avg_pool3d: avg_pool3d}
OF_INDUCTOR = {**_norms(in_pieces), F.avg_pool3d: avg_pool3d}


def rewrite(module: fx.GraphModule, memory_format: torch.memory_format, *, fuses: bool) -> None:
    """Lays a captured graph out in ``memory_format``; ``fuses`` says whether a compiler fuses arithmetic."""
    graph, functions = module.graph, OF_INDUCTOR if fuses else OF_ATEN
    dims = next(dims for dims, known in FORMATS.items() if known == memory_format)
    places = graph.find_nodes(op="placeholder")
    for node in places:
        value = node.meta.get("example_value")
        image = isinstance(value, Tensor) and value.dim() == dims and value.is_floating_point()
        if image and not value.is_contiguous(memory_format=memory_format):
            with graph.inserting_after(places[-1]):
                rows = graph.call_method("contiguous", (node,), {"memory_format": memory_format})
            node.replace_all_uses_with(rows, delete_user_cb=lambda user, rows=rows: user is not rows)
    for node in graph.nodes:
        if node.op == "call_function" and node.target in functions:
            node.target = functions[node.target]
    module.recompile()
