"""Observes the flow of a model in one forward on an example, on fake tensors if the model runs on them."""

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .._torch import (
    DisableTorchFunction,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    tree_leaves,
    tree_map_only,
)
from ..memory.fake import quiet
from ..memory.meter import key_of, tensors_of
from .flow import Call, Flow, is_leaf, paths_of
from .unchanged import unchanged

# Methods and attributes that describe a tensor and do not read its values.
METADATA = {
    "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "is_contiguous", "get_device",
    "element_size", "is_floating_point", "is_complex", "data_ptr", "type", "is_pinned", "is_shared", "__len__",
    "device", "sym_size", "sym_stride", "sym_numel", "sym_storage_offset",
}  # fmt: skip


def parse_inputs(op: str, example: object) -> tuple[tuple, dict]:
    """Arguments and keyword arguments of an example: a tensor, a sequence of arguments, or a mapping of keywords."""
    if isinstance(example, Tensor):
        return (example,), {}
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, Sequence) and not isinstance(example, str):
        if example and all(type(part) is int for part in example):
            shape = ", ".join(map(str, example))
            raise TypeError(f"{op}: the example must be a tensor, got the numbers ({shape}); pass torch.randn({shape})")
        return tuple(example), {}
    raise TypeError(
        f"{op}: the example must be a tensor, a sequence of arguments or a mapping of keywords, "
        f"got {type(example).__name__}"
    )


