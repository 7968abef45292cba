"""Follows one training step: each storage from the op that makes it until it is freed, and the calls of each module.

The bytes are those of meter.py.  This module adds the module that ran, the op that made a storage, the phase of the
step and the kind of the storage.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import Node

from .._module_hooks import looking_on
from .._torch import OpOverload, get_sequence_nr
from .meter import LiveBytes, SavedBytes, graph_of, key_of

PHASES = ("forward", "loss", "backward", "optimizer")
ROOT, LOSS = "(model)", "(loss)"
# The kind of storage that an op makes, by the op's name.  Storages of other ops have the kind of their phase.
KINDS = {"cat": "concatenation", "stack": "concatenation"}
PHASE_KINDS = {
    "forward": "activation",
    "loss": "loss",
    "backward": "backward temporaries",
    "optimizer": "optimizer step",
}
# The kind of storages that a checkpoint makes when it runs forward again: hooks run in backward.
RECOMPUTED = "recomputed"
# The kinds of storages that exist before the step and stay.
RESIDENT_KINDS = ("parameters", "buffers", "optimizer state", "inputs", "constants")


@dataclass(slots=True)
class Storage:
    """One allocation.

    Attributes:
        nbytes: its size.
        shape, dtype: the shape and dtype of the tensor that the op returned.
        op, module, phase: the op that made it, the path of the module that ran, and the phase of the step.
        kind: parameters, buffers, optimizer state, inputs, constants (attributes that are no buffers); activation,
            concatenation, pool indices, upsampled, weight copies (in the dtype of autocast); loss, backward
            temporaries, recomputed, gradients (of parameters), optimizer step.
        born: the number of the event of its allocation (see ``Trace.events``); -1 if it existed before the step.
        freed: the number of the event when it was freed; None if it outlives the step.
        savers: the (module, op) pairs that keep it for backward at the end of forward.
    """

    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    op: str
    module: str
    phase: str
    kind: str
    born: int
    freed: int | None = None
    savers: list[tuple[str, str]] = field(default_factory=list)


@dataclass(slots=True)
class Row:
    """Memory in bytes at one hook of one module.

    Attributes:
        layer_idx: the position of the module in ``model.modules()``.
        call_idx: the number of the row.
        layer_type: the class of the module.
        name: the path of the module.
        exp: the label of the report.
        hook_type: "pre" before the module's forward; "fwd" after it; "bwd" when its gradients are computed and the
            tensors that it kept are free.
        mem_all: bytes alive, including those that existed before the step; on CUDA the bytes that the allocator has
            handed out.
        mem_cached: on CUDA the bytes that the allocator has reserved; elsewhere the most bytes alive so far, which a
            caching allocator would keep at least.
        mem_all_diff, mem_cached_diff: the changes since the previous row.
        phase: forward, loss or backward; "pre" and "fwd" rows in backward belong to a checkpoint that runs again.
        event: the number of the event before the row (see ``Trace.events``).
    """

    layer_idx: int
    call_idx: int
    layer_type: str
    name: str
    exp: str
    hook_type: str
    mem_all: int
    mem_cached: int
    mem_all_diff: int
    mem_cached_diff: int
    phase: str
    event: int


class _Call(NamedTuple):
    name: str
    # The number that autograd will give to the next node.
    node: int


class _Saved(SavedBytes):
    """``SavedBytes`` that knows which module runs."""

    def __init__(self, owned: Iterable[torch.Tensor], trace: "Trace") -> None:
        super().__init__(owned)
        self._trace = trace

    def module(self) -> str:
        return self._trace.module


class Trace(LiveBytes):
    """The dispatch mode of a step, and the hooks of its modules.

    Attributes:
        storages: all allocations.
        events: for each allocation the storage's index in ``storages``, and for each release ``~index``, in order.
        marks: the number of the first event of each phase.
        rows: memory at each hook of each module.
        resident: bytes that existed before the step.
    """

    def __init__(self, device: torch.device, exp: str) -> None:
        # The import stands here, because this module of PyTorch imports triton, and `import fusedseg` must not.
        from torch.utils.flop_counter import flop_registry

        super().__init__()
        self.device, self.exp = device, exp
        self._flops_of = flop_registry
        self.storages: list[Storage] = []
        self.events: list[int] = []
        self.marks: dict[str, int] = {}
        self.rows: list[Row] = []
        self.resident, self.peak_event = 0, -1
        self.flops = dict.fromkeys((*PHASES, RECOMPUTED), 0)
        self.phase = PHASES[0]
        self._closed, self._highest = False, 0
        self._index: dict[int, int] = {}
        self._calls: list[_Call] = []
        self._layers: dict[nn.Module, tuple[int, str]] = {}
        self._weights: set[int] = set()
        self._from_weight = False
        self._backward: list[Callable[[], None]] = []
        self._exits = ExitStack()

    # -- live storages ------------------------------------------------------------------------------------------------

    def add_resident(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """Counts tensors that existed before the step."""
        for tensor in tensors:
            storage, key = tensor.untyped_storage(), key_of(tensor)
            if key not in self._live:
                self._live.add(key)
                self.resident += storage.nbytes()
                self._index[key] = len(self.storages)
                shape = tuple(tensor.shape)
                self.storages.append(Storage(storage.nbytes(), shape, tensor.dtype, "", "", "", kind, -1))
            if kind == "parameters":
                self._weights.add(key)

    def alive(self) -> list[tuple[int, Storage]]:
        """(key, storage) of each storage that is alive now."""
        return [(key, self.storages[index]) for key, index in self._index.items()]

    def add_constants(self, saved: Mapping[int, int]) -> None:
        """Counts saved storages (key -> bytes) that are not known yet: tensors in plain attributes of a module."""
        for key, nbytes in saved.items():
            if key not in self._index:
                self._index[key] = len(self.storages)
                self.storages.append(Storage(nbytes, (), torch.uint8, "", ROOT, "", "constants", -1))

    def begin(self, phase: str) -> None:
        self._flush()
        self.phase = phase
        self.marks[phase] = len(self.events)

    @property
    def module(self) -> str:
        return self._calls[-1].name if self._calls else LOSS if self.phase == "loss" else ROOT

    @property
    def _recomputes(self) -> bool:
        return self.phase == "backward" and bool(self._calls)

    def allocated(self, key: int, tensor: torch.Tensor, func: object) -> None:
        op = func.overloadpacket.__name__ if isinstance(func, OpOverload) else ""
        self._index[key] = len(self.storages)
        self.events.append(len(self.storages))
        kind = self._kind(op, tensor, func)
        nbytes, shape = tensor.untyped_storage().nbytes(), tuple(tensor.shape)
        storage = Storage(nbytes, shape, tensor.dtype, op, self.module, self.phase, kind, born=len(self.events) - 1)
        self.storages.append(storage)
        if self.current == self.peak and self.current > self._highest:
            self._highest, self.peak_event = self.current, len(self.events) - 1

    def _kind(self, op: str, tensor: torch.Tensor, func: object) -> str:
        if self._recomputes:
            return RECOMPUTED
        if self.phase != "forward":
            return PHASE_KINDS[self.phase]
        if "pool" in op and not tensor.is_floating_point():
            return "pool indices"
        if op.startswith(("upsample", "_upsample")):
            return "upsampled"
        if op == "_to_copy" and self._from_weight:
            return "weight copies"
        return KINDS.get(op, PHASE_KINDS["forward"])

    def freed(self, key: int) -> None:
        index = self._index.pop(key, None)
        if index is not None and not self._closed:
            self.events.append(~index)
            self.storages[index].freed = len(self.events) - 1

    def storage_of(self, tensor: torch.Tensor) -> Storage | None:
        index = self._index.get(key_of(tensor))
        return None if index is None else self.storages[index]

    # -- ops ----------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._flush()
        self._from_weight = bool(args) and isinstance(args[0], torch.Tensor) and key_of(args[0]) in self._weights
        out = super().__torch_dispatch__(func, types, args, kwargs)
        count = self._flops_of.get(func.overloadpacket)
        if count is not None:
            # The gradients of a convolution have an op of their own.
            again = self.phase == "backward" and func.overloadpacket is torch.ops.aten.convolution
            where = RECOMPUTED if again or self._recomputes else self.phase
            self.flops[where] += count(*args, **(kwargs or {}), out_val=out)
        return out

    # -- modules ------------------------------------------------------------------------------------------------------

    def watch(self, model: nn.Module, others: Iterable[nn.Module] = ()) -> None:
        """Hooks the calls of each module until ``close``.

        A module with hooks of its own may run in another way, as ``ConvABN2d`` does, so it gets none.
        """
        named = [(name or ROOT, module) for name, module in model.named_modules()]
        known = {module for _, module in named}
        for other in others:
            more = [(f"{LOSS}.{name}" if name else LOSS, module) for name, module in other.named_modules()]
            named += [(name, module) for name, module in more if module not in known]
        for index, (name, module) in enumerate(named):
            self._layers[module] = (index, name)
        self._exits.enter_context(looking_on(self._pre, self._fwd))

    def saved(self, owned: Iterable[torch.Tensor]) -> SavedBytes:
        return _Saved(owned, self)

    def close(self) -> None:
        """Removes the hooks.  Later releases are not followed."""
        self._flush()
        self._closed = True
        self._exits.close()

    def _pre(self, module: nn.Module, args: object) -> None:
        if module not in self._layers:
            return
        self._row(module, "pre")
        self._calls.append(_Call(self._layers[module][1], get_sequence_nr()))

    def _fwd(self, module: nn.Module, args: object, out: object) -> None:
        if module not in self._layers:
            return
        call = self._calls.pop()
        self._row(module, "fwd")
        last = _first_node(out, call.node)
        if last is not None:
            # When this hook runs, the gradient is computed, but the node still holds its tensors; `_flush` waits.
            done = last.register_hook(lambda grad_inputs, grad_outputs: self._await_row(module))
            self._exits.callback(done.remove)

    def _await_row(self, module: nn.Module) -> None:
        self._backward.append(lambda: self._row(module, "bwd"))

    def _flush(self) -> None:
        """Adds the rows of modules whose backward is over.  It runs at the next event, when their tensors are free."""
        if self._backward:
            waiting, self._backward = self._backward, []
            for take in waiting:
                take()

    def _row(self, module: nn.Module, hook_type: str) -> None:
        if hook_type != "bwd":
            self._flush()
        index, name = self._layers[module]
        if self.device.type == "cuda":
            mem_all, cached = torch.cuda.memory_allocated(self.device), torch.cuda.memory_reserved(self.device)
        else:
            mem_all, cached = self.resident + self.current, self.resident + self.peak
        before = self.rows[-1] if self.rows else None
        self.rows.append(
            Row(
                layer_idx=index,
                call_idx=len(self.rows),
                layer_type=type(module).__name__,
                name=name,
                exp=self.exp,
                hook_type=hook_type,
                mem_all=mem_all,
                mem_cached=cached,
                mem_all_diff=mem_all - before.mem_all if before else 0,
                mem_cached_diff=cached - before.mem_cached if before else 0,
                phase=self.phase,
                event=len(self.events),
            )
        )


def _first_node(out: object, since: int) -> Node | None:
    """The first node that a call has created, which runs last in backward.

    ``since`` is the number that autograd would have given to a node when the call began.
    """

    def is_of_call(node: Node) -> bool:
        # The nodes of parameters have the highest numbers, and run at another time.
        return node._sequence_nr() >= since and not node.name().endswith("AccumulateGrad")

    return min(graph_of(out, is_of_call), key=lambda node: node._sequence_nr(), default=None)
