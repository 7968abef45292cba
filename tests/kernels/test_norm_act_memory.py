"""Bytes that the InPlaceABN kernels move, and tensors beyond 2**31 elements, in the interpreter."""

import contextlib
from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from fusedseg.ops.layout import layout_of
from tests import reference
from tests.kernels.sampled import every, first_and_last, first_middle_last, sampled
from tests.reference import FORWARD_TOLERANCE, GRADIENT_TOLERANCE, relative_error
from tests.tools.marks import by_layout
from tests.tools.tensors import empty

LEAKY = ("leaky_relu", 0.01)
pytestmark = pytest.mark.usefixtures("only_in_the_interpreter")


class Step:
    """Runs forward, backward and, if the input is kept, the rebuilding of z, with a few programs of each launch.

    ``passes`` has the bytes that each of them moves, in units of x, extrapolated from the programs that ran to all
    programs.  z is written over x if the output is kept.
    """

    def __init__(self, x, dz, choose, training=True, groups=None, keep="output", residual=False, joined=False) -> None:
        from fusedseg.kernels.norm_act import norm_act_fwd, norm_act_rebuild
        from fusedseg.kernels.norm_act_bwd import norm_act_bwd

        C, layout = x.shape[1], layout_of(x).by_sample(x.shape[0], groups)
        self.weight, self.bias = torch.linspace(0.6, 1.4, C), torch.linspace(-0.5, 0.5, C)
        self.running = (torch.zeros(C), torch.ones(C)) if groups is None else (None, None)
        r, dr = (torch.empty_like(x).zero_() if residual else None for _ in range(2))
        also = torch.empty_like(x).zero_() if joined else None
        z = x if keep == "output" else torch.empty_like(x)
        self.nbytes, self.passes, self.launches = x.nbytes, [], []
        affine = self.weight, self.bias
        with self.counted(choose):
            mean, rstd, _ = norm_act_fwd(
                x, z, layout, *affine, *self.running, training, 0.1, 1e-5, LEAKY, None, residual=r
            )
        with self.counted(choose):
            self.dx, self.dweight, self.dbias = norm_act_bwd(
                dz, x, layout, *affine, rstd, None, None, training, LEAKY, torch.float32,
                mean=mean if keep == "input" else None, residual=r, dresidual=dr, also=also,
                pitch=C if joined else None,
            )  # fmt: skip
        if keep == "input":
            with self.counted(choose):
                norm_act_rebuild(x, z, layout, *affine, mean, rstd, LEAKY, r)

    @contextlib.contextmanager
    def counted(self, choose):
        with sampled(choose) as (moved, shares):
            yield
        nbytes = sum((moved.loaded(kernel) + moved.stored(kernel)) * shares[kernel] for kernel in set(moved.launches))
        self.passes.append(float(nbytes / self.nbytes))
        self.launches.append(moved.launches)


@pytest.fixture
def multiprocessors(monkeypatch, replanned):
    """Sets a number that divides the tiles evenly, so that all programs of a launch do the same work."""
    from fusedseg.kernels import launch

    monkeypatch.setattr(launch, "multiprocessors", lambda device: 128)


def assert_passes(found, expected, most=0.04):
    """``most`` covers parameters, partial results, sums over samples, and mean and rstd of each plane."""
    assert all(at_least <= value <= at_least + most for value, at_least in zip(found, expected, strict=True)), found


@by_layout
@pytest.mark.usefixtures("multiprocessors", "counted_once")
def test_a_large_tensor_is_read_twice_and_written_once(rows, record_property):
    """A stage of a U-Net of 64 MiB in fp16, or 96 MiB in rows.  Backward reads z and dz twice and writes dx."""
    shape = (8, 64, 384, 256) if rows else (8, 64, 256, 256)
    x, dz = (empty(shape, torch.float16, rows).zero_() for _ in range(2))
    step = Step(x, dz, first_middle_last)
    record_property("passes", step.passes)
    assert_passes(step.passes, [3, 5], most=0.02)


@pytest.mark.parametrize(("shape", "rows"), [((8, 16, 16, 16), False), ((4, 64, 16, 16), True)], ids=["planes", "rows"])
@pytest.mark.usefixtures("counted_once")
def test_a_slab_that_fits_on_chip_is_read_once(shape, rows, record_property):
    x, dz = (empty(shape, torch.float16, rows).normal_() for _ in range(2))
    step = Step(x, dz, every)
    record_property("passes", step.passes)
    assert [len(launches) for launches in step.launches] == [1, 1]
    assert_passes(step.passes, [2, 3], most=0.02)


def passes_of_samples(shape, rows, groups, choose, **options):
    x, dz = (empty(shape, torch.float16, rows).zero_() for _ in range(2))
    return Step(x, dz, choose, groups=groups, **options).passes


# Shape, number of groups, and whether the layout is rows.
ONCHIP = {"instance-planes": ((4, 8, 32, 32), 8, False), "group-rows": ((4, 32, 32, 16), 4, True)}
SPLIT = {"instance-rows": ((2, 32, 768, 256), 32, True), "group-planes": ((2, 32, 256, 256), 4, False)}


