"""Compares the kernels that pack and unpack with aten, bit for bit, in the interpreter or on a GPU; counts bytes."""

import contextlib

import pytest
import torch

pytest.importorskip("triton")

import fusedseg
from fusedseg.ops.low_bit import reference
from fusedseg.ops.low_bit.graph import norm_kink
from fusedseg.ops.low_bit.spec import GROUP, lines_of
from tests.tools.marks import by_layout
from tests.tools.tensors import channels_last
from tests.tools.traffic import traffic

HALF, WIDE = (torch.float16, torch.bfloat16), (torch.float32, torch.float64)
KEY = -123456789


def launch(t, bits, kink=None):
    """Codes and range of the kernel, what it makes of them, and the counted bytes."""
    from fusedseg.kernels.low_bit import low_bit_pack, low_bit_unpack

    unit = "" if kink is None else "batch" if kink.numel() == t.shape[1] else "plane"
    lines, out = lines_of(t, unit), torch.empty_like(t)
    flat, flat_out = (of.as_strided((of.numel(),), (1,)) for of in (t, out))
    with traffic() if t.device.type == "cpu" else contextlib.nullcontext() as moved:
        packed = low_bit_pack(flat, lines, bits, KEY, kink)
        low_bit_unpack(*packed, kink, lines, bits, flat_out)
    expected = reference.pack(flat, lines, bits, KEY, kink)
    flat_expected = torch.empty_like(flat)
    reference.unpack(expected, kink, lines, bits, flat_expected)
    # Codes of a group that is NaN mean nothing.
    both = list(zip((*packed, flat_out), (*expected, flat_expected), strict=True))[
        int(flat.isfinite().logical_not().any()) :
    ]
    for found, wanted in both:
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    return packed, out, moved


def tensor(shape, dtype, rows, device):
    """A channel of both signs, one of ReLU, a positive one, a negative one, and a constant one."""
    x = torch.randn(shape, device=device)
    x[:, 1].relu_()
    x[:, 2].abs_().add_(0.5)
    x[:, 3].abs_().neg_().sub_(0.5)
    x[:, 4] = 0.3
    x = x.to(dtype)
    return channels_last(x) if rows else x


@pytest.mark.sanitize
@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("dtype", "rows"), [*zip((*HALF, *WIDE), (False, True, True, False), strict=True)], ids=str)
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_the_bits_of_aten(dtype, rows, bits, device):
    """Groups of 256 positions, and a shorter one; an odd number of channels and of positions; whole groups."""
    for shape in ((2, 5, 13, 23), (2, 8, 16, 16)):
        launch(tensor(shape, dtype, rows, device), bits)


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(
    ("of", "rows", "dtype"),
    [
        pytest.param(of, rows, dtype, id=f"{of}-{'rows' if rows else 'planes'}-{dtype}")
        for of, rows, dtypes in (
            ("channel", False, HALF), ("channel", True, WIDE), ("sample", False, WIDE), ("sample", True, HALF)
        )
        for dtype in dtypes
    ],
)  # fmt: skip
def test_the_bits_of_aten_with_a_kink(dtype, rows, of, device):
    kink = torch.randn(5 if of == "channel" else 10, device=device, dtype=torch.promote_types(dtype, torch.float32))
    launch(tensor((2, 5, 9, 33), dtype, rows, device), 4, kink)
    launch(tensor((2, 5, 3, 5), dtype, rows, device), 8, kink)


@by_layout
def test_the_bits_of_aten_with_positions_of_64_bits(rows, device, monkeypatch):
    """As in tensors of 2**30 values and more."""
    from fusedseg.kernels import launcher, low_bit

    launcher.forget_plans()
    monkeypatch.setattr(low_bit, "FEW_VALUES", 0)
    launch(tensor((2, 5, 13, 23), torch.float16, rows, device), 4, torch.randn(10, device=device))
    launcher.forget_plans()


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("of", ["batch", "instance", "group"])
def test_kinks_in_one_launch(dtype, of, device, monkeypatch):
    """A norm's kinks took ten launches; their values are the same."""
    wide = torch.promote_types(dtype, torch.float32)
    x, count = torch.empty(2, 300, 3, 3, dtype=dtype, device=device), {"batch": 300, "instance": 600, "group": 20}[of]
    mean, rstd = torch.randn(count, dtype=wide, device=device), torch.rand(count, dtype=wide, device=device) + 0.1
    weight, bias = torch.randn(2, 300, dtype=dtype, device=device)
    # A far kink on both sides, one of a channel without weight, and one that nothing determines.
    weight[:4], bias[3] = torch.tensor([1e-4, -1e-4, 0.0, 0.0]), 0.0
    for affine in ((weight, bias), (None, bias), (None, None)):
        given, found = (x, mean, rstd, *affine, of != "batch"), []
        for backend in ("triton", "aten"):
            monkeypatch.setattr(fusedseg, "backend", backend)
            found.append(norm_kink(*given))
        torch.testing.assert_close(*found, rtol=0, atol=0)
        assert found[0].isfinite().all()


@pytest.mark.usefixtures("poison")
def test_values_that_are_not_finite(device):
    """The minimum of a GPU leaves out NaN, so that the group would look finite."""
    for bad in (float("nan"), float("inf"), float("-inf")):
        t = torch.randn(1, 2, 3, 256, device=device)
        t[0, 1, 1, 7] = bad
        _, out, _ = launch(t, 4)
        assert out[0, 1, 1].isnan().all()
        assert out[0, 0].isfinite().all()
        assert out[0, 1, ::2].isfinite().all()


@by_layout
@pytest.mark.parametrize("bits", [8, 4])
def test_each_tensor_is_moved_once(rows, bits, device, request):
    """8 bits of fp16: 1 + 0.51 passes to pack; 4 bits: 1 + 0.26 passes.

    A program that packs reads its tile of up to 32 KiB a second time, right after the first.
    """
    if device.type != "cpu" or request.config.getoption("--ptx"):
        pytest.skip("counts in the interpreter; in compiled code every lane loads the numbers of its group")
    t = tensor((1, 8, 32, 64), torch.float16, rows, device)
    packed, _, moved = launch(t, bits)
    small = sum(part.nbytes for part in packed)
    assert small == t.numel() * bits // 8 + 2 * t.nbytes // GROUP
    assert moved.loaded("low_bit_pack_kernel") == 2 * t.nbytes
    assert moved.stored("low_bit_pack_kernel") == small
    assert moved.loaded("low_bit_unpack_kernel") == small
    assert moved.stored("low_bit_unpack_kernel") == t.nbytes
