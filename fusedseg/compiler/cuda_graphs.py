"""CUDA graphs for the codegen "aten": the kernels of a graph are recorded once, and the host replays them in one call.

PyTorch's own trees of CUDA graphs record and replay.  Forward and backward share one private pool of memory, whose size
is the peak of a step.  What they must be told of each graph:

    static inputs    those whose address does not change: parameters, buffers, and what forward keeps for backward.  All
                     others are copied to an address of the recording before each replay.
    mutated inputs   those that the graph writes, such as running statistics.  They must be static.
    constants        tensors that belong to the graph itself

A graph that cannot be recorded runs as without the option, and a warning says why.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .. import _torch
from .emit import emit
from .joint import is_gradient, is_tensor, value_of
from .settings import say_once

# A function of a list of arguments, with the attributes that ``emit`` gives it.
Run = Any


def devices_of(module: fx.GraphModule) -> set[torch.device]:
    return {value_of(node).device for node in module.graph.nodes if is_tensor(node)}


def why_not(module: fx.GraphModule, static: Sequence[int], mutated: set[int]) -> str:
    """The reason why a graph cannot be recorded; "" if it can."""
    devices = devices_of(module)
    if elsewhere := sorted(str(device) for device in devices if device.type != "cuda"):
        return f"it has tensors on {', '.join(elsewhere)}"
    if any(isinstance(value_of(node), torch.SymInt) for node in module.graph.nodes):
        return "it is compiled for several sizes"
    if len(devices) != 1:
        return f"its tensors are on {len(devices)} devices"
    if mutated - set(static):
        places = [node.name for node in module.graph.nodes if node.op == "placeholder"]
        return f"it writes to {', '.join(places[i] for i in sorted(mutated - set(static)))}, whose address may change"
    return ""


def _recorded(
    module: fx.GraphModule, inputs: Sequence[Any], static: Sequence[int], backward: bool, inference: bool
) -> Run:
    parts = _torch.cuda_graph_parts()
    # Emitted code hides what it writes: our calls have no schema.
    mutated = set(parts.find_input_mutations(module.graph))
    reason = why_not(module, static, mutated)
    attributes = [operator.attrgetter(str(node.target))(module) for node in module.graph.nodes if node.op == "get_attr"]
    constants = tuple(value for value in attributes if isinstance(value, Tensor))
    places, traces = parts.get_placeholder_info(module.graph), parts.get_stack_traces(module)
    gpus = [device for device in devices_of(module) if device.type == "cuda"]
    run: Run = emit(module, inputs)
    if reason:
        say_once(f": option cudagraphs has no effect on a graph of the model, because {reason}")
        return _after_a_recording(run, gpus[0], parts) if backward and gpus else run
    made = parts.cudagraphify_impl(
        run,
        list(inputs),
        static,
        device_index=gpus[0].index,
        is_backward=backward,
        is_inference=inference,
        # Where an output was made, for the error of a reader that comes after the next replay.
        stack_traces=traces,
        placeholders=places,
        constants=constants,
        mutated_input_idxs=tuple(sorted(mutated)),
    )
    made._boxed_call = True
    made.source = run.source
    return made


def _after_a_recording(run: Run, device: torch.device, parts: Any) -> Run:
    """Backward that is not recorded, after a forward that may be: the trees wait for a backward."""

    def unrecorded(arguments: list[Any]) -> Any:
        manager = parts.get_manager(device.index, create_if_none_exists=False)
        if manager is not None:
            manager.set_to_running_backward()
        return run(arguments)

    found: Run = unrecorded
    found._boxed_call = True
    found.source = run.source
    return found


def forward(module: fx.GraphModule, inputs: Sequence[Any], inference: bool = False) -> Run:
    """Compiles forward; parameters and buffers of the model have fixed addresses."""
    static = _torch.cuda_graph_parts().TracingContext.get().fw_metadata.static_input_indices
    return _recorded(module, inputs, static, backward=False, inference=inference)


def backward(module: fx.GraphModule, inputs: Sequence[Any]) -> Run:
    """Compiles backward; everything but the gradients that it is given has a fixed address."""
    places = [node for node in module.graph.nodes if node.op == "placeholder"]
    static = [i for i, node in enumerate(places) if not is_gradient(node)]
    return _recorded(module, inputs, static, backward=True, inference=False)
