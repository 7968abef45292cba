"""The option ``memory_format``: a captured graph whose images lie in channels_last from its inputs to its outputs.

Inputs and parameters with the dimensions of an image that lie otherwise are copied where the graph begins, and PyTorch
passes the format on from there.  The functions that would copy to contiguous planes are replaced: instance norm,
average pools of volumes and, on a GPU, group norm (``ops/norm/sample_norm.py``).
"""

from collections.abc import Callable
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

    def instance_norm(
        input: Tensor,  # noqa: A002
        running_mean: Tensor | None = None,
        running_var: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        use_input_stats: bool = True,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if running_mean is not None or not use_input_stats or not is_rows(input) or input[0, 0].numel() == 1:
            # PyTorch raises an error for a single position.
            return F.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
        return norm(input, weight, bias, input.shape[1], eps)

    def group_norm(
        input: Tensor,  # noqa: A002
        num_groups: int,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        # PyTorch's own keeps the format on a CPU.
        if input.is_cpu or not is_rows(input) or input.shape[1] % num_groups:
            return F.group_norm(input, num_groups, weight, bias, eps)
        return norm(input, weight, bias, num_groups, eps)

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
