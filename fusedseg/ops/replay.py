"""Launches that are noted once and made again, for ops in the code of compiled graphs.

An op of this package finds layouts, plans and launchers anew in each call.  In a compiled graph of fixed sizes it finds
the same ones each time.  A ``Replay`` calls the op until all its launches are direct ones (``kernels/launcher.py``).
It notes which memory the op allocates and what it launches, and from then on does both without the op.

The op itself is called whenever its launches may differ from the noted ones: a tensor has other strides or another
address modulo 16, another GPU is the current one, a hook must see launches, or a dispatch mode must see allocations.
An op that runs a kernel of PyTorch, such as a copy to other strides, is never replayed.
"""

import functools
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _backend, _torch
from .layout import layout_of, memory_of
from .registry import Result, family
from .self_test.cases import EPS, MOMENTUM, SHAPE, SLOPE, image, parameters

aten = torch.ops.aten
# The first calls of an op compile its kernels and compare their arguments with those of Triton's own launch.
MOST_TRIES = 8
ALLOCATING = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
# Views, whose addresses are found from the memory that they lie in, and a question about dtypes.
VIEWING = {
    aten.unbind.int, aten.select.int, aten.slice.Tensor, aten.view.default, aten.detach.default,
    aten.promote_types.default,
}  # fmt: skip


# The calls of a replay that the self-test compares.  The first ones call the op.
COMPARED = 7


class Refused(Exception):
    """The calls of an op cannot be made again without it."""


class Allocation(NamedTuple):
    """The arguments of ``torch.empty_strided``."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Program(NamedTuple):
    """What an op allocates and launches.

    Tensors are numbered: first the arguments, then what is allocated; -1 stands for an absent tensor.  Addresses are
    numbered in the same way, and those of ``parts`` follow.  A part begins some bytes behind the address of a tensor.

    forms: the dtype and the strides of the arguments with two dimensions or more; None for the others.
    launches: the kernel and its call with the grid and the options; what takes the addresses of the launch from all
        addresses; the values behind them; whether these arguments are passed as one tuple; and the compiled kernel,
        whose code is unloaded when it is freed.
    results: takes the results from all tensors.
    """

    forms: tuple[tuple[torch.dtype, tuple[int, ...]] | None, ...]
    allocations: tuple[Allocation, ...]
    parts: tuple[tuple[int, int], ...]
    launches: tuple[tuple[Any, ...], ...]
    results: Callable[[list[Tensor | None]], Any]


class Watch(_torch.TorchDispatchMode):
    """Lists the tensors that are allocated, and whether another op than these and views has run."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated: list[Tensor] = []
        self.only_allocates = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in ALLOCATING:
            self.allocated.append(result)
        elif func not in VIEWING:
            self.only_allocates = False
        return result


class Replay:
    """``function(*tensors)``, called as ``replay(stream, *tensors)`` with the result of ``direct_stream``.

    The tensors have the same sizes in every call.  A None among them is None in every call.
    """

    def __init__(self, function: Callable[..., Any], device: torch.device) -> None:
        self.function = function
        self.__name__ = function.__name__
        self._empty = _torch.EMPTY_STRIDED[device.type]
        self._program: Program | None = None
        self._tries = 0
        _made.add(self)

    def forget(self) -> None:
        """Forgets the launches, so that the next calls note them again."""
        self._program = None
        self._tries = 0

    def __call__(self, stream: Any, *tensors: Tensor | None) -> Any:
        program = self._program
        if stream is None:
            return self.function(*tensors)
        if program is None:
            return self._noted(tensors) if self._tries < MOST_TRIES else self.function(*tensors)
        values = list(tensors)
        addresses: list[Any] = []
        bits = 0
        for t, form in zip(tensors, program.forms, strict=True):
            if t is None:
                addresses.append(None)
                continue
            if form is not None and (t.dtype, t.stride()) != form:
                return self.function(*tensors)
            address = t.data_ptr()
            bits |= address
            addresses.append(address)
        if bits % 16:
            return self.function(*tensors)
        for kernel, *_ in program.launches:
            if kernel.pre_run_hooks:
                return self.function(*tensors)
        for allocation in program.allocations:
            new = self._empty(*allocation)
            values.append(new)
            addresses.append(new.data_ptr())
        for number, distance in program.parts:
            addresses.append(addresses[number] + distance)
        addresses.append(None)
        for _, call, grid, options, choose, rest, packed, _ in program.launches:
            if packed:
                call(*grid, stream, *options, (*choose(addresses), *rest))
            else:
                call(*grid, stream, *options, *choose(addresses), *rest)
        values.append(None)
        return program.results(values)

    def _noted(self, tensors: tuple[Tensor | None, ...]) -> Any:
        """Calls the op, and notes what it does."""
        _, noting = _launching()
        with noting() as notes, Watch() as watch:
            results = self.function(*tensors)
        # A profiler's hook goes again, and then the launches are noted.
        self._tries += not notes.hooked
        if notes.complete and watch.only_allocates:
            try:
                self._program = program_of(tensors, watch.allocated, notes.launches, results)
            except Refused:
                self._tries = MOST_TRIES
        return results


