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

from ... import _torch
from ..graph import is_gradient, value_of
from ..settings import say_once
from .aten import devices_of, emit

# A function of a list of arguments, with the attributes that ``emit`` gives it.
Run = Any


def why_not(module: fx.GraphModule, static: Sequence[int], mutated: set[int]) -> str:
    """The reason why a graph cannot be recorded; "" if it can."""
    devices = devices_of(module.graph)
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


class Recorder:
    """Compiles forward and backward of a graph that Dynamo has captured."""

    def __init__(self) -> None:
        # The device on which forward is recorded; None if it is not.  Otherwise what it keeps has no fixed addresses.
        self._device: torch.device | None = None

    def forward(self, module: fx.GraphModule, inputs: Sequence[Any], inference: bool = False) -> Run:
        """Forward, with ``inference`` without a backward; parameters and buffers have fixed addresses."""
        # As AOTAutograd knows their places among the inputs.
        static = _torch.cuda_graph_parts().TracingContext.get().fw_metadata.static_input_indices
        made, self._device = _compiled(module, inputs, static, inference=inference)
        return made

    def backward(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Run:
        """Backward of a recorded forward; everything but the gradients that it is given has a fixed address."""
        if self._device is None:
            return emit(module, inputs)
        places = [node for node in module.graph.nodes if node.op == "placeholder"]
        static = [i for i, node in enumerate(places) if not is_gradient(node)]
        made, device = _compiled(module, inputs, static, backward=True)
        return _after_a_recording(made, self._device) if device is None else made


def _compiled(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    static: Sequence[int],
    backward: bool = False,
    inference: bool = False,
) -> tuple[Run, torch.device | None]:
    """The function that runs a graph, and the device on which the trees record it; None if they do not."""
    parts = _torch.cuda_graph_parts()
    # Emitted code hides what it writes: our calls have no schema.
    mutated = set(parts.find_input_mutations(module.graph))
    reason = why_not(module, static, mutated)
    attributes = [operator.attrgetter(str(node.target))(module) for node in module.graph.nodes if node.op == "get_attr"]
    constants = tuple(value for value in attributes if isinstance(value, Tensor))
    places, traces = parts.get_placeholder_info(module.graph), parts.get_stack_traces(module)
    devices = devices_of(module.graph)
    run: Run = emit(module, inputs)
    if reason:
        say_once(f": option cudagraphs has no effect on a graph of the model, because {reason}")
        return run, None
    (device,) = devices
    made = parts.cudagraphify_impl(
        run,
        list(inputs),
        static,
        device_index=device.index,
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
    return made, device


def _after_a_recording(run: Run, device: torch.device) -> Run:
    """Backward that is not recorded, after a forward that is: the trees wait for a backward."""
    parts = _torch.cuda_graph_parts()

    def unrecorded(arguments: list[Any]) -> Any:
        manager = parts.get_manager(device.index, create_if_none_exists=False)
        if manager is not None:
            manager.set_to_running_backward()
        return run(arguments)

    found: Run = unrecorded
    found._boxed_call = True
    found.source = run.source
    return found
