"""Counts the bytes that a training step keeps for backward, and the most bytes alive at once, on real or fake tensors.

    with fake_mode():                           # the sizes of a step on a GPU, without memory and without computing
        model, x = UNet(3, 4), torch.empty(8, 3, 512, 512)
        print(measure(model, x))

It counts storages instead of tensors, so that views and in-place results add nothing.  A model must be built in its
dtype inside the fake mode, because PyTorch refuses ``.to(dtype)`` on fake parameters.  ``torch.compile`` runs eagerly
under a dispatch mode; measure a compiled model with ``SavedBytes`` and ``allocator_peak`` instead.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch.autograd.graph import Node, saved_tensors_hooks

from .._torch import FakeTensor, TorchDispatchMode, tree_leaves
from ..ops.layout import memory_of
from .step_bytes import StepBytes, copies_of


@dataclass(frozen=True)
class Footprint:
    """The bytes that one forward and backward needs.

    Attributes:
        saved: bytes of the storages that autograd keeps at the end of forward, without parameters and buffers.
        held: bytes of all storages alive at the end of forward.
        peak: the most bytes alive at once during forward, loss and backward, gradients included.
        with_workspaces: the most bytes at once with the estimated workspaces of convolutions (``step_bytes.py``).
        course: the bytes alive after each allocation and each release, in forward, and in loss and backward.
        saved_by: the bytes of ``saved`` by what ``measure``'s argument ``where`` said when they were allocated; None
            stands for storages that were there before.
    """

    saved: int
    held: int
    peak: int
    with_workspaces: int = field(default=0, repr=False)
    course: tuple[list[int], list[int]] = field(default=([], []), repr=False)
    saved_by: Mapping[Any, int] = field(default_factory=dict, repr=False)

    @property
    def needs(self) -> StepBytes:
        """What the step needs, as the figures of a ``Profile``."""
        return StepBytes(self.saved, self.peak, self.with_workspaces)

    def __str__(self) -> str:
        shown = {"saved": self.saved, "held": self.held, "peak": self.peak}
        return ", ".join(f"{name} {value / 2**20:.1f} MiB" for name, value in shown.items())


def tensors_of(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided]


# The bytes of tensors alive at each call of forward, and at each call of backward.
Course = tuple[Sequence[int], Sequence[int]]


class SavedBytes:
    """A context that counts the storages that autograd keeps, each until the graph frees it.

    It sees the tensors that custom Functions hand to ``save_for_backward``.  It does not see tensors that a Function
    stores in attributes of its ctx; call ``add_attributes`` with the outputs to count these.  Only the innermost
    saved-tensor hooks see a tensor, so tensors under a model's own hooks are missing.

    Args:
        owned: tensors whose storages are not counted, such as parameters and buffers.
    """

    def __init__(self, owned: Iterable[torch.Tensor] = ()) -> None:
        self._owned = {memory_of(tensor) for tensor in owned}
        # The storages of the tensors that graphs hold, and of those that are counted besides, and their bytes.
        self._held = weakref.WeakKeyDictionary[_SavedTensor, tuple[int, int]]()
        self._more: dict[int, int] = {}
        self._hooks = saved_tensors_hooks(self._packed, lambda saved: saved.tensor)

    def __enter__(self) -> "SavedBytes":
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._hooks.__exit__(*exception)

    @property
    def nbytes(self) -> int:
        """Bytes kept at this moment."""
        return sum(self.sizes.values())

    @property
    def sizes(self) -> dict[int, int]:
        """The bytes of each storage that is kept at this moment, by the key of the storage."""
        found = dict(self._held.values()) | self._more
        return {key: nbytes for key, nbytes in found.items() if key not in self._owned}

    def add(self, tensor: torch.Tensor) -> None:
        """Counts one more storage that is certainly kept, such as the output, which the next layer saves."""
        self._more[memory_of(tensor)] = tensor.untyped_storage().nbytes()

    def add_attributes(self, outputs: object) -> None:
        """Counts the tensors that custom Functions in the graph of the outputs hold as attributes."""
        for node in graph_of(outputs):
            for tensor in tensors_of(getattr(node, "__dict__", {})):
                self.add(tensor)

    def _packed(self, tensor: torch.Tensor) -> "_SavedTensor":
        # Tensors are detached, because an output that is packed with its own graph would keep itself alive.
        saved = _SavedTensor(tensor.detach())
        self._held[saved] = memory_of(tensor), tensor.untyped_storage().nbytes()
        return saved


class _SavedTensor:
    """A saved tensor.  The graph holds the only reference, so that it is gone when the graph frees it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def graph_of(outputs: object) -> Iterator[Node]:
    """The nodes of autograd's graph that lead to the outputs."""
    seen: set[Node] = set()
    stack = [tensor.grad_fn for tensor in tensors_of(outputs)]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            stack.extend(parent for parent, _ in node.next_functions)
            yield node