_made: weakref.WeakSet[Replay] = weakref.WeakSet()


def forget() -> None:
    """Forgets all noted launches."""
    for replay in list(_made):
        replay.forget()


_backend.at_forget(forget)


@functools.cache
def _launching() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The functions ``direct_stream`` and ``noting``, whose module the first call imports."""
    # An import statement would look the module up in every call.
    from ..kernels.launcher import at_forget, direct_stream, noting

    at_forget(forget)
    return direct_stream, noting


def direct_stream(device: int | None, argument: Tensor) -> Any:
    """The stream for the replays of a graph; None if its ops must be called.

    ``device`` is the number of a GPU, or None for a CPU.  ``argument`` is an argument of the graph: if one is a fake
    tensor, all are.
    """
    if _torch.len_torch_dispatch_stack() or isinstance(argument, _torch.FakeTensor):
        return None
    on = argument.device
    # A lookup takes less time than a call.
    passed = _backend.proven.get(("replays", on)) or _backend.proves("replays", on)
    find, _ = _launching()
    return find(device) if passed else None


def is_same(t: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same memory and the same form."""
    alike = t.dtype == other.dtype and t.shape == other.shape and t.stride() == other.stride()
    return alike and t.data_ptr() == other.data_ptr() and memory_of(t) == memory_of(other)


class Numbers:
    """The numbers of the tensors of a call: the arguments, and behind them what it has allocated."""

    def __init__(self, arguments: Sequence[Tensor | None], allocated: Sequence[Tensor]) -> None:
        self.known = [*arguments, *allocated]
        self.arguments = len(arguments)
        # Parts of tensors, (number, distance in bytes).
        self.parts: list[tuple[int, int]] = []
        given = [t for t in arguments if t is not None]
        # Two gradients of a sum are one tensor.  In the next call they may be two, and a launch does not say which.
        if len(set(map(id, given))) < len(given) or any(t is not None and t.data_ptr() % 16 for t in self.known):
            raise Refused

    def of_tensor(self, t: Tensor | None) -> int | None:
        """The number of a tensor; -1 for None; None for a tensor that is not among them."""
        if t is None:
            return -1
        for number, other in enumerate(self.known):
            # What a mode sees of an allocation is another object with the same memory.
            if t is other or (number >= self.arguments and other is not None and is_same(t, other)):
                return number
        return None

    def of_result(self, t: Tensor | None) -> int:
        number = self.of_tensor(t)
        if number is None:
            raise Refused
        return number

    def part_of(self, t: Tensor) -> tuple[int, int]:
        """The tensor that ``t`` is a part of, and the distance in bytes."""
        known = ((n, other) for n, other in enumerate(self.known) if other is not None)
        found = [(n, other) for n, other in known if memory_of(other) == memory_of(t)]
        if len(found) != 1:
            raise Refused
        ((number, whole),) = found
        distance = t.data_ptr() - whole.data_ptr()
        if distance % 16:
            raise Refused
        return number, distance

    def of_address(self, t: Tensor | None) -> int:
        """The number of the address of a tensor of a launch, which may be a part of another tensor."""
        number = self.of_tensor(t)
        if number is None:
            assert t is not None
            part = self.part_of(t)
            if part not in self.parts:
                self.parts.append(part)
            number = len(self.known) + self.parts.index(part)
        return number


