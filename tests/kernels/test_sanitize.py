"""Runs every branch of every kernel on small tensors, for a tool that checks accesses:

PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m pytest -n 0 --device cuda -m sanitize

Without a cache, each tensor is an allocation of its own, and an access beyond its end is an error.  Other files have
tests with the mark `sanitize` too.  ``test_branches.py`` fails if a branch of a kernel runs in none of them.
"""

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton")

from fusedseg.ops import upsample
from fusedseg.ops.layout import layout_of
from fusedseg.ops.registry import FAMILIES
from fusedseg.ops.segmentation.spec import SumsSpec, sizes_of
from tests import reference
from tests.kernels import conv_abn_cases as convs
from tests.kernels import test_norm_act as norms
from tests.kernels import test_segmentation_sums as losses
from tests.kernels.conv_abn_cases import Conv
from tests.reference import FORWARD_TOLERANCE, relative_error
from tests.tools.marks import by_layout
from tests.tools.tensors import channels_last, empty, slots_of

pytestmark = pytest.mark.sanitize
# Number of groups of 6 channels.
STATISTICS = {"batch": None, "instance": 6, "group": 2}
# The last tile of samples, positions or channels is incomplete: tiles are 128 values, or in rows 8 of 16 channels.
SHAPE = (3, 6, 7, 9)


@pytest.fixture
def uncompiled(request):
    """Skips what ``tests/ptx`` cannot execute: labels of 16 bits, sums of fp16, and exp of fp64 in loops."""
    if request.config.getoption("--ptx"):
        pytest.skip("tests/ptx cannot execute it")


# The self-tests count batches, compute norms again, merge many parts, and compute kinks.  Without a GPU, tests of the
# same kernels in other files prove more.
@pytest.mark.slow
@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if not family.instead])
def test_self_test(name, device):
    dtype = torch.float32 if torch.float32 in FAMILIES[name].dtypes else torch.float16
    for result in FAMILIES[name].self_test(dtype, device):
        assert relative_error(result.found, result.expected) <= result.tolerance, result.what


def check_kept(rows, groups, device, **options):
    """Checks the kernels that keep the output, with kept channels and a residual."""
    given = norms.inputs(SHAPE, rows, torch.float32, device)
    weight, bias = given[3:]
    weight[0], weight[2], bias[0], bias[2] = 0.0, 1e-4, 3.0, -0.5
    norms.check(*given, groups, kept=slots_of([0, 2], SHAPE[1], device), **options)


by_statistics = pytest.mark.parametrize("groups", STATISTICS.values(), ids=STATISTICS)


@pytest.mark.gpu
@by_layout
@by_statistics
def test_on_chip(groups, rows, device):
    check_kept(rows, groups, device)
    norms.check(*norms.inputs(SHAPE, rows, torch.float32, device), groups, keep="input")


@by_layout
@pytest.mark.parametrize("act", [norms.ELU, ("selu", 0.0)], ids=lambda act: act[0])
def test_kept_channels_of_an_activation_that_saturates(act, rows, device):
    check_kept(rows, None, device, act=act)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("shape", [(2, 4, 8, 16), (2, 4, 7, 12), (2, 4, 17, 19)], ids=["whole", "aligned", "anywhere"])
def test_planes_of_each_alignment(shape, device):
    """Planes of whole tiles, planes of whole vectors, and planes that begin between two vectors."""
    norms.check(*norms.inputs(shape, False, torch.float32, device), None)


@pytest.mark.parametrize(("shape", "rows"), [((2, 1, 100, 101), False), ((2, 4, 7, 9), True)], ids=["large", "group"])
def test_a_slab(shape, rows, device):
    """One that is loaded for each pass, and one of a group of channels in rows."""
    norms.check(*norms.inputs(shape, rows, torch.float32, device), 1)


