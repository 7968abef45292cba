"""``estimate`` reports on a training step with tensors without values, of any size, on any machine."""

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .._backend import EstimateMode
from .._torch import DataDependentOutputException, FakeTensor, FakeTensorMode, UnsupportedFakeTensorException, tree_map
from .report import MemoryReport
from .step import OptimizerFactory, profile

OP = "fusedseg.memory.estimate"
Model = nn.Module | Callable[[], nn.Module]


@contextmanager
def fake_mode() -> Iterator[FakeTensorMode]:
    """A context in which new tensors have no values, and stand for tensors on a GPU.

    A model may hold real tensors beside parameters and buffers.
    """
    with quiet(), EstimateMode(allow_non_fake_inputs=True) as mode:
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


def estimate(
    model: Model,
    input_shapes: Sequence[Any],
    dtype: torch.dtype = torch.float32,
    *,
    optimizer: OptimizerFactory | None = None,
    loss: Callable[..., Tensor] | None = None,
    targets: object = None,
    autocast: torch.dtype | None = None,
    label: str = "",
) -> MemoryReport:
    """Runs ``profile`` on tensors without values.

    It finds true sizes within seconds, without a GPU and almost without memory.  The sizes are those of a step on a
    GPU; on a CPU some convolutions need a copy of their input in backward, which ``profile`` counts.  It cannot know
    the workspaces of an op (above all of a convolution; that of an ``nn.LSTM`` is the one of a CPU), the allocator's
    rounding and fragmentation, and the memory of the CUDA context.  Autocast follows the rules of a CPU.

    Args:
        model: a function that builds the model, or a module.  The function is called on tensors without values, so that
            the model may be far larger than this machine.  A module is copied without its values, hooks included.
        input_shapes: the shape of the input, or a sequence of shapes, one for each input.  A tensor in place of a shape
            stands for an input of its shape and dtype.
        dtype: the dtype of parameters, buffers and inputs that are floating-point.
        optimizer, loss, autocast, label: as in ``profile``.
        targets: as in ``profile``; only shapes and dtypes count.

    Returns:
        A ``MemoryReport``, whose ``device`` is "fake".

    Raises:
        TypeError: model or input_shapes have the wrong type.
        RuntimeError: the model asks for the value of a tensor.
        ``profile`` lists further errors.
    """
    with fake_mode() as mode:
        inputs = fake_inputs(input_shapes, dtype)
        return profile_fake(
            fake_model(model, mode, dtype),
            inputs,
            optimizer=optimizer,
            loss=loss,
            targets=tree_map(_without_values, targets),
            autocast=autocast,
            label=label,
        )


def profile_fake(model: nn.Module, inputs: Sequence[Tensor], **options: Any) -> MemoryReport:
    try:
        return profile(model, *inputs, **options)
    except DataDependentOutputException as error:
        raise RuntimeError(
            f"{OP}: {type(model).__name__} asks for the value of a tensor ({error}), and there are none here; use "
            "fusedseg.memory.profile on real tensors"
        ) from error


def fake_inputs(input_shapes: Sequence[Any], dtype: torch.dtype) -> list[Tensor]:
    """The inputs for ``estimate``, without values; must be called inside the fake mode."""
    if isinstance(input_shapes, Tensor):
        raise TypeError(
            f"{OP}: input_shapes must be a shape or a sequence of shapes, got a tensor of shape "
            f"{tuple(input_shapes.shape)}; [tensor] stands for an input of its shape and dtype"
        )
    if not isinstance(input_shapes, Sequence) or not input_shapes:
        raise TypeError(f"{OP}: input_shapes must be a shape or a sequence of shapes, got {input_shapes!r}")
    # A sequence of integers is a single shape.
    shapes = [input_shapes] if all(isinstance(size, int) for size in input_shapes) else input_shapes
    inputs = []
    for shape in shapes:
        if isinstance(shape, Tensor):
            inputs.append(_without_values(shape))
        elif isinstance(shape, Sequence) and all(isinstance(size, int) and size >= 0 for size in shape):
            inputs.append(torch.empty(tuple(shape), dtype=dtype))
        else:
            raise TypeError(f"{OP}: a shape must be a sequence of integers, got {shape!r}")
    return inputs


def _without_values(leaf: object) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    bare = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="cpu")
    return bare.requires_grad_(leaf.requires_grad)


def fake_model(model: Model, mode: FakeTensorMode, dtype: torch.dtype) -> nn.Module:
    """The model without values, on the CPU, in ``dtype``; must be called inside the fake mode."""
    if not isinstance(model, nn.Module):
        if not callable(model):
            raise TypeError(f"{OP}: model must be a module or a function that builds one, got {type(model).__name__}")
        model = build(model, mode)
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        kind = dtype if tensor.is_floating_point() else tensor.dtype
        bare: Any = torch.empty_strided(tensor.shape, tensor.stride(), dtype=kind, device="cpu")
        memo[id(tensor)] = nn.Parameter(bare, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else bare
    with _PlainTensors():
        return copy.deepcopy(model, memo)


class _PlainTensors(TorchFunctionMode):
    """Copies tensors without their values: those in attributes of a module that are no parameters or buffers."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not Tensor.__deepcopy__ or args[0].layout != torch.strided:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        # A tensor that a constructor made without values may have some nevertheless, such as a list of sizes.
        memo[id(tensor)] = tensor if isinstance(tensor, FakeTensor) else _without_values(tensor)
        return memo[id(tensor)]


def build(make: Callable[[], nn.Module], mode: FakeTensorMode) -> nn.Module:
    """Builds the model without values, or with real tensors if its constructor asks for values."""
    try:
        built = make()
    except (DataDependentOutputException, UnsupportedFakeTensorException):
        with unfaked(mode):
            built = make()
    if not isinstance(built, nn.Module):
        raise TypeError(
            f"{OP}: model must be a module or build one, and built an object of class {type(built).__name__}"
        )
    return built


@contextmanager
def unfaked(mode: FakeTensorMode):
    """A context inside the fake mode in which tensors are real."""
    mode.__exit__(None, None, None)
    try:
        yield
    finally:
        mode.__enter__()