def program_of(
    tensors: Sequence[Tensor | None], allocated: Sequence[Tensor], launches: Sequence[Any], results: Any
) -> Program:
    """The program of a call, from its arguments, what it has allocated and launched, and its results.

    Raises:
        Refused: there is no launch, or a launch or a result has a tensor that is none of them, nor a part of one, or
            an address is no multiple of 16, or two arguments are one tensor.
    """
    numbers = Numbers(tensors, allocated)
    returned = [results] if isinstance(results, Tensor) else results
    if not launches or (returned is results and len(results) < 2):
        raise Refused
    made = []
    for launch in launches:
        call, function, options, packed, compiled = launch.ready
        choose = operator.itemgetter(*map(numbers.of_address, launch.tensors))
        options = (function, *options)
        made.append((launch.kernel, call, launch.grid, options, choose, launch.values, packed, compiled))
    return Program(
        forms=tuple((t.dtype, t.stride()) if t is not None and t.dim() > 1 else None for t in tensors),
        allocations=tuple(Allocation(tuple(t.shape), t.stride(), t.dtype) for t in allocated),
        parts=tuple(numbers.parts),
        launches=tuple(made),
        results=operator.itemgetter(*map(numbers.of_result, returned)),
    )


def _late(values: Tensor) -> Tensor:
    """A tensor that gets its values a millisecond later, on the current stream, and is NaN until then."""
    late = torch.full_like(values, torch.nan)
    if values.is_cuda:
        _torch.cuda_sleep(2_000_000)
    return late.copy_(values)


def _training_step(x: Tensor, dz: Tensor, weight: Tensor, bias: Tensor, running: Tensor, var: Tensor) -> list[Tensor]:
    """Forward and backward of a norm, by launchers, which ask nobody whether they are right."""
    from ..kernels.norm_act import norm_act_fwd
    from ..kernels.norm_act_bwd import norm_act_bwd

    layout, act, z = layout_of(x), ("leaky_relu", SLOPE), torch.empty_like(x)
    _, rstd, _ = norm_act_fwd(
        x, z, layout, weight, bias, running_mean=running, running_var=var, training=True, momentum=MOMENTUM, eps=EPS,
        act=act, kept=None, partial=None, batches=None,
    )  # fmt: skip
    dx, dweight, dbias = norm_act_bwd(
        dz, z, layout, weight, bias, rstd, training=True, dparam_dtype=weight.dtype, xhat_kept=None, kept=None, act=act
    )
    return [z, dx, dweight, dbias]


@family("replays", dtypes=(torch.float32,), instead="Every op makes its launches itself")
def _self_test(dtype: torch.dtype, device: torch.device) -> Iterator[Result]:
    """Launches that are made again have the bits of the op, and read tensors where they are, when they have values."""
    from ..kernels.launcher import direct_stream

    again, alive = Replay(_training_step, device), list[Any]()
    weight, bias = parameters(SHAPE[1], dtype, device)
    for call in range(COMPARED):
        x, dz = (image(SHAPE, dtype, device, "channels_last", 2 * call + k) for k in range(2))
        right, found = torch.zeros(2, 2, SHAPE[1], dtype=dtype, device=device)
        wanted = [*_training_step(x, dz, weight, bias, *right), right]
        x, dz = _late(x), _late(dz)
        results = [*again(direct_stream(device.index), x, dz, weight, bias, *found), found]
        # Tensors that stay alive make those of the next call lie elsewhere.
        alive.append((x, dz, results))
        for place, (mine, theirs) in enumerate(zip(results, wanted, strict=True)):
            yield Result(f"result {place} of call {call}", mine, theirs.double(), 0.0)
