"""The counter of bytes counts accesses, and raises an error if an access leaves its tensor."""

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from tests.tools.interpreter import only_programs
from tests.tools.traffic import traffic

pytestmark = pytest.mark.usefixtures("only_in_the_interpreter")


@triton.jit
def copy_kernel(x_ptr, out_ptr, N, M, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask=offs < N), mask=offs < M)


@triton.jit
def count_kernel(out_ptr, BLOCK: tl.constexpr):
    tl.atomic_add(out_ptr + tl.arange(0, BLOCK) % 1, 1.0)


def test_masked_lanes_do_not_count():
    x, out = torch.randn(100), torch.zeros(90)
    with traffic() as moved:
        copy_kernel[(4,)](x, out, 100, 90, BLOCK=32)
    assert torch.equal(out, x[:90])
    assert moved.launches == ["copy_kernel"]
    assert (moved.loaded("copy_kernel", "x_ptr"), moved.stored("copy_kernel", "out_ptr")) == (400, 360)
    assert moved.total == 760
    assert moved.loaded("another_kernel") == moved.loaded(None, "out_ptr") == 0


def test_an_access_past_the_end_is_stopped():
    whole = torch.zeros(128)
    with traffic(), pytest.raises(Exception, match="copy_kernel touches memory up to 8 bytes outside out_ptr"):
        copy_kernel[(4,)](torch.randn(100), whole[:98], 100, 100, BLOCK=32)
    assert not whole[98:].any()


def test_an_access_that_runs_from_one_argument_into_the_next_is_stopped():
    pair = torch.zeros(2, 32)
    with traffic(), pytest.raises(Exception, match="copy_kernel touches memory up to 4 bytes outside x_ptr"):
        copy_kernel[(1,)](pair[0], pair[1], 33, 32, BLOCK=64)


def test_atomics_are_refused():
    with traffic(), pytest.raises(Exception, match="count_kernel uses an atomic operation"):
        count_kernel[(2,)](torch.zeros(1), BLOCK=4)


def test_only_chosen_programs_run():
    x, out = torch.randn(128), torch.zeros(128)
    with only_programs(lambda kernel, grid: [(grid[0] - 1, 0, 0)]), traffic() as moved:
        copy_kernel[(4,)](x, out, 128, 128, BLOCK=32)
    assert torch.equal(out[96:], x[96:])
    assert not out[:96].any()
    assert moved.loaded() == 128


def test_bfloat16_is_rounded_to_nearest():
    """Without ``true_bfloat16``, the interpreter truncates 1.998 (between 1.9921875 and 2) to 1.9921875."""
    out = torch.zeros(2, dtype=torch.bfloat16)
    copy_cast_kernel[(1,)](torch.tensor([1.998, -1.998]), out, BLOCK=2)
    assert out.tolist() == [2.0, -2.0]


@triton.jit
def copy_cast_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs).to(out_ptr.dtype.element_ty))


def test_a_product_of_bfloat16_multiplies_values():
    """Without ``true_bfloat16``, the interpreter multiplies the integers that hold the bits."""
    a, b = torch.randn(2, 64).bfloat16()
    out = torch.empty(64, dtype=torch.bfloat16)
    product_kernel[(1,)](a, b, out, BLOCK=64)
    assert torch.equal(out, a * b)


@triton.jit
def product_kernel(a_ptr, b_ptr, out_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.load(a_ptr + offs) * tl.load(b_ptr + offs))


def test_a_dot_of_bfloat16_multiplies_values():
    """Without ``true_bfloat16``, the interpreter multiplies the integers that hold the bits."""
    a, b = torch.randn(2, 16, 16).bfloat16()
    out = torch.ones(16, 16)
    dot_kernel[(1,)](a, b, out, BLOCK=16)
    # The products are exact, and are summed in fp32.
    torch.testing.assert_close(out, 1 + a.float() @ b.float().T, rtol=1e-5, atol=1e-5)


@triton.jit
def dot_kernel(a_ptr, b_ptr, out_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    product = tl.dot(tl.load(a_ptr + offs), tl.trans(tl.load(b_ptr + offs)), tl.load(out_ptr + offs))
    tl.store(out_ptr + offs, product)
