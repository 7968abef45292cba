"""Compares the kernels of segmentation losses with float64, in the interpreter or on a GPU, and counts their bytes."""

import pytest
import torch

pytest.importorskip("triton")

from fusedseg.ops.segmentation.spec import SumsSpec, sizes_of
from tests import reference
from tests.reference import relative_error
from tests.tools.interpreter import only_programs, reordered
from tests.tools.marks import by_layout
from tests.tools.tensors import channels_last, empty
from tests.tools.traffic import checked, traffic

DICE_CE = SumsSpec("softmax", "softmax")
# The spec, and the kind of target.  Together they use each branch of the kernels.
CASES = {
    "dice-ce": (DICE_CE, "labels"),
    "smoothed-ignore": (SumsSpec("softmax", "smoothed", ignore=1), "labels"),
    "squared": (SumsSpec("softmax", "none", squared=True), "labels"),
    "regions": (SumsSpec("sigmoid", "sigmoid", ignore=0, dense=True), "regions"),
    "minimum": (SumsSpec("softmax", "smoothed", minimum=True, dense=True), "soft"),
    "raw": (SumsSpec("identity", "softmax", squared=True, dense=True), "soft"),
    "ce": (SumsSpec("none", "softmax"), "labels"),
    "focal": (SumsSpec("none", "softmax", gamma=2.0), "labels"),
    "focal-sigmoid": (SumsSpec("softmax", "sigmoid", dense=True, gamma=0.5), "soft"),
}


@pytest.fixture
def small(monkeypatch, replanned):
    """Small tiles, several of them for each program."""
    from fusedseg.kernels import segmentation_sums

    monkeypatch.setattr(segmentation_sums, "TILE", 64)
    monkeypatch.setattr(segmentation_sums, "MIN_BLOCK_S", 4)
    monkeypatch.setattr(segmentation_sums, "PROGRAMS_PER_SM", 1)
    monkeypatch.setattr(segmentation_sums, "multiprocessors", lambda device: 4)


@pytest.fixture
def narrow(monkeypatch, small):
    """A tile has two or four classes, so that the softmax of a position comes from several tiles.

    A program has several tiles of positions.
    """
    from fusedseg.kernels import segmentation_sums

    monkeypatch.setattr(segmentation_sums, "MAX_BLOCK_K", 2)
    monkeypatch.setattr(segmentation_sums, "SPLIT_FWD", 2)
    monkeypatch.setattr(segmentation_sums, "SPLIT_BWD", 4)
    monkeypatch.setattr(segmentation_sums, "TILE", 8)


@pytest.fixture
def split(request, narrow):
    """``narrow`` for tests in float64."""
    if request.config.getoption("--ptx"):
        pytest.skip("exp of float64 branches by thread, and tests/ptx lets only whole warps of a loop shuffle")


def launch(x, target, mask, spec, dsums, dx=None):
    """The sums, dx and the counted bytes."""
    from fusedseg.kernels.segmentation_sums import segmentation_sums_bwd, segmentation_sums_fwd

    dx = torch.empty_like(x) if dx is None else dx
    with checked(x.device) as moved:
        sums = segmentation_sums_fwd(x, target, mask, sizes_of(x), spec)
        segmentation_sums_bwd(dsums, x, target, mask, dx, sizes_of(x), spec)
    return sums, dx, moved


def inputs(shape, kind, rows, device, dtype=torch.float64):
    x = torch.randn(shape, device=device).to(dtype)
    # A uint8 holds 256 classes.
    labels = torch.randint(min(shape[1], 256), (shape[0], *shape[2:]), device=device).to(torch.uint8)
    values = torch.rand(shape, device=device)
    target = {"labels": labels, "regions": values < 0.4, "soft": values}[kind]
    if rows:
        x, target = channels_last(x), target if kind == "labels" else channels_last(target)
    mask = None if kind == "regions" else torch.rand(labels.shape, device=device) < 0.8
    return x, target, mask, torch.randn(5, *shape[:2], dtype=torch.promote_types(dtype, torch.float32), device=device)


def check(shape, spec, kind, rows, device, dtype=torch.float64, tolerance=1e-13):
    x, target, mask, dsums = inputs(shape, kind, rows, device, dtype)
    leaf = x.detach().double().requires_grad_()
    options = {"ignore_index": spec.ignore, "squared": spec.squared, "minimum": spec.minimum, "gamma": spec.gamma}
    expected = reference.segmentation_sums(leaf, target, mask, spec.probability, spec.likelihood, **options)
    sums, dx, _ = launch(x, target, mask, spec, dsums)
    assert relative_error(sums, expected) <= tolerance
    assert relative_error(dx, torch.autograd.grad(expected, leaf, dsums.double())[0]) <= tolerance


@pytest.mark.usefixtures("poison", "small")
@by_layout
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name, rows, device):
    check((2, 5, 13), *CASES[name], rows, device)


@pytest.mark.usefixtures("poison", "split")
@by_layout
@pytest.mark.parametrize("name", ["smoothed-ignore", "regions", "minimum", "focal"])
def test_classes_in_several_tiles(name, rows, device):
    check((2, 5, 9), *CASES[name], rows, device)