@by_layout
@pytest.mark.parametrize("size", ["on chip", "split"])
@pytest.mark.parametrize("groups", [None, 2], ids=["batch", "group"])
def test_without_a_mean(groups, size, rows, request, device):
    """An op that writes over x keeps no mean, and moves the running statistics of a batch."""
    from fusedseg.kernels.norm_act import norm_act_fwd

    if size == "split":
        request.getfixturevalue("small_tiles")
    x, _, _, weight, bias = norms.inputs(SHAPE, rows, torch.float32, device)
    counted = torch.zeros((), dtype=torch.int64, device=device) if groups is None else None
    running = norms.start(SHAPE, device) if groups is None else (None, None)
    expected = reference.norm_act(x, weight, bias, eps=norms.EPS, activation="leaky_relu", param=0.01, groups=groups)
    mean, *_ = norm_act_fwd(
        x, x, layout_of(x).by_sample(len(x), groups), weight, bias, *running, True, 0.1, norms.EPS, norms.LEAKY, None,
        batches=counted, keep_mean=False,
    )  # fmt: skip
    assert mean is None
    assert counted is None or counted == 1
    assert relative_error(x, expected.out) <= FORWARD_TOLERANCE[x.dtype]


@pytest.mark.gpu
@pytest.mark.usefixtures("small_tiles")
@by_layout
@by_statistics
def test_split(groups, rows, device):
    """The kernels keep the input, and normalise it again in backward."""
    norms.check(*norms.inputs(SHAPE, rows, torch.float32, device), groups, keep="input")


@pytest.mark.gpu
@pytest.mark.usefixtures("small_tiles")
@by_layout
def test_kept_channels_split(rows, device):
    check_kept(rows, 6, device)


@pytest.mark.gpu
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("rows", "training"), [(True, True), (False, False), (True, False)])
def test_running_statistics(rows, training, device):
    shape = (2, 37, 7, 9)
    x, dz, _, *affine = norms.inputs(shape, rows, torch.float16, device)
    norms.check(x, dz, None, *affine, None, training=training, running=norms.start(shape, device))


TAPS = Conv((2, 5, 9, 7), (6, 5, 3, 3), stride=(2, 1), padding=1, dilation=(1, 2))
# Taps that leave x on both sides; one tap, aligned, with a stride, with padding, and in one step; more taps than a
# mask has bits; and a volume.  The last column says whether the convolution has a bias.
CONVS = {
    "taps": (TAPS, False, True),
    "taps-rows": (TAPS, True, False),
    "one-tap": (Conv((2, 40, 8, 6), (20, 40, 1, 1)), False, True),
    "one-tap-stride": (Conv((2, 16, 9, 7), (6, 16, 1, 1), stride=2), True, True),
    "one-tap-padding": (Conv((2, 16, 5, 7), (6, 16, 1, 1), padding=1), False, False),
    "one-step": (Conv((2, 16, 8, 6), (20, 16, 1, 1)), True, True),
    "many-taps": (Conv((1, 2, 5, 6, 7), (3, 2, 4, 3, 3), padding=1), True, False),
    "volume-rows": (Conv((2, 4, 5, 6, 7), (6, 2, 3, 1, 2), (1, 2, 2), (1, 0, 1), groups=2), True, True),
}


@pytest.mark.gpu
@pytest.mark.parametrize(("conv", "rows", "with_bias"), CONVS.values(), ids=CONVS)
def test_convolution(conv, rows, with_bias, device):
    """Runs the three epilogues: batch statistics, running statistics, and running statistics with kept channels."""
    running = convs.running_statistics(conv, device)
    for training, kept in ((True, None), (False, None), (False, slots_of([0, 2], conv.w[0], device))):
        given = convs.inputs(conv, torch.float32, device, rows)
        given = given._replace(conv_bias=given.conv_bias if with_bias else None)
        out = convs.output(conv, torch.float32, device, rows)
        convs.check(conv, given, out, training=training, running=running, kept=kept)


