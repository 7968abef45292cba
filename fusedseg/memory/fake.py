"""``profile``: the report of a training step, on real tensors or on tensors without values of any size."""

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
from .step import OP, OptimizerFactory, step

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


def profile(
    model: Model,
    *inputs: object,
    dtype: torch.dtype | None = None,
    loss: Callable[..., Tensor] | None = None,
    targets: object = None,
    optimizer: OptimizerFactory | None = None,
    autocast: torch.dtype | None = None,
    label: str = "",
) -> MemoryReport:
    """Runs one training step, and reports where its bytes go.

    The step is forward, loss, backward and, if given, the optimizer's step.  On real tensors it runs on their device,
    CPU or CUDA.  Afterwards the model is as it was, even if it raises: ``.grad`` of parameters and inputs, buffers such
    as running statistics, parameters, and the states of the random number generators are restored, and all hooks are
    removed.  Changes that the model makes to plain Python attributes stay.

    **Shapes as inputs** stand for tensors without values::

        profile(UNet(3, 4), (8, 3, 512, 512), dtype=torch.float16)

    Then true sizes are found within seconds, without a GPU and almost without memory.  The sizes are those of a step on
    a GPU; on a CPU some convolutions need a copy of their input in backward, which a step on real tensors counts.
    Autocast follows the rules of a CPU.  A module is copied without its values, hooks included.

    Each storage that an op returns is counted until it is freed.  Not seen are workspaces inside an op (above all of a
    convolution, and without values that of an ``nn.LSTM``), the allocator's rounding and fragmentation, and the memory
    of the CUDA context; on CUDA the rows hold the allocator's own figures.  Compiled modules run
    uncompiled here, and anomaly mode looks for no NaN.

    Args:
        model: any module.  Shared modules, repeated and nested calls, and checkpointed regions have their own rows.
            With shapes it may be a function that builds the model, which is called on tensors without values, so that
            the model may be far larger than this machine.
        inputs: the arguments of the model: real tensors, in any nesting; or a shape for each, or a tensor on the device
            "meta", such as ``torch.empty(2, 128, dtype=torch.int64, device="meta")``.
        dtype: with shapes, the dtype of parameters, buffers and inputs that are floating-point; float32 by default.
        loss: a function of the model's output, and of ``targets`` if they are given, that returns a scalar.  The
            default is the mean of all outputs.
        targets: the second argument of ``loss``; with shapes only their own shapes and dtypes count.
        optimizer: a function that is called with the parameters and returns an optimizer, such as
            ``torch.optim.AdamW``.  Its state counts as present before the step, as in all steps but the first.
        autocast: the dtype of ``torch.autocast`` around forward and loss; None keeps the caller's setting.
        label: the report's name, which appears in its column ``exp`` and in comparisons; by default the class of the
            model.

    Returns:
        A ``MemoryReport``, whose ``device`` is "fake" on tensors without values.

    Raises:
        TypeError: the model is no module, and builds none; the optimizer is an instance; the loss returns no tensor.
        ValueError: there are targets without a loss; the loss returns no scalar; the tensors are on several devices;
            there is an optimizer, and no parameter requires a gradient; ``dtype`` is given without shapes.
        RuntimeError: on tensors without values, the model asks for a value.

    Errors of the model pass through.
    """
    options = {"loss": loss, "optimizer": optimizer, "autocast": autocast, "label": label}
    if not inputs or not all(map(_is_without_values, inputs)):
        if dtype is not None:
            raise ValueError(f"{OP}: dtype belongs to shapes as inputs; real tensors have their own")
        return step(model, *inputs, targets=targets, **options)  # type: ignore[arg-type]
    dtype = dtype or torch.float32
    with fake_mode() as mode:
        given = fake_inputs(inputs, dtype)
        return profile_fake(
            fake_model(model, mode, dtype), given, targets=tree_map(_without_values, targets), **options
        )


def _is_without_values(given: object) -> bool:
    if isinstance(given, Tensor):
        return given.is_meta
    return isinstance(given, Sequence) and bool(given) and all(isinstance(size, int) for size in given)


def profile_fake(model: nn.Module, inputs: Sequence[Tensor], **options: Any) -> MemoryReport:
    try:
        return step(model, *inputs, **options)
    except DataDependentOutputException as error:
        raise RuntimeError(
            f"{OP}: {type(model).__name__} asks for the value of a tensor ({error}), and there are none here; pass "
            "real tensors in place of shapes"
        ) from error


def fake_inputs(input_shapes: Sequence[Any], dtype: torch.dtype) -> list[Tensor]:
    """Inputs without values for shapes, or for one shape; must be called inside the fake mode."""
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
        bare = torch.empty_strided(tensor.shape, tensor.stride(), dtype=kind, device="cpu")
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
