"""Compiles the kernels of listed launches in threads, before the launches are made.

Triton compiles a kernel at its first launch, one after the other.  Most of the time passes in LLVM and in ptxas, which
let other threads of Python run.  A kernel that fails here is compiled again at its launch, which raises the error.
"""

import contextlib
import contextvars
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .launcher import KNOWN, Wanted
from .triton_names import AsyncCompileMode, JITFunction, interpreted

# More threads would wait for each other in Python.
MOST_THREADS = 8
# ``parsing_in_turn`` replaces a method.  Of two threads, the first to leave would put it back too early.
_alone = threading.Lock()


# Triton would take a NamedTuple for a tuple of arguments.
@dataclass(frozen=True)
class Address:
    """What Triton reads of a tensor when it compiles: its dtype, its address modulo 16, and the size of its memory."""

    dtype: torch.dtype
    address: int
    nbytes: int

    def data_ptr(self) -> int:
        return self.address

    def ptr_range(self) -> int:
        return self.nbytes


def address_of(t: Tensor | None) -> Address | None:
    """What Triton reads of a tensor without values; new memory begins at a multiple of 16.  None stands for None."""
    if t is None:
        return None
    return Address(t.dtype, int(t.storage_offset()) * t.element_size() % 16, t.untyped_storage().nbytes())


def threads() -> int:
    """The number of threads that compile; 1 says that nothing is compiled before it is launched."""
    if not KNOWN or AsyncCompileMode is None or interpreted():
        return 1
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return min(MOST_THREADS, cores)


@contextlib.contextmanager
def parsing_in_turn() -> Iterator[None]:
    """A context in which Triton parses one function at a time.

    Python 3.11 raises SystemError ("AST constructor recursion depth mismatch") if threads parse at the same time.
    """
    parse = JITFunction.parse
    parsing = threading.Lock()

    def parse_alone(self: Any) -> Any:
        with parsing:
            return parse(self)

    JITFunction.parse = parse_alone
    try:
        yield
    finally:
        JITFunction.parse = parse


def compile_ahead(wanted: Sequence[Wanted]) -> None:
    """Compiles the kernels of these launches, and waits for them."""
    # If the user interrupts it, Triton 3.6 stays in its mode, and cannot compile any kernel there.
    contextvars.copy_context().run(_compile_in_threads, wanted)


def _compile_in_threads(wanted: Sequence[Wanted]) -> None:
    kinds = {(launcher, tuple(map(address_of, tensors)), floats): None for launcher, tensors, floats in wanted}
    with (
        _alone,
        parsing_in_turn(),
        ThreadPoolExecutor(threads()) as pool,
        AsyncCompileMode(pool, ignore_errors=True),
    ):
        for launcher, addresses, floats in kinds:
            # The launch raises the error again.
            with contextlib.suppress(Exception):
                launcher.compile(addresses, floats)
