"""Launches a kernel again without the work that Triton repeats for every call.

``kernel[grid](...)`` binds its arguments, specialises each of them, and looks up the compiled kernel.  On tensors of a
few thousand elements this takes longer than the kernel.  A ``Launcher`` does it once for each kind of call, and then
calls the compiled kernel directly, as ``JITFunction.run`` would.

Calls are of the same kind if Triton compiles the same kernel for them.  The kind consists of the device, and for every
tensor whether it is given, its dtype, and whether its address is a multiple of 16.  The sizes and constants count too;
a launcher holds them.  The values of floats do not matter.

Triton's public call is used on AMD's GPUs, for which Triton also looks at the size of a tensor's storage; in the
interpreter; with a replaced ``JITFunction.run``, as in ``dry_run``; with hooks of profilers and options of debuggers;
with versions of Triton that are not in ``VERSIONS``; and if Triton passes its launchers other arguments than a direct
launch would, which ``Spy`` finds out once in each process.

``noting`` lists the launches of a function, for code that makes the same launches again (``fusedseg/ops/replay.py``) or
that compiles their kernels before (``ahead.py``).
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import triton
from torch import Tensor

from .triton_names import CompiledKernel, JITFunction, driver, knobs

# The versions whose JITFunction.run and CompiledKernel.run we have read.  Other versions may pass other arguments.
VERSIONS = ("3.6", "3.7", "3.8", "3.9")
VERSION = ".".join(triton.__version__.split(".")[:2])
KNOWN = VERSION in VERSIONS
# Whether CudaLauncher is a class in Python whose ``__call__`` we have read.
IN_PYTHON = VERSION in ("3.8", "3.9")
RUN = JITFunction.run
# A multiplication and an addition must not become one instruction that rounds once.  The compiler did this for one of
# two lanes only, so lanes that should have held the same mean differed in the last bit.  One lane stored its mean, and
# the other lanes applied their own mean.  So the z that backward rebuilt from the stored mean was not the z of forward.
# See docs/methods.md.
FP_FUSION = False
# A network has few layouts.  The limit is for shapes that change with every batch.
MAX_PLANS = 1024

Made = TypeVar("Made")


def nothing() -> None:
    pass


# What a direct launch calls if one of its addresses is no multiple of 16: another kernel runs then.
tell_of_odd: Callable[[], None] = nothing
# Functions that clear cached plans, and what was made from plans.
_clear: list[Callable[[], None]] = []


def plan(make: Callable[..., Made]) -> Callable[..., Made]:
    """Caches a function of shapes, dtypes and options."""
    cached = functools.lru_cache(MAX_PLANS)(make)
    _clear.append(cached.cache_clear)
    return cached


def at_forget(clear: Callable[[], None]) -> None:
    """Registers a function that forgets what was made from plans."""
    _clear.append(clear)


def forget_plans() -> None:
    """Clears all cached plans.

    Call it after a change of constants that plans depend on, such as those of ``launch.py``; tests and benches do so.
    """
    for clear in _clear:
        clear()


def is_watched() -> bool:
    """Whether a hook must see launches, or whether an option changes the compiled code."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    # A hook is a chain of hooks; in older versions it is a single hook or None.
    return bool(
        getattr(enter, "calls", enter)
        or getattr(leave, "calls", leave)
        or runtime.debug
        or knobs.compilation.instrumentation_mode
        or runtime.add_stages_inspection_hook is not None
    )


def addresses_and_kind(tensors: Sequence[Tensor | None], device: Any) -> tuple[list[int | None], tuple]:
    """The addresses of the tensors, and the kind of the call, without the launcher's own sizes and constants."""
    bits = 0
    addresses: list[int | None] = []
    kind = [device]
    for t in tensors:
        if t is None:
            addresses.append(None)
            kind.append(None)
        else:
            address = t.data_ptr()
            bits |= address
            addresses.append(address)
            kind.append(t.dtype)
    # In most calls all addresses are multiples of 16.
    if bits % 16:
        kind += [a and a % 16 for a in addresses]
        tell_of_odd()
    return addresses, tuple(kind)


def kind_now(tensors: Sequence[Tensor | None]) -> tuple:
    """The kind of a call on the current device."""
    return addresses_and_kind(tensors, driver.active.get_current_device())[1]


