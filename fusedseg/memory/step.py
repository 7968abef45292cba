"""Runs one training step under ``Trace``, and leaves the model as it was."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from .._torch import FakeTensor
from .meter import Saver, graph_of, key_of, mean_of, tensors_of, without_nan_checks
from .report import MemoryReport
from .trace import Trace

OP = "fusedseg.memory.profile"
OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def step(
    model: nn.Module,
    *inputs: object,
    loss: Callable[..., Tensor] | None = None,
    targets: object = None,
    optimizer: OptimizerFactory | None = None,
    autocast: torch.dtype | None = None,
    label: str = "",
) -> MemoryReport:
    """Runs one training step on real tensors, or on fake ones inside their mode; ``profile`` describes the rest."""
    _check(model, loss, targets, optimizer)
    # Backward may reach all of these, inputs included.
    given = [*model.parameters(), *model.buffers(), *tensors_of((inputs, targets))]
    fake = next((tensor for tensor in given if isinstance(tensor, FakeTensor)), None)
    device = _device(given)
    trace = Trace(torch.device("cpu") if fake is not None else device, label or type(model).__name__)
    with ExitStack() as stack:
        if fake is not None:
            # Tensors that the model creates itself must be fake too.  Entering the mode twice does no harm.
            stack.enter_context(fake.fake_mode)
        stack.enter_context(without_nan_checks())
        others = [module for module in (loss,) if isinstance(module, nn.Module)]
        stack.enter_context(
            _put_back([model, *others], inputs, device if fake is None else None, optimizer is not None)
        )
        steps = None if optimizer is None else _with_state(optimizer, model)
        _add_resident(trace, [model, *others], steps, (inputs, targets))
        stack.callback(trace.close)
        trace.watch(model, others)
        if trace.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(trace.device)
        stack.enter_context(trace)
        scalar = partial(_loss, loss, targets)
        return _step(trace, model, inputs, scalar, steps, autocast, device, fake is not None)


def _step(trace, model, inputs, loss, steps, autocast, device, fake) -> MemoryReport:
    owned = [*model.parameters(), *model.buffers()]
    saved = trace.saved(owned)
    cast = nullcontext() if autocast is None else torch.autocast(device.type, autocast)
    with saved, cast:
        trace.begin("forward")
        out = model(*inputs)
        if autocast is not None:
            # This frees the copies of weights that no saved tensor needs, as the end of autocast does after the loss.
            torch.clear_autocast_cache()
        saved.add_attributes(out)
        trace.add_constants(saved.sizes)
        _note_saved(trace, saved.savers, out)
        trace.begin("loss")
        value = loss(out)
    del out
    trace.begin("backward")
    if value.requires_grad:
        value.backward()
    for parameter in model.parameters():
        storage = None if parameter.grad is None else trace.storage_of(parameter.grad)
        if storage is not None:
            storage.kind = "gradients"
    if steps is not None:
        trace.begin("optimizer")
        steps.step()
    trace.close()
    notes = _notes(model, fake, autocast, value.requires_grad)
    on_gpu = device.type == "cuda" and not fake
    return MemoryReport(
        label=trace.exp,
        model=type(model).__name__,
        device="fake" if fake else str(device),
        rows=trace.rows,
        storages=trace.storages,
        events=trace.events,
        marks=trace.marks,
        resident=trace.resident,
        peak=trace.peak,
        peak_event=trace.peak_event,
        allocator_peak=torch.cuda.max_memory_allocated(device) if on_gpu else None,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        flops=trace.flops,
        notes=notes,
    )


def _notes(model: nn.Module, fake: bool, autocast: torch.dtype | None, backward: bool) -> list[str]:
    notes = []
    if fake:
        notes.append("On tensors without values: ops' workspaces and the allocator's rounding are not in here.")
    if fake and autocast is not None:
        notes.append("Autocast as on a CPU: it casts a few more ops than on a GPU, such as interpolation.")
    if not backward:
        notes.append("The loss needs no gradient: forward only.")
    if any(type(module).__name__ == "OptimizedModule" for module in model.modules()):
        notes.append("Compiled modules have run uncompiled: what the compiler saves is not in here.")
    return notes


def op_name(node: torch.autograd.graph.Node) -> str:
    """The name of the op of a node in autograd's graph: "Convolution" for ConvolutionBackward0."""
    return node.name().split("::")[-1].rstrip("0123456789").removesuffix("Backward")