def tensors_in(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class Observer:
    """Records calls: of leaf modules by hooks, of functions by a function mode, and of other ops by a dispatch mode.

    Scripted code, for example, calls ops without either a module or a function.
    """

    def __init__(self, root: nn.Module, how: str) -> None:
        self.flow = Flow(how)
        self._paths = {module: paths[0] for module, paths in paths_of(root).items()}
        self._values: dict[tuple[int, int], int] = {}
        # The tensors are held alive, because another tensor could take the id of a freed tensor.
        self._held: list[tuple[int, Tensor]] = []
        # The values in each storage so far.
        self._stored: dict[int, set[int]] = {}
        self._where: list[str] = [""]
        # This is the depth of nested calls inside a call that is being recorded.
        self._inside = 0
        self._begun: list[list[tuple[Tensor, int]]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        with ExitStack() as stack:
            for module in self._paths:
                if not isinstance(module, torch.jit.ScriptModule):
                    before = module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True)
                    stack.callback(before.remove)
                    after = module.register_forward_hook(self._leave, prepend=True, with_kwargs=True)
                    stack.callback(after.remove)
            stack.enter_context(_Ops(self))
            stack.enter_context(_Functions(self))
            yield

    def returns(self, out: object) -> None:
        """Records that ``out`` leaves the model."""
        self.flow.returned = {self._value(tensor) for tensor in tensors_in(out)}

    def end(self) -> Flow:
        """Ends the recording.  A value that something outside still holds counts as leaving the model."""
        # Only the last value of each tensor counts.
        last = {id(tensor): (value, weakref.ref(tensor)) for value, tensor in self._held}
        refs = [(value, ref) for value, ref in last.values() if self.flow.maker(value)]
        self._held.clear()
        if any(ref() is not None for _, ref in refs):
            gc.collect()
        self.flow.returned |= {value for value, ref in refs if ref() is not None}
        return self.flow

    def call(self, name: str, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Calls a function, and records the call unless it is part of another recorded call."""
        if self._inside:
            return func(*args, **kwargs)
        read = self._begin((args, kwargs))
        try:
            out = func(*args, **kwargs)
        finally:
            self._inside -= 1
        self._end(name, None, read, out)
        return out

    def _value(self, tensor: Tensor) -> int:
        key = (id(tensor), tensor._version)
        if key not in self._values:
            self._values[key] = len(self._values)
            self._held.append((self._values[key], tensor))
            with DisableTorchFunction():
                for stored in tensors_of(tensor):
                    self._stored.setdefault(key_of(stored), set()).add(self._values[key])
        return self._values[key]

    def writes(self, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> None:
        """Notes the values over which an op writes.

        The version of a tensor does not tell all: ``.data`` has another one, and ``torch._foreach_mul_`` raises none.
        """
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tensors_of(args[i] if i < len(args) else kwargs.get(argument.name)):
                    self.flow.overwritten |= self._stored.get(key_of(tensor), set())

    def _begin(self, args: object) -> list[tuple[Tensor, int]]:
        self._inside += 1
        return [(tensor, self._value(tensor)) for tensor in tensors_in(args)]

    def _end(self, name: str, module: nn.Module | None, read: list[tuple[Tensor, int]], out: object) -> None:
        outputs = tensors_in(out)
        if not outputs and (name == "__get__" or name in METADATA):
            return
        known = {value for _, value in read}
        written = [tensor for tensor, value in read if self._value(tensor) != value]
        makes = tuple(dict.fromkeys(v for v in map(self._value, (*outputs, *written)) if v not in known))
        if outputs and not makes:
            self.flow.passed.update(self._value(tensor) for tensor in outputs)
            return
        size = (outputs[0].nbytes, tuple(outputs[0].shape)) if outputs else (None, None)
        reads = tuple(dict.fromkeys(value for _, value in read))
        self.flow.add(Call(name, module, self._where[-1], reads, makes, *size))

    def _sees(self, module: nn.Module, tree: object) -> None:
        if self._inside:
            return
        # Reading the version of a tensor is no call of the model.
        self._inside += 1
        for tensor in tensors_in(tree):
            self.flow.sees(module, self._value(tensor))
        self._inside -= 1

    def _enter(self, module: nn.Module, args: object, kwargs: object) -> None:
        self._sees(module, (args, kwargs))
        if self._inside and not is_leaf(module):
            return
        if not is_leaf(module):
            self._where.append(self._paths[module])
        elif self._inside:
            self._inside += 1
        else:
            self._begun.append(self._begin((args, kwargs)))

    def _leave(self, module: nn.Module, args: object, kwargs: object, out: object) -> None:
        if is_leaf(module):
            self._inside -= 1
            if not self._inside:
                self._end(type(module).__name__, module, self._begun.pop(), out)
        elif not self._inside:
            self._where.pop()
        self._sees(module, out)


class _Functions(TorchFunctionMode):
    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self._observer = observer

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._observer.call(getattr(func, "__name__", str(func)), func, args, kwargs or {})


class _Ops(TorchDispatchMode):
    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self._observer = observer

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._observer.writes(func, args, kwargs or {})
        return self._observer.call(func.overloadpacket.__name__, func, args, kwargs or {})


def fake_mode_of(model: nn.Module) -> FakeTensorMode:
    """The fake mode of the model's tensors; a new mode if they are real."""
    for tensor in (*model.parameters(), *model.buffers()):
        if isinstance(tensor, FakeTensor):
            return tensor.fake_mode
    return FakeTensorMode(allow_non_fake_inputs=True)


def replace_tensors(model: nn.Module, change: Callable[[Tensor], Any]) -> None:
    """Replaces every parameter and buffer by ``change`` of it; tied tensors stay tied."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        holders: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for tensors in holders:
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = made.setdefault(id(tensor), change(tensor))


@contextmanager
def on_fake_tensors(model: nn.Module, inputs: object) -> Iterator[Any]:
    """A context in which the model has fake parameters and buffers; yields the inputs as fake tensors."""
    mode = fake_mode_of(model)

    def fake(tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor)

    def fake_owned(tensor: Tensor) -> Tensor:
        # The mode refers weakly to each tensor that it has seen, until Python's garbage collector finds the mode.
        # PyTorch swaps no parameter with such a reference (``torch.utils.swap_tensors``), so the mode sees an alias.
        made = fake(tensor.detach())
        # A new parameter has no gradient yet, and the model's own parameter gets none.
        return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made

    with unchanged(model), torch.random.fork_rng(devices=[]), quiet():
        replace_tensors(model, fake_owned)
        with mode:
            yield tree_map_only(Tensor, fake, inputs)


def _run(model: nn.Module, inputs: tuple[tuple, dict], how: str) -> Flow:
    observer = Observer(model, how)
    with observer.watching():
        observer.returns(model(*inputs[0], **inputs[1]))
    return observer.end()


def set_training(model: nn.Module, training: bool) -> None:
    """Sets the flag of every module without calling ``train``, which models may override."""
    for module in model.modules():
        if not isinstance(module, torch.jit.ScriptModule):
            module.training = training


def observe(model: nn.Module, inputs: tuple[tuple, dict], training: bool) -> Flow:
    """The flow of one forward of the model in training or eval mode; the model stays as it was.

    A model that needs values runs on real tensors, with copies of its buffers.  Errors of the model pass through.
    """
    how = f"observed in {'training' if training else 'eval'} mode"
    with unchanged(model), torch.no_grad():
        set_training(model, training)
        try:
            with on_fake_tensors(model, inputs) as fake:
                return _run(model, fake, how)
        # A model may raise any error on tensors without values; real tensors are tried next.
        except Exception:
            if isinstance(next(model.parameters(), None), FakeTensor):
                raise
        with torch.random.fork_rng(devices=[]):
            replace_tensors(model, lambda t: t if isinstance(t, nn.Parameter) else t.clone())
            return _run(model, tree_map_only(Tensor, torch.clone, inputs), how)
