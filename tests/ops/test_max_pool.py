"""The op on both backends: values, gradients of first and second order, kept bytes and refused calls."""

import math

import pytest
import torch
from torch.nn import functional as F

from fusedseg import _torch
from fusedseg.functional import max_pool
from fusedseg.memory.meter import measure
from fusedseg.ops.max_pool import aten_max_pool
from fusedseg.ops.max_pool.windows import Pool
from tests.tools.spy import spied
from tests.tools.tensors import channels_last

STOCK = {2: F.max_pool2d, 3: F.max_pool3d}
# The shape, then kernel, stride, padding, dilation and ceil_mode.
CASES = {
    "halving": ((2, 3, 8, 6), 2, None, 0, 1, False),
    "odd": ((2, 5, 9, 7), 2, 2, 0, 1, False),
    "odd-ceil": ((2, 3, 5, 7), 2, 2, 0, 1, True),
    "one-position": ((4, 3, 1, 1), 1, 1, 0, 1, False),
    "whole-plane": ((2, 3, 4, 4), 4, 4, 0, 1, False),
    "over-a-block": ((1, 2, 3, 300), 2, 2, 0, 1, False),
    "channels-over-a-block": ((1, 37, 4, 4), 2, 2, 0, 1, False),
    "overlapping": ((2, 3, 9, 7), 3, 2, 1, 1, False),
    "overlapping-inside": ((2, 3, 8, 7), 3, 2, 1, 1, False),
    "overlapping-unpadded": ((2, 3, 9, 7), 3, 2, 0, 1, True),
    "stride-over-window": ((1, 2, 8, 9), (2, 1), 3, (1, 0), 1, True),
    "dilation": ((1, 2, 8, 9), 3, 1, 1, (2, 3), False),
    "window-wider-than-x": ((2, 3, 3, 2), 5, 1, 2, 1, False),
    "256-positions": ((1, 1, 9, 8), 16, 4, 8, 1, True),
    "3d-halving": ((2, 3, 4, 5, 6), 2, None, 0, 1, False),
    "3d-overlapping": ((1, 2, 5, 4, 6), 3, 2, 1, 1, True),
    "3d-whole-vectors": ((1, 64, 4, 4, 5), 3, 2, 1, 1, False),
    "3d-flat": ((1, 2, 5, 4, 6), (1, 2, 2), None, 0, 1, False),
    "3d-mixed": ((1, 2, 5, 4, 6), (1, 2, 3), (1, 2, 1), (0, 1, 1), (1, 1, 2), False),
}
FORMATS = pytest.mark.parametrize("rows", [False, True], ids=["contiguous", "channels_last"])


@pytest.fixture(params=["whole", "parts"])
def chunking(request, monkeypatch):
    """The aten path runs in one piece, or in many parts."""
    if request.param == "parts":
        monkeypatch.setattr(aten_max_pool, "PART_BYTES", 300)


def special(shape):
    """Values with ties, zeros of both signs, NaN and infinities; one channel contains only -inf."""
    values = torch.tensor([0.0, -0.0, 1.0, -math.inf, math.inf, math.nan])
    x = values[torch.randint(0, 6, shape)]
    x[:, 0] = -math.inf
    return x


def compare(x, case, rows):
    shape, *arguments = case
    stock = STOCK[len(shape) - 2]
    leaf = x.clone().requires_grad_()
    expected = stock(leaf, *arguments)
    dz = torch.randn_like(expected)
    (dx,) = torch.autograd.grad(expected, leaf, dz)
    ours = (channels_last(x) if rows else x.clone()).requires_grad_()
    z = max_pool(ours, *arguments)
    assert torch.equal(z.isnan(), expected.isnan())
    assert torch.equal(z.nan_to_num(7), expected.nan_to_num(7))
    assert torch.equal(z.nan_to_num(7).signbit(), expected.nan_to_num(7).signbit())
    assert z.movedim(1, -1).is_contiguous() if rows else z.is_contiguous()
    (found,) = torch.autograd.grad(z, ours, dz)
    assert found.stride() == ours.stride()
    # Sums in half precision depend on their order.
    torch.testing.assert_close(found, dx, **({"rtol": 3e-2, "atol": 3e-2} if x.itemsize == 2 else {}))
    with torch.no_grad():
        assert torch.equal(max_pool(ours, *arguments).nan_to_num(7), expected.nan_to_num(7))


# ``tests/kernels/test_max_pool.py`` has every case but the last one on Triton.
@FORMATS
@pytest.mark.parametrize("name", ["odd-ceil", "overlapping", "3d-mixed", "256-positions"])
def test_as_stock(backend, device, name, rows):
    compare(torch.randn(CASES[name][0], device=device), CASES[name], rows)
    compare(special(CASES[name][0]).to(device), CASES[name], rows)


@FORMATS
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_as_stock_in_chunks(chunking, case, rows):
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        compare(torch.randn(case[0]).to(dtype), case, rows)
    compare(special(case[0]), case, rows)


@FORMATS
@pytest.mark.parametrize("arguments", [(2,), (3, 2, 1)], ids=["halving", "overlapping"])
def test_keeps_one_byte_per_output_element(backend, device, rows, arguments):
    for shape in ((2, 4, 16, 16), (1, 4, 8, 8, 8)):
        x = torch.randn(shape, device=device)
        leaf = (channels_last(x) if rows else x).requires_grad_()
        stock = STOCK[x.dim() - 2]
        outputs = stock(x, *arguments).numel()
        assert measure(lambda x, a=arguments: max_pool(x, *a), leaf).saved == outputs
        assert measure(lambda x, a=arguments, f=stock: f(x, *a), leaf).saved == x.nbytes + 8 * outputs


def test_no_codes_without_gradients(monkeypatch):
    coded = spied(monkeypatch, aten_max_pool, "forward", lambda result, *given: given[2] is not None)
    max_pool(torch.randn(1, 2, 4, 4), 2)
    with torch.no_grad():
        max_pool(torch.randn(1, 2, 4, 4, requires_grad=True), 2)
    max_pool(torch.randn(1, 2, 4, 4, requires_grad=True), 2)
    assert coded == [False, False, True]


def test_a_window_that_steps_over_x_is_refused():
    """For such a window the stock op returns -inf and an index outside x, and its backward writes to that index."""
    x = torch.randn(1, 1, 3, 3)
    assert F.max_pool2d(x, 2, 1, 1, 4, return_indices=True)[1].item() >= x.numel()
    with pytest.raises(ValueError, match=r"x \(1, 1, 3, 3\) has no element at the positions of one window"):
        max_pool(x, 2, 1, 1, 4)


def test_a_fake_call_leaves_no_fake_tables():
    """Where aten pools on a GPU, the call that lists a graph's kernels left its tables to calls with values."""
    before = aten_max_pool._remembered_distances.cache_info().currsize
    with _torch.ListingMode(allow_non_fake_inputs=True):
        x = torch.empty(1, 2, 11, 13, device=torch.device("cuda", 0))
        distances = aten_max_pool._distances((11, 13), Pool((2, 2), (2, 2), (0, 0), (1, 1), False), x)
    assert isinstance(distances, _torch.FakeTensor)
    assert aten_max_pool._remembered_distances.cache_info().currsize == before
