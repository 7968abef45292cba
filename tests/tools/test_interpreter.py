"""The faster interpreter computes the same bits as Triton's unchanged interpreter, and raises the same errors.

The kernels of norms stand for all kernels, whose own tests compare with float64.
"""

import contextlib

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from tests.kernels import test_norm_act_groups as norms
from tests.tools.tensors import slots_of

pytestmark = pytest.mark.usefixtures("only_in_the_interpreter")
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def both(run):
    """Returns the results of ``run`` in the unchanged and in the faster interpreter."""
    from tests.tools.interpreter_speed import as_it_is

    found = []
    for interpreter in (as_it_is, contextlib.nullcontext):
        torch.manual_seed(0)
        with interpreter():
            found.append(run())
    return found


def assert_same_bits(found):
    for a, b in zip(*found, strict=True):
        assert (a is None and b is None) or torch.equal(a.nan_to_num(7), b.nan_to_num(7))


NORMS = [(None, dtype) for dtype in DTYPES] + [(6, torch.float32), (2, torch.bfloat16)]


@pytest.mark.parametrize(("groups", "dtype"), NORMS, ids=str)
def test_norms(dtype, groups, device):
    def run():
        found = []
        for rows, keep in ((False, "output"), (True, "input")):
            given = norms.inputs((3, 6, 7, 9), rows, dtype, device)
            kept = slots_of([0, 2], 6, device) if keep == "output" else None
            found += norms.launch(*given, groups, keep=keep, kept=kept).values()
        return found

    assert_same_bits(both(run))


@triton.jit
def mixed_kernel(x_ptr, out_ptr, N, BLOCK: tl.constexpr):
    """Computes with scalars, blocks of several ranks and dtypes, promotions, and an integer that wraps around."""
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < N, other=-1)
    wide = x.to(tl.int64) * 3 + N
    small = (x.to(tl.uint8) + 250).to(tl.float32) / 7
    table = tl.where(offs[:, None] <= offs[None, :], small[None, :] * 0.1, wide[:, None].to(tl.float32))
    out = tl.sum(table, axis=1) + tl.max(table, axis=0) - (offs % 5 // 2) * 1.5 + (2147483647 + x)
    some = (offs < N) & (x > 2) | (offs == 0) ^ (wide[:, None] > 9 + N)
    low, place = offs - 7, tl.program_id(0) + N
    out += tl.where(tl.sum(some.to(tl.int32), axis=0) > 5, low // 3 + low % place, 40 // (low * low + 1) + 40 % place)
    before = tl.load(out_ptr + offs, mask=offs > 3, other=1.5) / tl.load(out_ptr + place, mask=N > 20, other=-1.0)
    out += tl.where(N > 5, before + tl.load(out_ptr + 2), before / 3) + tl.load(x_ptr + low, mask=offs >= 7, other=0.0)
    tl.store(out_ptr + offs, out.to(out_ptr.dtype.element_ty))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore")
def test_mixed_types(dtype):
    def run():
        out = torch.linspace(-2, 3, 16).to(dtype)
        mixed_kernel[(1,)](torch.arange(16, dtype=torch.int32), out, 13, BLOCK=16)
        return [out]

    assert_same_bits(both(run))


@triton.jit
def adds_unequal_blocks_kernel(out_ptr):
    tl.store(out_ptr + tl.arange(0, 4), tl.arange(0, 4) + tl.arange(0, 8))


@triton.jit
def odd_block_kernel(out_ptr):
    tl.store(out_ptr + tl.arange(0, 3), 1.0)


@triton.jit
def adds_pointers_kernel(out_ptr):
    tl.store(out_ptr + out_ptr, 1.0)


@pytest.mark.parametrize("kernel", [adds_unequal_blocks_kernel, odd_block_kernel, adds_pointers_kernel])
def test_what_is_wrong_is_refused(kernel):
    """Each mistake is made twice, because the interpreter must not remember a wrong call as a right one."""

    def text():
        with pytest.raises(InterpreterError) as refused:
            kernel[(1,)](torch.zeros(8))
        return str(refused.value)

    for _ in range(2):
        slow, fast = both(text)
        assert slow == fast != ""


def test_the_language_is_left_as_it_was():
    before = {**vars(tl)}, {**vars(tl.tensor)}
    mixed_kernel[(1,)](torch.arange(16, dtype=torch.int32), torch.zeros(16), 13, BLOCK=16)
    with pytest.raises(InterpreterError):
        odd_block_kernel[(1,)](torch.zeros(8))
    assert ({**vars(tl)}, {**vars(tl.tensor)}) == before