def _note_saved(trace: Trace, kept: dict[int, list[Saver]], out: object) -> None:
    ops = {node._sequence_nr(): op_name(node) for node in graph_of(out)}
    outputs = {key_of(tensor) for tensor in tensors_of(out)}
    for key, storage in trace.alive():
        if key in kept and storage.kind != "parameters":
            storage.savers = [(saver.module or storage.module, ops.get(saver.node, "")) for saver in kept[key]]
        elif storage.born >= 0 and key not in outputs:
            # The model's own saved-tensor hooks or an attribute of the model hold it.
            storage.savers = [(storage.module, "")]
        pooled = storage.savers and all("Pool" in op for _, op in storage.savers)
        if pooled and not storage.dtype.is_floating_point:
            storage.kind = "pool indices"


def _loss(loss: Callable[..., Tensor] | None, targets: object, out: object) -> Tensor:
    if loss is None:
        return mean_of([tensor for tensor in tensors_of(out) if tensor.is_floating_point()])
    value = loss(out) if targets is None else loss(out, targets)
    if not isinstance(value, Tensor):
        raise TypeError(f"{OP}: loss must return a tensor, got {type(value).__name__}")
    if value.numel() != 1:
        raise ValueError(f"{OP}: loss must return a scalar, got a tensor of shape {tuple(value.shape)}")
    return value


def _check(model: object, loss: object, targets: object, optimizer: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{OP}: model must be an nn.Module, got {type(model).__name__}")
    if targets is not None and loss is None:
        raise ValueError(f"{OP}: targets need a loss that takes them: loss(output, targets)")
    if isinstance(optimizer, torch.optim.Optimizer):
        name = type(optimizer).__name__
        raise TypeError(
            f"{OP}: optimizer must be called with the parameters, as torch.optim.{name} or a function is; an instance "
            f"of {name} would be changed by the step"
        )


def _device(tensors: Sequence[Tensor]) -> torch.device:
    devices = {tensor.device for tensor in tensors} or {torch.device("cpu")}
    if len(devices) > 1:
        raise ValueError(f"{OP}: model and inputs must be on one device, got {', '.join(sorted(map(str, devices)))}")
    return devices.pop()


def _add_resident(
    trace: Trace, modules: Sequence[nn.Module], steps: torch.optim.Optimizer | None, given: object
) -> None:
    for module in modules:
        trace.add_resident(module.parameters(), "parameters")
        trace.add_resident(module.buffers(), "buffers")
    if steps is not None:
        trace.add_resident(tensors_of(list(steps.state.values())), "optimizer state")
    trace.add_resident(tensors_of(given), "inputs")


def _with_state(optimizer: OptimizerFactory, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer with the state that its first step creates."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ValueError(
            f"{OP}: no parameter of {type(model).__name__} requires a gradient, so the optimizer has nothing to train; "
            "leave it out (--optimizer none) to count the forward alone"
        )
    steps = optimizer(parameters)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    steps.step()
    for parameter in parameters:
        parameter.grad = None
    return steps


@contextmanager
def _put_back(
    modules: Sequence[nn.Module], inputs: object, device: torch.device | None, parameters: bool
) -> Iterator[None]:
    """A context that restores buffers, gradients and random states at its end; with ``parameters`` also their values.

    ``device`` is the device whose random state is restored beside the CPU's; None for fake tensors, which draw no
    random numbers.
    """
    buffers: list[tuple[nn.Module, str, Tensor, Tensor]] = []
    grads: list[tuple[Tensor, Tensor | None]] = []
    values: list[tuple[Tensor, Tensor]] = []
    for top in modules:
        for module in top.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    buffers.append((module, name, buffer, buffer.detach().clone()))
        grads += [(parameter, parameter.grad) for parameter in top.parameters()]
        if parameters:
            values += [(parameter, parameter.detach().clone()) for parameter in top.parameters()]
    grads += [(tensor, tensor.grad) for tensor in tensors_of(inputs) if tensor.is_leaf]
    for tensor, _ in grads:
        tensor.grad = None
    devices = [device] if device is not None and device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                module._buffers[name] = buffer
                # The buffer is always copied, because BatchNorm changes buffers without a new version.
                buffer.copy_(value)
            for parameter, value in values:
                parameter.copy_(value)
        for tensor, grad in grads:
            tensor.grad = grad