@pytest.mark.gpu
@pytest.mark.usefixtures("replanned")
@pytest.mark.parametrize(("dtype", "channels"), [(torch.float16, (72, 120)), (torch.bfloat16, (20, 60))], ids=str)
def test_convolution_on_tensor_cores(dtype, channels, device, monkeypatch):
    """Each program has several tiles of 128 positions."""
    from fusedseg.kernels import conv as blocks

    monkeypatch.setattr(blocks, "PROGRAMS_PER_SM", 0)
    monkeypatch.setattr(blocks, "multiprocessors", lambda device: 1)
    C, K = channels
    conv = Conv((2, C, 8, 9), (K, C, 2, 2), padding=(1, 0))
    given, out = convs.inputs(conv, dtype, device), convs.output(conv, dtype, device)
    convs.check(conv, given, out, running=convs.running_statistics(conv, device))


# Lines of one and of several vectors of channels; more lines than a program computes; a factor that is no integer; more
# readers of a value than are unrolled, and an axis that stays as it is; a program whose lines no output reads.
INTERPOLATIONS = {
    "image": ((1, 6, 5, 7), (10, 14), False),
    "corners": ((2, 3, 4, 3), (9, 5), True),
    "volume": ((1, 3, 2, 3, 4), (5, 6, 8), False),
    "many-readers": ((1, 3, 2, 3, 4), (9, 3, 19), False),
    "one-line-that-nothing-reads": ((1, 3, 49, 4), (16, 5), False),
}


@pytest.mark.gpu
@by_layout
@pytest.mark.parametrize("name", INTERPOLATIONS)
def test_upsample(name, rows, device):
    shape, size, corners = INTERPOLATIONS[name]
    of = upsample.Linear(size, None, corners)
    x, dy = torch.randn(shape), torch.randn(*shape[:2], *size)
    leaf = x.double().requires_grad_()
    y = F.interpolate(leaf, size, mode=upsample.MODES[x.dim() - 2], align_corners=corners)
    wanted = y.detach(), torch.autograd.grad(y, leaf, dy.double())[0]
    given = [(channels_last(t) if rows else t).to(device) for t in (x, dy)]
    found = upsample.linear_forward(given[0], of), upsample.linear_backward(given[1], shape[2:], of)
    assert all(
        relative_error(mine, theirs) <= FORWARD_TOLERANCE[x.dtype] for mine, theirs in zip(found, wanted, strict=True)
    )


@pytest.mark.gpu
@by_layout
@pytest.mark.parametrize("name", losses.CASES)
def test_segmentation_sums(name, rows, device):
    losses.check((2, 5, 13), *losses.CASES[name], rows, device)


@pytest.mark.usefixtures("uncompiled")
@by_layout
@pytest.mark.parametrize("name", losses.CASES)
def test_more_classes_than_a_tile_holds(name, rows, device):
    losses.check((2, 300, 13), *losses.CASES[name], rows, device)


@by_layout
def test_counts(rows, device):
    from fusedseg.kernels.segmentation_sums import segmentation_sums_fwd

    for classes in (5, 300):
        x, target, _, _ = losses.inputs((2, classes, 13), "regions", rows, device)
        largest = F.one_hot(x.argmax(1), classes).transpose(1, 2)
        for probability, p in (("argmax", largest), ("positive", x > 0)):
            spec = SumsSpec(probability, "none", dense=True)
            sums = segmentation_sums_fwd(x, target, None, sizes_of(x), spec)
            assert torch.equal(sums[:3].long(), torch.stack([(p * target).sum(2), p.sum(2), target.sum(2)]))


def test_kinks(device):
    from fusedseg.kernels.low_bit import low_bit_kink

    mean, rstd, bias = torch.rand(3, 300, device=device) + 0.1
    for given, shift in ((None, 0.0), (bias, bias)):
        found = torch.empty_like(mean)
        low_bit_kink(mean, rstd, None, given, found)
        assert relative_error(found, mean.double() - shift / rstd.double()) <= FORWARD_TOLERANCE[found.dtype]


@by_layout
def test_a_pool_without_codes(rows, device):
    from fusedseg.kernels.max_pool import max_pool_fwd

    x, z = (empty(shape, torch.float32, rows).normal_().to(device) for shape in ((2, 5, 9, 7), (2, 5, 4, 3)))
    max_pool_fwd(x, z, None, rows, (2, 2), ((2, 2), (0, 0), (1, 1), 1))
    assert torch.equal(z, F.max_pool2d(x, 2))
