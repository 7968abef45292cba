"""The storage op on both backends: errors, signs, edge cases, bias, determinism and memory."""

from typing import NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fusedseg.memory.meter import LiveBytes
from fusedseg.ops.check import wide_dtype
from fusedseg.ops.low_bit import graph, reference
from fusedseg.ops.low_bit.spec import lines_of, mixed
from tests.reference import relative_error
from tests.tools.tensors import channels_last

DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
FORMATS = pytest.mark.parametrize("rows", [False, True], ids=["contiguous", "channels_last"])
# The measured relative error of one rounding of normal values, and a tenth more.
ERRORS = {8: 0.0103, 4: 0.184, 2: 1.25}


class Packed(NamedTuple):
    """The arguments of ``unpack_op``."""

    codes: torch.Tensor
    lowest: torch.Tensor
    highest: torch.Tensor
    kink: torch.Tensor | None
    bits: int
    unit: str
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def nbytes(self):
        return sum(t.nbytes for t in self[:4] if t is not None)


def pack(t, bits, seed, kink=None):
    kink, unit = (None, "") if kink is None else (kink.to(wide_dtype(t.dtype)), unit_of(t, kink))
    return Packed(*graph.pack(t, kink, bits, unit, mixed(seed)), kink, bits, unit, tuple(t.shape), t.stride())


def unit_of(t, kink):
    """Kinks of channels, or of channels of samples."""
    return "batch" if kink.numel() == t.shape[1] else "plane"


def unpack(packed):
    return graph.unpack_op(*packed)


def again(t, bits=4, seed=0, kink=None):
    return unpack(pack(t, bits, seed, kink))


def steps(t, bits):
    """For each value, the length of a step of its group and side, by the definition of ``grid.py``, for planes."""
    group = t.double().flatten(2).unflatten(2, (-1, 256))
    lowest, highest = group.amin(3, keepdim=True), group.amax(3, keepdim=True)
    half = 2 ** (bits - 1) - 1 + 2.0**-10
    return torch.where(group < 0, -lowest / half, highest / half).view(t.shape)


@pytest.mark.parametrize(("bits", "most", "reached"), [(8, 0.089, 0.06), (4, 1.62, 1.0)])
def test_the_error_beside_the_deviation_has_a_bound(bits, most, reached):
    """For every input, because a group has few values.  docs/low_bits.md has the proof."""
    x = torch.randn(1, 3, 16, 16, dtype=torch.float64)
    x[0, 1, 3, 5] = 300.0
    # All but two values of a group lie in the middle of a step.
    x[0, 2] = 0.5 / (2 ** (bits - 1) - 1)
    x[0, 2, 0, :2] = torch.tensor([1.0, -1e-9])
    error = (again(x, bits) - x).square().mean((2, 3)).sqrt() / x.std((2, 3), correction=0)
    assert reached < error.max() < most


@DTYPES
@FORMATS
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_error_and_signs(bits, rows, dtype, device):
    """Values of both signs, and those of ReLU, whose zeros are exact.

    The kernels give the bits of aten (``tests/kernels/test_low_bit.py``), so that few tests here ask both.
    """
    x = torch.randn(2, 6, 16, 16, device=device).to(dtype)
    for t in (x, x.relu(), torch.nn.functional.leaky_relu(x, 0.01)):
        t = channels_last(t) if rows else t
        found = again(t, bits)
        assert found.stride() == t.stride()
        assert found.dtype == dtype
        assert torch.equal(found.sign(), t.sign())
        # 2 bits: the grid of the slope's side is as coarse as the other.
        assert relative_error(found, t.double()) <= ERRORS[bits]


@pytest.mark.parametrize("bits", [8, 4])
def test_a_value_goes_to_one_of_its_two_neighbours(bits, device):
    t = torch.randn(2, 3, 16, 32, device=device)
    found = again(t, bits)
    # The arithmetic of fp32.
    assert ((found - t).abs() <= steps(t, bits) * (1 + 1e-4)).all()
    assert found.amax() <= t.amax()
    assert found.amin() >= t.amin()


