"""Launches kernels over and over without doing again what Triton does for every call.

``kernel[grid](...)`` binds its arguments, asks of each what compiled code may depend on, and looks the compiled kernel
up by all of it.  On tensors of a few thousand elements that takes longer than the kernel.  A ``Launcher`` does so once
for every kind of call, and then calls what Triton compiled, as ``JITFunction.run`` would.

What Triton compiles for, and so what a kind is: the device; of every tensor whether it is there, its dtype, and whether
its address is a multiple of 16; the sizes and constants themselves, which a launcher holds.  Floats are passed as they
are.  All other cases take the public way: AMD's GPUs, which look at the bytes of a tensor's storage too; the
interpreter; a ``JITFunction.run`` that somebody has replaced (as ``dry_run`` does); hooks of profilers and options of
debuggers; and versions of Triton other than those that were read.
"""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import triton
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

# versions whose JITFunction.run and CompiledKernel.run were read: another may pass other arguments
VERSIONS = ("3.6", "3.7", "3.8", "3.9")
KNOWN = ".".join(triton.__version__.split(".")[:2]) in VERSIONS
RUN = JITFunction.run
# layouts of a network are few; shapes that change with every batch should not add up
MAX_PLANS = 1024

Made = TypeVar("Made")
_plans: list[Any] = []


def plan(make: Callable[..., Made]) -> Callable[..., Made]:
    """A function of shapes, dtypes and options that is computed once for each."""
    cached = functools.lru_cache(MAX_PLANS)(make)
    _plans.append(cached)
    return cached


def forget_plans() -> None:
    """To be called after a change of what plans are made of besides their arguments: constants of ``launch.py`` and its
    like, which tests and benches set to others."""
    for cached in _plans:
        cached.cache_clear()


def is_watched() -> bool:
    """Somebody wants to see launches, or other code than usual."""
    runtime = knobs.runtime
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        # a chain of them, or as in older versions one or None
        if getattr(hook, "calls", hook):
            return True
    return bool(
        runtime.debug or knobs.compilation.instrumentation_mode or runtime.add_stages_inspection_hook is not None
    )


def fp_fusion() -> bool:
    """Whether the compiler may fuse a multiplication and an addition: yes, unless the user has said no.

    Triton 3.9 warns where a launch leaves this open, because 3.10 will not fuse by default.  Every launch of ours names
    it, so results stay what they are.  Triton's setting, when it is set in a program, sets the variable too.
    """
    return "TRITON_DEFAULT_FP_FUSION" not in os.environ or bool(knobs.language.default_fp_fusion)


def kind_of(tensors: Sequence[Tensor | None], addresses: Sequence[int | None]) -> tuple:
    """What compiled code depends on, beside a launcher's own sizes and constants."""
    return *[None if t is None else t.dtype for t in tensors], *[a and a % 16 for a in addresses]


class Launcher:
    """A kernel with its grid, sizes and constants.  Called with what comes before them in its signature: tensors (or
    None), and then floats."""

    __slots__ = ("_compiled", "_constants", "_grid", "_kernel", "_sizes", "_tail", "_whole_grid")

    def __init__(self, kernel: Any, grid: tuple[int, ...], sizes: tuple[int, ...], constants: dict[str, Any]) -> None:
        self._kernel, self._grid, self._sizes, self._constants = kernel, grid, sizes, constants
        self._whole_grid = (*grid, 1, 1)[:3]
        # constexprs come last in a signature; compiled kernels take them too, and ignore them
        names = kernel.arg_names
        self._tail = (*sizes, *(constants[name] for name in names if name in constants))
        self._compiled: dict[tuple, tuple] = {}

    def __call__(self, tensors: Sequence[Tensor | None], *floats: float) -> None:
        direct = KNOWN and JITFunction.run is RUN and not is_watched()
        if direct and self._compiled and not self._kernel.pre_run_hooks:
            addresses = [None if t is None else t.data_ptr() for t in tensors]
            device = driver.active.get_current_device()
            found = self._compiled.get((device, *kind_of(tensors, addresses)))
            if found is not None:
                run, function, metadata, _ = found
                stream = driver.active.get_current_stream(device)
                run(*self._whole_grid, stream, function, metadata, None, None, None, *addresses, *floats, *self._tail)
                return
        compiled = self._kernel[self._grid](
            *tensors, *floats, *self._sizes, **self._constants, enable_fp_fusion=fp_fusion()
        )
        if direct and type(compiled) is CompiledKernel and compiled.metadata.target.backend == "cuda":
            addresses = [None if t is None else t.data_ptr() for t in tensors]
            kind = (driver.active.get_current_device(), *kind_of(tensors, addresses))
            # the kernel too: without it, its code is unloaded
            self._compiled[kind] = compiled.run, compiled.function, compiled.packed_metadata, compiled
