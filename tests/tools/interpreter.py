"""Changes to Triton's interpreter: it computes bf16 as GPUs do, or runs only some programs of a launch."""

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle

Program = tuple[int, int, int]


@contextlib.contextmanager
def true_bfloat16() -> Iterator[None]:
    """Inside, bf16 is rounded to nearest even, as a GPU's ``cvt.rn`` does, and products multiply bf16 values.

    Triton's interpreter stores bf16 values as integers that hold their bits.  It truncates fp32 and treats fp64 as an
    integer: the errors are twice as large as a GPU's and all have one sign.  Its ``*`` and its ``dot`` multiply the
    integers.
    """
    cast, dot, fmul = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot, InterpreterBuilder.create_fmul

    def rounding_cast(self, src, dst_type):
        if src.dtype.scalar == tl.bfloat16 and dst_type.scalar == tl.float32:
            return widened(src)
        wide = src.dtype.scalar in (tl.float32, tl.float64)
        if not (wide and dst_type.scalar == tl.bfloat16):
            return cast(self, src, dst_type)
        # Arrays of the interpreter may be read-only, so this is a copy.
        value = torch.from_numpy(np.array(src.data, dtype=np.float32))
        return TensorHandle(value.bfloat16().view(torch.int16).numpy().view(np.uint16), tl.bfloat16)

    def widened(operand):
        if operand.dtype.scalar != tl.bfloat16:
            return operand
        # This is exact: a bf16 is the upper half of an fp32.
        return TensorHandle((operand.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def widening_dot(self, a, b, *args, **kwargs):
        return dot(self, widened(a), widened(b), *args, **kwargs)

    def widening_fmul(self, a, b):
        if a.dtype.scalar != tl.bfloat16:
            return fmul(self, a, b)
        # The product of two bf16 is exact in fp32, and is rounded once.
        return rounding_cast(self, fmul(self, widened(a), widened(b)), tl.bfloat16)

    changed = {"cast_impl": rounding_cast, "create_dot": widening_dot, "create_fmul": widening_fmul}
    with mock.patch.multiple(InterpreterBuilder, **changed):
        yield


@contextlib.contextmanager
def only_programs(choose: Callable[[str, Program], list[Program]]) -> Iterator[None]:
    """Runs only the programs that ``choose(kernel's name, grid)`` lists; the other programs do not touch memory."""
    call = GridExecutor.__call__
    grid: Program = (1, 1, 1)
    programs: list[Program] = []

    def call_chosen(self, *args, **kwargs):
        nonlocal grid, programs
        if callable(self.grid):
            raise TypeError("only_programs takes grids that are tuples")
        grid = (*self.grid, 1, 1)[:3]
        programs = choose(self.fn.__name__, grid)
        self.grid = (len(programs),)
        return call(self, *args, **kwargs)

    def chosen_id(self, axis):
        return TensorHandle(np.array([programs[self.grid_idx[0]][axis]], dtype=np.int32), tl.int32)

    def whole_grid(self, axis):
        return TensorHandle(np.array([grid[axis]], dtype=np.int32), tl.int32)

    numbers = {"create_get_program_id": chosen_id, "create_get_num_programs": whole_grid}
    with mock.patch.object(GridExecutor, "__call__", call_chosen), mock.patch.multiple(InterpreterBuilder, **numbers):
        yield


def last_first(kernel: str, grid: Program) -> list[Program]:
    return [(i, j, k) for i in range(grid[0]) for j in range(grid[1]) for k in range(grid[2])][::-1]


def reordered(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Runs the programs of every launch from the last to the first; a GPU has its own order."""
    return only_programs(last_first) if device.type == "cpu" else contextlib.nullcontext()