@pytest.mark.parametrize("bits", [8, 4])
def test_without_bias(bits):
    """The mean of n roundings has the error of one over sqrt(n), so its square stays within a few percent of 1 / n."""
    t, n = torch.nn.functional.leaky_relu(torch.randn(2, 8, 32, 32), 0.1), 128
    one, total = 0.0, torch.zeros_like(t, dtype=torch.float64)
    for seed in range(n):
        error = again(t, bits, seed).double() - t
        one += error.square().sum().item() / n
        total += error
    ratio = (total / n).square().sum().item() * n / one
    # 16,384 values: the standard deviation of the ratio is about 0.015.  A bias of 2% of the error would add 0.1.
    assert 0.93 <= ratio <= 1.07
    # Sums over many values do not drift either: beyond three standard deviations of the sum.
    assert abs(total.sum().item()) / n <= 3 * (one / n) ** 0.5


def test_errors_of_different_values_are_independent():
    """Neighbours, equal positions of neighbouring groups, and the same value with adjacent seeds do not correlate."""
    t, n = torch.randn(8, 4, 32, 32), 24
    errors = torch.stack([again(t, 4, mixed(seed, 3)) - t for seed in range(n)]).flatten()
    # The unit is the standard deviation of the mean of independent products.
    unit = errors.square().mean() / errors.numel() ** 0.5
    for lag in (1, 2, 3, 4, 16, 128, 255, 256, 512, 1024, 4096, t.numel()):
        assert abs((errors * errors.roll(lag)).mean()) <= 4 * unit, lag
    # A sum over some positions of all groups: over the seeds, the spread is that of a sum of independent errors.
    sums = errors.view(n, -1, 256)[:, :, :50].sum((1, 2))
    ratio = sums.square().sum() / errors.view(n, -1, 256)[:, :, :50].square().sum()
    # The relative standard deviation of a variance of 24 numbers is 0.29.
    assert 0.2 <= ratio <= 2


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "rows"),
    [(torch.float16, False), (torch.bfloat16, True), (torch.float32, True), (torch.float64, False)],
    ids=str,
)
def test_the_side_of_the_kink_is_exact(rows, dtype, backend, device):
    """Kinks are larger than the distances of the values, so that the rounding of the dtype could change a side."""
    kink = torch.linspace(-40.0, 40.0, 6, dtype=torch.promote_types(dtype, torch.float32), device=device)
    for kinks in (kink, torch.cat([kink, kink.flip(0)])):
        of = kinks.view(-1, 6, 1, 1)
        t = (torch.randn(2, 6, 16, 16, dtype=of.dtype, device=device) + of).to(dtype)
        t = channels_last(t) if rows else t
        for bits in (8, 4):
            found = again(t, bits, 0, kinks)
            assert found.stride() == t.stride()
            differences = [(v.to(of.dtype) - of) for v in (found, t)]
            on_it = differences[1] == 0
            assert torch.equal(differences[0].sign()[~on_it], differences[1].sign()[~on_it])
            assert relative_error(*differences) <= ERRORS[bits] + 40 * torch.finfo(dtype).eps


@DTYPES
def test_constant_groups_are_exact(dtype, device):
    for value in (0.0, 0.7, -3.0, 1e4):
        t = torch.full((1, 2, 300), value, device=device).to(dtype)
        assert torch.equal(again(t), t)


@DTYPES
def test_tiny_and_huge_values(dtype, device):
    """Subnormal numbers keep their signs, and no value becomes infinite or NaN."""
    limits = torch.finfo(dtype)
    sizes = (limits.smallest_normal / 8, limits.smallest_normal, limits.max)
    for size in sizes:
        t = (torch.rand(1, 2, 512, dtype=torch.float64, device=device) * 2 - 1).mul_(size).to(dtype)
        t[0, 0, :2] = (
            torch.tensor([limits.max, -limits.max], dtype=torch.float64).to(dtype) if size == limits.max else 0
        )
        for bits in (8, 4):
            found = again(t, bits)
            assert found.isfinite().all()
            assert torch.equal(found.sign()[t != 0], t.sign()[t != 0])


def test_zeros_of_both_signs(device):
    """-0 is no negative value.  Among values of both signs, 0 counts as positive, and comes back near 0."""
    t = torch.zeros(1, 1, 256, device=device)
    t[0, 0, ::2] = -0.0
    assert torch.equal(again(t), torch.zeros_like(t))
    t[0, 0, :2] = torch.tensor([1.0, -1.0])
    found = again(t)[0, 0, 2:]
    assert ((found > 0) & (found < 2e-4)).all()
    only_negative = -torch.rand(1, 1, 256, device=device)
    only_negative[0, 0, ::2] = 0.0
    found = again(only_negative)[0, 0]
    assert (found[1::2] < 0).all()
    assert (found[::2] >= 0).all()
    assert found[::2].max() < 1e-17