class LiveBytes(TorchDispatchMode):
    """A dispatch mode that follows every storage from the op that allocates it until it is freed.

    Storages that existed before, such as inputs and parameters, are counted only if ``track`` is called with them.
    Workspaces inside an op are not seen; ``allocator_peak`` counts them.

    Attributes:
        current: bytes alive now.
        peak: the most bytes alive at once so far.
        with_workspaces: the most bytes alive at once so far, with the estimated workspaces of convolutions.
        places: for each storage that is alive what ``where`` said when it was allocated.
        course: the bytes after each allocation and each release.
    """

    def __init__(self, where: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.current = 0
        self.peak = 0
        self.with_workspaces = 0
        self.places: dict[int, object] = {}
        self.course: list[int] = []
        self._where = where

    def track(self, tensor: torch.Tensor) -> None:
        """Counts the tensor's storage from now until it is freed."""
        storage, key = tensor.untyped_storage(), memory_of(tensor)
        if key not in self.places:
            self.places[key] = self._where()
            self._count(storage.nbytes())
            self.peak = max(self.peak, self.current)
            weakref.finalize(storage, self._freed, key, storage.nbytes()).atexit = False

    def _freed(self, key: int, nbytes: int) -> None:
        self.places.pop(key, None)
        self._count(-nbytes)

    def _count(self, nbytes: int) -> None:
        self.current += nbytes
        self.course.append(self.current)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.native_batch_norm_backward.default and isinstance(out[0], FakeTensor):
            # Without values it returns a gradient of the input even if nobody asks for it.
            *_, output_mask = args
            out = (out[0] if output_mask[0] else None), *out[1:]
        # This is by far the most frequent view, because every saved tensor is detached.
        if func is torch.ops.aten.detach.default:
            return out
        given = {memory_of(tensor) for tensor in tensors_of((args, kwargs))}
        for tensor in tensors_of(out):
            if memory_of(tensor) not in given:
                self.track(tensor)
        self.with_workspaces = max(self.with_workspaces, self.current + _workspace(func, args, out))
        return out


def _workspace(func: Any, args: tuple, out: Any) -> int:
    if func is torch.ops.aten.convolution.default:
        return copies_of([args[0], out])
    return copies_of(args[:2]) if func is torch.ops.aten.convolution_backward.default else 0


def mean_of(out: object) -> torch.Tensor:
    means = [tensor.float().mean() for tensor in tensors_of(out)]
    if not means:
        raise ValueError("fusedseg: the model must return a floating-point tensor, whose mean is the loss of the step")
    return torch.stack(means).sum()


def measure(
    fn: Callable[..., Any],
    *inputs: object,
    loss: Callable[[Any], torch.Tensor] = mean_of,
    owned: Iterable[torch.Tensor] = (),
    where: Callable[[], object] = lambda: None,
) -> Footprint:
    """Runs one forward and backward and returns its ``Footprint`` in bytes.

    Gradients accumulate and running statistics move, as in any step.

    Args:
        fn: an ``nn.Module`` (its parameters and buffers are excluded from ``saved``) or a function of the inputs.
        inputs: the arguments of ``fn``.  An input that autograd keeps counts in ``saved``.
        loss: maps the output of ``fn`` to the scalar that is differentiated; by default the mean of all outputs.
        owned: more tensors to exclude from ``saved``, such as the weights of a plain function.
        where: is asked at each allocation, and names the place for ``saved_by``, such as the module that runs.
    """
    owned = list(owned)
    if isinstance(fn, torch.nn.Module):
        owned += [*fn.parameters(), *fn.buffers()]
    # Tensors without values cannot show NaN, and the masks of anomaly mode's search for it would be counted.
    no_search = torch.autograd.set_detect_anomaly(torch.is_anomaly_enabled(), check_nan=False)
    with no_search, LiveBytes(where) as live:
        with SavedBytes(owned) as saved:
            out = fn(*inputs)
        saved.add_attributes(out)
        by = Counter[object]()
        for key, nbytes in saved.sizes.items():
            by[live.places.get(key)] += nbytes
        saved_bytes, held_bytes = saved.nbytes, live.current
        forward, live.course = live.course, []
        value = loss(out)
        del out
        if value.requires_grad:
            value.backward()
    return Footprint(saved_bytes, held_bytes, live.peak, live.with_workspaces, (forward, live.course), by)


def allocator_peak(step: Callable[[], Any], device: torch.device | str = "cpu") -> int:
    """The most bytes that the allocator had handed out at once during ``step()``, beyond the bytes before the step.

    Unlike a dispatch mode, it counts compiled code and workspaces inside an op.  The figure comes from the caching
    allocator on CUDA, and from the profiler's allocation events on a CPU.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    return max(0, *course_on_cpu(step))


def course_on_cpu(step: Callable[[], Any]) -> list[int]:
    """The bytes that the allocator of a CPU had handed out after each event in ``step()``, beyond those before it."""
    cpu = [torch.profiler.ProfilerActivity.CPU]
    # One cycle has nothing to accumulate, but PyTorch 2.11 warns without `acc_events`.
    with torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as profiler:
        step()
    events = (event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]")
    return list(accumulate(event.nbytes() for event in events))