class Ready(NamedTuple):
    """A compiled kernel, and the call that launches it: ``call(*grid, stream, function, *options, *arguments)``.

    ``packed`` says that the arguments are passed as one tuple.  ``compiled`` is kept because its code is unloaded when
    it is freed.
    """

    call: Callable[..., None]
    function: int
    options: tuple
    packed: bool
    compiled: CompiledKernel


def ready(compiled: Any) -> Ready:
    """The launch that ``JITFunction.run`` makes if no hook must see it.

    Since Triton 3.8 ``CompiledKernel.run`` is a function in Python.  If it only passes its arguments on to a function
    in C, the function in C is called directly.
    """
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    if not IN_PYTHON or type(run).__name__ != "CudaLauncher" or run.gsan_enabled:
        return Ready(run, function, (metadata, None, None, None), False, compiled)
    if run.global_scratch_size or run.profile_scratch_size:
        return Ready(run, function, (metadata, None, None, None), False, compiled)
    options = (
        run.launch_cooperative_grid, run.launch_pdl, metadata, *(None,) * 5, run.arg_annotations, run.kernel_signature
    )  # fmt: skip
    return Ready(run.launch, function, options, True, compiled)


# Whether Triton passes to its launchers what direct launches pass; None until a launch has shown it.
_agrees: bool | None = None
# Launchers share compiled kernels.  A spy that leaves would take away that of another thread.
_spying = threading.Lock()


class Spy:
    """A context in which a compiled kernel's launch through Triton notes the arguments of the function it calls.

    ``found`` is the direct launch of the kernel.  ``arguments`` is None if Triton calls another function.
    """

    def __init__(self, found: Ready) -> None:
        self.owner, self.name = (found.compiled.run, "launch") if found.packed else (found.compiled, "_run")
        self.original = found.call
        self.thread = threading.get_ident()
        self.arguments: tuple | None = None

    def __call__(self, *arguments: Any) -> None:
        # Another thread may launch the same kernel meanwhile, with other arguments.
        if threading.get_ident() == self.thread:
            self.arguments = arguments
        self.original(*arguments)

    def __enter__(self) -> "Spy":
        _spying.acquire()
        setattr(self.owner, self.name, self)
        return self

    def __exit__(self, *exception: Any) -> None:
        setattr(self.owner, self.name, self.original)
        _spying.release()


