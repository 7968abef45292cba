"""A model and its inputs without values, of any size, and a training step of them in eager mode."""

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .. import _torch
from .._backend import EstimateMode
from .meter import Footprint, mean_of, measure, tensors_of

OP = "fusedseg.memory"
Model = nn.Module | Callable[[], nn.Module]


@contextmanager
def fake_mode() -> Iterator[_torch.FakeTensorMode]:
    """A context in which new tensors have no values, and stand for tensors on a GPU.

    A model may hold real tensors beside parameters and buffers.  No other thread may compile meanwhile.
    """
    with quiet(), _torch.convolutions_of_a_gpu(), EstimateMode(allow_non_fake_inputs=True) as mode:
        yield mode


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps PyTorch from logging the traceback of an op that fails on tensors without values.

    The op still raises its error.  The log would put dozens of lines in front of that error, which says what is wrong,
    for example that a network does not take the size of an image.
    """

    # The filter is defined here, so that each of several nested calls removes its own filter.
    def no_failed_op(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("failed while attempting to run meta for")

    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addFilter(no_failed_op)
    try:
        yield
    finally:
        logger.removeFilter(no_failed_op)


OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def bytes_before(
    model: nn.Module, inputs: Sequence[Tensor], optimizer: OptimizerFactory | None = None
) -> dict[str, int]:
    """The bytes that are there before a step of a model without values, by kind; the optimizer has made a step."""
    return {
        "parameters": sum(parameter.nbytes for parameter in model.parameters()),
        "buffers": sum(buffer.nbytes for buffer in model.buffers()),
        "optimizer state": 0 if optimizer is None else state_bytes(model, optimizer),
        "inputs": sum(tensor.nbytes for tensor in tensors_of(inputs)),
    }


def autocast_without_values(dtype: torch.dtype | None) -> torch.autocast:
    """Autocast around a step without values; none if ``dtype`` is None."""
    return torch.autocast("cpu", dtype or torch.bfloat16, dtype is not None)


def eager_step(
    model: nn.Module,
    inputs: Sequence[Tensor],
    *,
    loss: Callable[[Any], Tensor] | None = None,
    autocast: torch.dtype | None = None,
) -> Footprint:
    """Runs a step of a model without values; must be called inside its fake mode.  Inputs are not in ``saved``.

    Args:
        loss: a function of the outputs; by default the mean of all floating-point outputs.
        autocast: the dtype of autocast around forward and loss.

    Raises:
        RuntimeError: the model asks for the value of a tensor.
    """

    def forward(*given: Tensor) -> Any:
        with autocast_without_values(autocast):
            return model(*given)

    def scalar(out: Any) -> Tensor:
        with autocast_without_values(autocast):
            if loss is None:
                return mean_of([tensor for tensor in tensors_of(out) if tensor.is_floating_point()])
            return loss(out)

    own = [*model.parameters(), *model.buffers(), *inputs]
    try:
        found = measure(forward, *inputs, loss=scalar, owned=own)
    except _torch.DataDependentOutputException as error:
        name = type(model).__name__
        raise RuntimeError(f"{OP}: {name} asks for the value of a tensor ({error}), and there are none here") from error
    for parameter in model.parameters():
        parameter.grad = None
    return found


def state_bytes(model: nn.Module, optimizer: OptimizerFactory) -> int:
    """The bytes of the state of an optimizer after its first step; the model has no values.

    Raises:
        TypeError: ``optimizer`` is an optimizer in place of a function that makes one.
        ValueError: no parameter requires a gradient.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        name = type(optimizer).__name__
        raise TypeError(
            f"{OP}: optimizer must be called with the parameters, as torch.optim.{name} or a function is, got an "
            f"instance of {name}"
        )
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ValueError(
            f"{OP}: no parameter of {type(model).__name__} requires a gradient, so the optimizer has nothing to train; "
            "leave it out (--optimizer none)"
        )
    steps = optimizer(parameters)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    steps.step()
    for parameter in parameters:
        parameter.grad = None
    return sum(tensor.nbytes for tensor in tensors_of(list(steps.state.values())))


def fake_inputs(input_shapes: Sequence[Any], dtype: torch.dtype) -> list[Tensor]:
    """Inputs without values for shapes, or for one shape; must be called inside the fake mode."""
    # A sequence of integers is a single shape.
    one = bool(input_shapes) and all(isinstance(size, int) for size in input_shapes)
    shapes, inputs = [input_shapes] if one else input_shapes, []
    for shape in shapes:
        if isinstance(shape, Tensor):
            inputs.append(_without_values(shape))
        elif isinstance(shape, Sequence) and all(isinstance(size, int) and size >= 0 for size in shape):
            inputs.append(torch.empty(tuple(shape), dtype=dtype))
        else:
            raise TypeError(f"{OP}: a shape must be a sequence of integers, got {shape!r}")
    return inputs


def _without_values(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    bare = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device="cpu")
    return bare.requires_grad_(tensor.requires_grad)


def fake_model(model: Model, dtype: torch.dtype) -> nn.Module:
    """The model without values, on the CPU, in ``dtype``; must be called inside the fake mode."""
    if not isinstance(model, nn.Module):
        if not callable(model):
            raise TypeError(f"{OP}: model must be a module or a function that builds one, got {type(model).__name__}")
        model = build(model)
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        bare = _without_values(tensor, dtype if tensor.is_floating_point() else None)
        memo[id(tensor)] = nn.Parameter(bare, bare.requires_grad) if isinstance(tensor, nn.Parameter) else bare
    with _PlainTensors():
        return copy.deepcopy(model, memo)


class _PlainTensors(TorchFunctionMode):
    """Copies, without values, the tensors in attributes of a module that are neither parameters nor buffers."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not Tensor.__deepcopy__ or args[0].layout != torch.strided:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        # A tensor that a constructor made without values may have some nevertheless, such as a list of sizes.
        memo[id(tensor)] = tensor if isinstance(tensor, _torch.FakeTensor) else _without_values(tensor)
        return memo[id(tensor)]


def build(make: Callable[[], nn.Module]) -> nn.Module:
    """Builds the model without values, or with real tensors if its constructor asks for values."""
    try:
        built = make()
    except (_torch.DataDependentOutputException, _torch.UnsupportedFakeTensorException):
        with _torch.unset_fake_temporarily():
            built = make()
    if not isinstance(built, nn.Module):
        raise TypeError(
            f"{OP}: model must be a module or build one, and built an object of class {type(built).__name__}"
        )
    return built
