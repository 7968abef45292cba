"""The report on a model that is compiled and not run."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from .. import _torch
from ..memory.meter import mean_of
from .partition import prepare
from .report import Bytes, Captured, Graph, Report, counted_in_eager_mode, kept_of, note_after, noting, peak_of
from .settings import OP, Settings
from .unrun import twin_of

INDUCTOR = Settings("inductor")


def counted(model: nn.Module, inputs: Sequence[Tensor], settings: Settings = INDUCTOR) -> Report:
    """A report on a model that is compiled and not run, with the bytes of the compiler's own partitioner.

    The compiler's caches are emptied before and after.

    Args:
        model: a module; it may be fake, inside its fake mode.
        inputs: its arguments.
        settings: the options of the backend.
    """
    parts = _torch.partitioner()
    found: list[tuple[Graph, Captured]] = []

    def divide(joint: fx.GraphModule, joint_inputs: Sequence[object], **options: Any) -> Any:
        outputs = options["num_fwd_outputs"]
        graph, _ = found[-1]
        with parts.config.patch(activation_memory_budget=1.0):
            stock = parts.min_cut(twin_of(joint), joint_inputs, compiler="inductor", **options)
            graph.stock = Bytes(kept_of(stock[0], outputs), peak_of(stock, fused=True))
            decision = prepare(joint, outputs, settings)
            made = parts.min_cut(joint, joint_inputs, compiler="inductor", **options)
        note_after(decision, made, outputs, fused=True)
        return made

    def as_it_is(graph: fx.GraphModule, example: object) -> Any:
        return parts.make_boxed_func(graph.forward)

    compiler = parts.aot_autograd(
        fw_compiler=as_it_is, bw_compiler=as_it_is, partition_fn=divide, decompositions=parts.decompositions
    )

    def counting(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        with noting(module, example_inputs) as row:
            found.append(row)
            return compiler(module, example_inputs)

    torch.compiler.reset()
    try:
        mean_of(torch.compile(model, backend=counting, dynamic=False)(*inputs))
    finally:
        torch.compiler.reset()
    if not found:
        raise RuntimeError(f"{OP}: the compiler finds no graph in {type(model).__name__}")
    return counted_in_eager_mode(type(model).__name__, found)