@pytest.mark.usefixtures("poison", "narrow")
@by_layout
def test_classes_in_several_tiles_of_fp32(rows, device):
    # A few roundings of fp32.
    check((2, 5, 9), *CASES["dice-ce"], rows, device, torch.float32, 1e-6)


@pytest.mark.usefixtures("poison", "split")
@by_layout
def test_counts_of_classes_in_several_tiles(rows, device):
    from fusedseg.kernels.segmentation_sums import segmentation_sums_fwd

    x, labels, _, _ = inputs((2, 5, 9), "labels", rows, device)
    x = x.round()
    sums = segmentation_sums_fwd(x, labels, None, sizes_of(x), SumsSpec("argmax", "none"))
    p, y = (torch.nn.functional.one_hot(of.long(), 5) for of in (x.argmax(1), labels))
    assert sums.dtype == torch.float64
    assert torch.equal(sums[:3].long(), torch.stack([(p * y).sum(1), p.sum(1), y.sum(1)]))


@pytest.mark.usefixtures("poison")
@by_layout
def test_one_class_and_one_position(rows, device):
    check((1, 1, 40), *CASES["regions"], rows, device)
    check((3, 2, 1), *CASES["dice-ce"], rows, device)


@by_layout
def test_logits_are_read_once_and_the_gradient_is_written_once(rows, device, request):
    """The labels are read in their own dtype.  What is left over are sums of programs, and gradients of sums."""
    if device.type != "cpu" or request.config.getoption("--ptx"):
        pytest.skip("counts in the interpreter; in compiled code several threads of a warp read the same label")
    x, labels, _, dsums = inputs((1, 14, 40, 48), "labels", rows, device, torch.float16)
    dsums = dsums.float()
    for dtype in (torch.uint8, torch.int64):
        _, dx, moved = launch(x, labels.to(dtype), None, DICE_CE, dsums)
        forward, backward = "segmentation_sums_fwd_kernel", "segmentation_sums_bwd_kernel"
        assert moved.launches == [forward, backward]
        assert moved.loaded(forward, "x_ptr") == moved.loaded(backward, "x_ptr") == x.nbytes
        assert moved.loaded(forward, "y_ptr") == moved.loaded(backward, "y_ptr") == labels.numel() * dtype.itemsize
        assert moved.stored(backward) == moved.stored(backward, "dx_ptr") == dx.nbytes


@pytest.mark.usefixtures("split", "only_in_the_interpreter")
def test_many_classes_are_read_twice_and_three_times(device):
    x, labels, mask, dsums = inputs((1, 5, 12), "labels", False, device)
    _, dx, moved = launch(x, labels, mask, DICE_CE, dsums)
    assert moved.loaded("segmentation_positions_kernel") == x.nbytes
    assert moved.loaded("segmentation_sums_fwd_kernel", "x_ptr") == x.nbytes
    assert moved.loaded("segmentation_sums_bwd_kernel", "x_ptr") == 3 * x.nbytes
    assert moved.stored("segmentation_sums_bwd_kernel") == dx.nbytes


@pytest.mark.usefixtures("split")
@by_layout
def test_over_the_logits_in_any_order_of_programs(rows, device):
    x, target, mask, dsums = inputs((2, 5, 9), "labels", rows, device)
    sums, dx, _ = launch(x, target, mask, DICE_CE, dsums)
    with reordered(device):
        again, over, _ = launch(x, target, mask, DICE_CE, dsums, dx=x)
    assert torch.equal(sums, again)
    assert torch.equal(dx, over)


@pytest.mark.usefixtures("replanned", "only_in_the_interpreter")
@by_layout
def test_beyond_two_to_the_31_elements(rows, device, monkeypatch):
    """The last program of backward computes the right values, and no access leaves the tensor."""
    from fusedseg.kernels import segmentation_sums

    # Each program has one tile.
    monkeypatch.setattr(segmentation_sums, "PROGRAMS_PER_SM", 1 << 20)
    x, dx = (empty((1, 160, 3700, 3700), torch.bfloat16, rows) for _ in range(2))
    assert x.numel() > 2**31
    labels = torch.empty(1, 3700, 3700, dtype=torch.uint8)
    labels[0, -1, -16:] = torch.randint(160, (16,), dtype=torch.uint8)
    x[0, :, -1, -16:] = torch.randn(160, 16).bfloat16()
    dsums = torch.randn(5, 1, 160)
    with only_programs(lambda kernel, grid: [(grid[0] - 1, 0, 0)]), traffic():
        segmentation_sums.segmentation_sums_bwd(dsums, x, labels, None, dx, sizes_of(x), DICE_CE)
    leaf = x[:, :, -1, -16:].double().requires_grad_()
    expected = reference.segmentation_sums(leaf, labels[:, -1, -16:])
    (wanted,) = torch.autograd.grad(expected, leaf, dsums.double())
    # The rounding of bf16.
    assert relative_error(dx[:, :, -1, -16:], wanted) <= 4e-3