@pytest.mark.parametrize(("shape", "groups", "rows"), ONCHIP.values(), ids=ONCHIP)
@pytest.mark.usefixtures("counted_once")
def test_statistics_of_samples_that_fit_on_chip(shape, groups, rows, record_property):
    """A residual adds one read to each pass over the tensor, and its gradient one write.

    Backward reads the weight, a number of fp32 for each plane of fp16, a second time after its sums.
    """
    step = partial(passes_of_samples, shape, rows, groups, every)
    found, most = step(), 0.04 + 4 / (2 * shape[2] * shape[3])
    record_property("passes", found)
    assert_passes(found, [2, 3], most)
    assert_passes(step(keep="input"), [2, 3, 2], most)
    assert_passes(step(residual=True), [3, 5], most)
    assert_passes(step(keep="input", residual=True), [3, 5, 3], most)


@pytest.mark.parametrize(("shape", "groups", "rows"), SPLIT.values(), ids=SPLIT)
@pytest.mark.usefixtures("multiprocessors", "counted_once")
def test_statistics_of_samples_of_a_large_tensor(shape, groups, rows, record_property):
    step = partial(passes_of_samples, shape, rows, groups, first_middle_last)
    found = step()
    record_property("passes", found)
    assert_passes(found, [3, 5])
    assert_passes(step(keep="input"), [3, 5, 2])
    # If the output is kept, both passes of backward read the residual for xhat, and its gradient is written.
    assert_passes(step(residual=True), [4, 8])
    # If the input is kept, the residual is read once.  The first pass of backward writes the residual's gradient, and
    # the second pass reads it in place of the residual and dz.
    assert_passes(step(keep="input", residual=True), [4, 7, 3])


@by_layout
@pytest.mark.usefixtures("multiprocessors", "counted_once")
def test_two_gradients_of_a_large_tensor(rows, record_property):
    """A sum in memory would be three passes more than one gradient.  Both launches read both gradients: two more.

    With a residual the first launch writes the sum behind the activation: one more.
    """
    shape = (2, 32, 768, 256) if rows else (2, 32, 256, 256)
    step = partial(passes_of_samples, shape, rows, 32, first_middle_last, keep="input", joined=True)
    found = step()
    record_property("passes", found)
    assert_passes(found, [3, 7, 2])
    assert_passes(step(residual=True), [4, 8, 3])


# All cases are bf16 with more than 2**31 elements; many channels keep the work of a program small.
LARGE = {
    "planes-split": ((9, 58300, 64, 64), False),
    "planes-one-launch": ((1, 524304, 64, 64), False),
    # More than 2**32 elements: within one tile, samples lie 2**25 elements apart.
    "planes-many-samples-a-tile": ((128, 524320, 8, 8), False),
    "rows-split": ((2112, 1048576), True),
    "rows-one-launch": ((256, 8388640), True),
}


@pytest.mark.parametrize(("shape", "rows"), LARGE.values(), ids=LARGE)
def test_beyond_two_to_the_31_elements(shape, rows):
    """The first and last programs compute the right channels, and no access leaves the tensor."""
    x, dz = (empty(shape, torch.bfloat16, rows) for _ in range(2))
    assert x.numel() > 2**31
    ends = [0, shape[1] - 1]
    for t in (x, dz):
        t[:, ends] = torch.randn(shape[0], 2, *shape[2:]).bfloat16()
    before = x[:, ends].clone()
    step = Step(x, dz, first_and_last)

    weight, bias = step.weight[ends], step.bias[ends]
    expected = reference.norm_act(before, weight, bias)
    assert relative_error(x[:, ends], expected.out) <= FORWARD_TOLERANCE[x.dtype]
    dx, dweight, dbias, _ = reference.gradients(dz[:, ends], before, weight, bias)
    assert relative_error(step.dx[:, ends], dx) <= GRADIENT_TOLERANCE[x.dtype]
    assert relative_error(step.dweight[ends], dweight) <= GRADIENT_TOLERANCE[x.dtype]
    assert relative_error(step.dbias[ends], dbias) <= GRADIENT_TOLERANCE[x.dtype]


# The positions of the second case fit in 32 bits, but not after they are rounded up to a whole tile.
LONG = {
    "planes": ((1, 1, 2**31 + 4096), False),
    "planes-just-below": ((1, 1, 2**31 - 5), False),
    "rows": ((2**27 + 4096, 16), True),
}


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "rows"), LONG.values(), ids=LONG)
def test_channels_of_two_to_the_31_elements(shape, rows):
    """The end of one channel, or of 16 channels, is computed with running statistics."""
    x, dz = (empty(shape, torch.bfloat16, rows) for _ in range(2))
    end = (slice(-1000, None),) if rows else (..., slice(-1000, None))
    x[end], dz[end] = torch.randn_like(x[end]), torch.randn_like(x[end])
    before = x[end].clone()
    # Forward walks backwards through memory, so its first program ends at the end of the tensor.
    step = Step(x, dz, first_and_last, training=False)

    options = {"running_mean": step.running[0], "running_var": step.running[1], "training": False}
    expected = reference.norm_act(before, step.weight, step.bias, **options)
    assert relative_error(x[end], expected.out) <= FORWARD_TOLERANCE[x.dtype]
    dx = reference.gradients(dz[end], before, step.weight, step.bias, **options).dx
    assert relative_error(step.dx[end], dx) <= GRADIENT_TOLERANCE[x.dtype]
