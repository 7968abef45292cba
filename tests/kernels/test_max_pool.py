"""Compares the max-pool kernels with PyTorch, in the interpreter or on a GPU (``--device cuda``)."""

import math

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton")

from tests.ops import test_max_pool as op
from tests.ops.test_max_pool import STOCK, special
from tests.tools.interpreter import only_programs, reordered
from tests.tools.marks import by_layout, sanitized
from tests.tools.tensors import channels_last, empty
from tests.tools.traffic import checked

# The interpreter takes long for windows of 256 positions.
CASES = {name: case for name, case in op.CASES.items() if name != "256-positions"}


def pair(value, x):
    return value if isinstance(value, tuple) else (value,) * (x.dim() - 2)


def launch(x, shape, dz, rows, pool):
    """Returns z, codes and dx of a dense x."""
    from fusedseg.kernels.max_pool import max_pool_bwd, max_pool_fwd

    kernel, *geometry = (pair(value, x) for value in pool)
    z, codes = (empty(shape, dtype, rows).to(x.device) for dtype in (x.dtype, torch.uint8))
    dx = torch.empty_like(x)
    with checked(x.device) as counted:
        max_pool_fwd(x, z, codes, rows, kernel, (*geometry, 1))
        max_pool_bwd(dz, codes, dx, rows, kernel, (*geometry, 1))
    return z, codes, dx, counted


def check(x, case, rows, device):
    _, kernel, stride, padding, dilation, ceil_mode = case
    x = x.to(device)
    leaf = x.clone().requires_grad_()
    out = STOCK[x.dim() - 2](leaf, kernel, stride, padding, dilation, ceil_mode)
    dz = torch.randn(out.shape, device=device).to(x.dtype)
    # In bf16 gradients are not compared with PyTorch's, because our sum is rounded once and PyTorch's several times.
    (expected,) = torch.autograd.grad(out, leaf, dz) if x.dtype != torch.bfloat16 else (None,)
    if rows:
        x, dz = channels_last(x), channels_last(dz)
    z, codes, dx, counted = launch(x, out.shape, dz, rows, (kernel, stride or kernel, padding, dilation))
    assert torch.equal(z.nan_to_num(7), out.nan_to_num(7))
    if expected is not None:
        torch.testing.assert_close(dx, expected)
    assert codes.max().item() < math.prod(pair(kernel, x))
    return counted, x, z, codes


@pytest.mark.usefixtures("poison")
@by_layout
@pytest.mark.parametrize(
    "case", sanitized(CASES, "odd", "overlapping", "dilation", "stride-over-window", "3d-overlapping")
)
def test_values_and_gradients(case, rows, device):
    """The special values are ties, NaN and infinities of both signs."""
    for values in (torch.randn, special):
        check(values(case[0]), case, rows, device)


@pytest.mark.usefixtures("poison")
@by_layout
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dtypes(dtype, rows, device):
    for name in ("halving", "overlapping"):
        check(torch.randn(CASES[name][0]).to(dtype), CASES[name], rows, device)


@pytest.mark.usefixtures("only_in_the_interpreter")
@by_layout
@pytest.mark.parametrize("shape", [(2, 16, 16, 16), (1, 16, 8, 8, 8)], ids=["2d", "3d"])
def test_windows_apart_move_every_byte_once(shape, rows, device):
    moved, x, z, codes = check(torch.randn(shape), (shape, 2, 2, 0, 1, False), rows, device)
    assert moved.launches == ["max_pool_fwd_kernel", "max_pool_bwd_kernel"]
    assert moved.loaded("max_pool_fwd_kernel") == x.nbytes
    assert moved.stored("max_pool_fwd_kernel") == z.nbytes + codes.nbytes
    assert moved.loaded("max_pool_bwd_kernel") == z.nbytes + codes.nbytes
    assert moved.stored("max_pool_bwd_kernel") == x.nbytes


@pytest.mark.usefixtures("only_in_the_interpreter")
@by_layout
def test_overlapping_windows_write_every_byte_once(rows, device):
    shape = (2, 16, 16, 16)
    moved, x, z, codes = check(torch.randn(shape), (shape, 3, 2, 1, 1, False), rows, device)
    assert moved.stored("max_pool_bwd_kernel") == x.nbytes
    assert moved.stored("max_pool_fwd_kernel") == z.nbytes + codes.nbytes
    # A window reads each of its 9 positions once; a cell of 2 x 2 positions meets 2 x 2 windows.
    assert moved.loaded("max_pool_fwd_kernel") <= 9 * z.nbytes
    assert moved.loaded("max_pool_bwd_kernel") <= 4 * (z.nbytes + codes.nbytes)


@by_layout
def test_the_order_of_programs_does_not_matter(rows, device):
    x = torch.randn(2, 20, 24, 25, device=device)
    dz = torch.randn(2, 20, 12, 13, device=device)
    if rows:
        x, dz = channels_last(x), channels_last(dz)
    first = launch(x, dz.shape, dz, rows, (3, 2, 1, 1))[:3]
    with reordered(device):
        again = launch(x, dz.shape, dz, rows, (3, 2, 1, 1))[:3]
    assert all(map(torch.equal, first, again))


@pytest.mark.usefixtures("only_in_the_interpreter")
@by_layout
def test_beyond_two_to_the_31_elements(rows, device):
    """The last program of both launches computes the right values, and no access leaves the tensor."""
    x = empty((40, 64, 1024, 1024), torch.bfloat16, rows)
    dz = empty((40, 64, 512, 512), torch.bfloat16, rows)
    assert x.numel() > 2**31
    # The part that gets values is larger than the tile of one program.
    for t in (x, dz):
        t[-1, :, -8:, :] = torch.randn(64, 8, t.shape[3]).bfloat16()
    leaf = x[-1:, :, -8:].clone().requires_grad_()
    out = F.max_pool2d(leaf, 2)
    (expected,) = torch.autograd.grad(out, leaf, dz[-1:, :, -4:])
    with only_programs(lambda kernel, grid: [(grid[0] - 1, 0, 0)]):
        z, _, dx, _ = launch(x, dz.shape, dz, rows, (2, 2, 0, 1))
    assert torch.equal(z[-1, -1, -1, -16:], out[0, -1, -1, -16:])
    assert torch.equal(dx[-1, -1, -2:, -16:], expected[0, -1, -2:, -16:])