@pytest.mark.gpu
def test_a_group_that_is_not_finite_comes_back_as_nan(backend, device):
    """So that GradScaler sees it.  Other groups do not change."""
    for bad in (float("nan"), float("inf"), -float("inf")):
        t = torch.randn(1, 2, 512, device=device)
        t[0, 1, 300] = bad
        for kink in (None, torch.ones(2, device=device)):
            found = again(t, 4, 0, kink)
            assert found[0, 1, 256:].isnan().all()
            assert found[0, 1, :256].isfinite().all()
            assert found[0, 0].isfinite().all()


SHAPES = {
    "scalar": (), "vector": (1000,), "empty": (2, 0, 4, 4), "one": (1, 1, 1, 1), "few-rows": (3, 7),
    "rows": (70, 5), "small-planes": (3, 5, 2, 3), "odd": (2, 3, 7, 41), "volume": (1, 3, 5, 9, 11),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name, backend, device):
    t = torch.randn(SHAPES[name], device=device)
    for bits in (8, 4, 2):
        found = again(t, bits)
        assert found.shape == t.shape
        assert torch.equal(found.sign(), t.sign())
    if t.dim() >= 2:
        kink = torch.zeros(t.shape[1], device=device)
        assert torch.equal(again(t, 4, 0, kink).sign(), t.sign())


@pytest.mark.gpu
def test_seeds(backend, device):
    """The same seed gives the same bits, others give others, and the generators of torch are untouched."""
    t, state = torch.randn(2, 3, 20, 20, device=device), torch.get_rng_state()
    first, same, other = (pack(t, 4, seed) for seed in (5, 5, 6))
    assert torch.equal(first.codes, same.codes)
    assert 0.3 < (first.codes != other.codes).float().mean() < 0.99
    assert torch.equal(torch.get_rng_state(), state)
    assert len({mixed(0, 1, 2), mixed(0, 2, 1), mixed(1, 1, 2), mixed(0, 1), mixed(0, 1, 2 + (1 << 32))}) == 5


@FORMATS
def test_parts_do_not_change_the_bits(rows, monkeypatch):
    t = torch.randn(3, 5, 19, 31)
    t = channels_last(t) if rows else t
    whole = pack(t, 4, 1)
    values = unpack(whole)
    for size in (1 << 12, 1 << 9, 1):
        monkeypatch.setattr(reference, "PART", size)
        parts = pack(t, 4, 1)
        assert all(torch.equal(*both) for both in zip(whole[:3], parts[:3], strict=True))
        assert torch.equal(unpack(parts), values)


@pytest.mark.parametrize(
    ("dtype", "bits", "most"),
    [(torch.float16, 8, 0.5079), (torch.float16, 4, 0.2579), (torch.float32, 4, 0.1329)],
    ids=str,
)
def test_bytes(dtype, bits, most):
    """In units of the tensor, on fake tensors as on true ones: codes, and two numbers per group of 256 values."""
    t = torch.randn(1, 8, 64, 64).to(dtype)
    true = pack(t, bits, 0, torch.zeros(8))
    assert true.nbytes - 8 * 4 <= most * t.nbytes
    with FakeTensorMode() as mode:
        fake = graph.packed_like(mode.from_tensor(t), bits, "batch")
        assert sum(part.nbytes for part in fake) == true.nbytes - 8 * 4
        assert graph.unpack_op(*fake, None, bits, "batch", t.shape, t.stride()).stride() == t.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@FORMATS
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_the_workspace_is_enough(bits, rows, dtype, one_thread):
    """The compiler counts these bytes beside a tensor and its codes: copies of a part, of which there are four here.

    Codes of a part were there until the next part had its own.
    """
    t, kink = torch.randn(1, 16, 256, 256).to(dtype), torch.zeros(16)
    t = channels_last(t) if rows else t
    # Some twenty numbers of each group of 256 values are not counted.
    of_groups = 20 * 4 * t.numel() // 256
    with LiveBytes() as live:
        packed = pack(t, bits, 0, kink)
    assert live.peak - packed.nbytes <= reference.workspace(t.numel(), dtype, t.device, packing=True) + of_groups
    # The meter does not see inside an op.
    flat = t.new_empty(t.numel())
    with LiveBytes() as live:
        reference.unpack(packed[:3], kink, lines_of(t, "batch"), bits, flat)
    assert live.peak <= reference.workspace(t.numel(), dtype, t.device, packing=False) + of_groups