def same(ours: Any, theirs: Any) -> bool:
    """Whether an argument of ours is Triton's, or the address of Triton's tensor.

    A direct launch passes None for what only hooks read.
    """
    if isinstance(ours, tuple) and isinstance(theirs, tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(theirs, Tensor):
        return ours == theirs.data_ptr()
    return ours is None or ours is theirs or bool(ours == theirs)


class Noted(NamedTuple):
    """A direct launch that has been made: of which kernel, and with which tensors and values behind them."""

    kernel: Any
    grid: tuple[int, ...]
    ready: Ready
    tensors: tuple[Tensor | None, ...]
    values: tuple[Any, ...]


# A launch that was listed, and not made: the launcher, and with what it was called.
Wanted = tuple["Launcher", tuple[Tensor | None, ...], tuple[float, ...]]


class Notes:
    """The launches of a thread: direct ones, and with ``only_lists`` those that are not made.

    ``complete`` is False if a launch was made in another way, and ``hooked`` is True if a hook of its kernel was why.
    """

    def __init__(self, only_lists: bool) -> None:
        self.only_lists = only_lists
        self.launches: list[Noted] = []
        self.wanted: list[Wanted] = []
        self.complete = True
        self.hooked = False


class _Thread(threading.local):
    """What each thread has for itself."""

    notes: Notes | None = None


_thread = _Thread()


@contextlib.contextmanager
def noting(only_lists: bool = False) -> Iterator[Notes]:
    """A context that notes the launches of this thread; with ``only_lists`` it makes none."""
    before, _thread.notes = _thread.notes, Notes(only_lists)
    try:
        yield _thread.notes
    finally:
        _thread.notes = before


def direct_stream(device: int | None) -> Any:
    """The current stream, if direct launches on ``device`` may be made now; otherwise None.

    It may be a 0.  ``device`` is the number of a GPU, which must be the current one; None stands for a CPU in tests.
    """
    if not KNOWN or not _agrees or JITFunction.run is not RUN or is_watched():
        return None
    active = driver.active
    current = active.get_current_device()
    return active.get_current_stream(current) if device in (None, current) else None


class Launcher:
    """A kernel with its grid, sizes and constants.

    It is called with the arguments that come before the sizes in the kernel's signature: tensors or None, then floats.
    """

    __slots__ = ("_compiled", "_constants", "_grid", "_kernel", "_once", "_sizes", "_tail", "_whole_grid")

    def __init__(self, kernel: Any, grid: tuple[int, ...], sizes: tuple[int, ...], constants: dict[str, Any]) -> None:
        self._kernel, self._grid, self._sizes, self._constants = kernel, grid, sizes, constants
        self._whole_grid = (*grid, 1, 1)[:3]
        # Constexprs come last in a signature.  Compiled kernels take them too, and ignore them.
        names = kernel.arg_names
        self._tail = (*sizes, *(constants[name] for name in names if name in constants))
        self._compiled: dict[tuple, Ready] = {}
        self._once: dict[tuple, Ready] = {}

    def __call__(self, tensors: Sequence[Tensor | None], *floats: float) -> None:
        notes = _thread.notes
        if notes is not None and notes.only_lists:
            notes.wanted.append((self, tuple(tensors), floats))
            return
        direct = KNOWN and _agrees is not False and JITFunction.run is RUN and not is_watched()
        hooked = bool(direct and self._compiled and self._kernel.pre_run_hooks)
        if direct and self._compiled and not hooked:
            active = driver.active
            device = active.get_current_device()
            addresses, kind = addresses_and_kind(tensors, device)
            found = self._compiled.get(kind)
            if found is not None:
                if notes is not None:
                    values = (*floats, *self._tail)
                    notes.launches.append(Noted(self._kernel, self._whole_grid, found, tuple(tensors), values))
                call, function, options, packed, _ = found
                stream = active.get_current_stream(device)
                if packed:
                    call(*self._whole_grid, stream, function, *options, (*addresses, *floats, *self._tail))
                else:
                    call(*self._whole_grid, stream, function, *options, *addresses, *floats, *self._tail)
                return
        if notes is not None:
            notes.complete = False
            notes.hooked |= hooked
        asks = direct and _agrees is None and self._once
        found = self._once.pop(kind_now(tensors), None) if asks else None
        if found is None:
            compiled = self._launch(tensors, floats)
            if direct and type(compiled) is CompiledKernel and compiled.metadata.target.backend == "cuda":
                self._keep(compiled, tensors)
        else:
            self._compare(found, tensors, floats)

    def compile(self, tensors: Sequence[Any], floats: tuple[float, ...]) -> None:
        """Compiles the kernel, unless Triton has it already.  ``ahead.py`` has what stands for the tensors."""
        self._kernel.warmup(
            *tensors, *floats, *self._sizes, grid=self._grid, **self._constants, enable_fp_fusion=FP_FUSION
        )

    def _launch(self, tensors: Sequence[Tensor | None], floats: tuple[float, ...]) -> Any:
        """Launches in Triton's public way, and returns the compiled kernel."""
        return self._kernel[self._grid](*tensors, *floats, *self._sizes, **self._constants, enable_fp_fusion=FP_FUSION)

    def _keep(self, compiled: CompiledKernel, tensors: Sequence[Tensor | None]) -> None:
        """Keeps a compiled kernel for direct launches, or for a comparison if none has been made yet."""
        global _agrees
        try:
            found = ready(compiled)
        # The launcher of another Triton may have other attributes.
        except AttributeError:
            _agrees = False
            return
        (self._compiled if _agrees else self._once)[kind_now(tensors)] = found

    def _compare(self, found: Ready, tensors: Sequence[Tensor | None], floats: tuple[float, ...]) -> None:
        """Launches in Triton's public way, and compares the arguments that arrive with those of a direct launch."""
        global _agrees
        with Spy(found) as spy:
            self._launch(tensors, floats)
        stream = driver.active.get_current_stream(driver.active.get_current_device())
        arguments = (*(None if t is None else t.data_ptr() for t in tensors), *floats, *self._tail)
        ours = (*self._whole_grid, stream, found.function, *found.options)
        ours = (*ours, arguments) if found.packed else (*ours, *arguments)
        _agrees = same(ours, spy.arguments)
        if _agrees:
            self._compiled |= {kind_now(tensors): found, **self._once}
