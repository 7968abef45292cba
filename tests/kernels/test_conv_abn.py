"""Compares the convolution with BatchNorm with float64, in the interpreter or on a GPU (``--device cuda``)."""

import contextlib

import pytest
import torch

pytest.importorskip("triton")

from fusedseg.ops.layout import layout_of
from tests.kernels.conv_abn_cases import (
    ELU,
    EPS,
    IDENTITY,
    Conv,
    Inputs,
    check,
    inputs,
    launch,
    output,
    running_statistics,
)
from tests.reference import relative_error
from tests.tools.interpreter import reordered
from tests.tools.marks import by_layout
from tests.tools.tensors import channels_last, slots_of
from tests.tools.traffic import checked

# Without a GPU, tiles have 64 positions, and 16, 32, 64 or (tensor cores) 128 channels; an fp32 step sums 32 channels.
CONVS = {
    "3x3": Conv((2, 5, 9, 7), (6, 5, 3, 3), padding=1),
    "1x1-aligned": Conv((2, 40, 8, 6), (20, 40, 1, 1)),
    "1x1-one-sample": Conv((1, 64, 9, 9), (64, 64, 1, 1)),
    "1x1-odd-plane": Conv((3, 9, 5, 7), (35, 9, 1, 1)),
    "1x1-stride-2": Conv((2, 17, 7, 8), (5, 17, 1, 1), stride=2),
    "1x1-padded": Conv((2, 4, 5, 5), (5, 4, 1, 1), padding=1),
    "5x5": Conv((1, 3, 8, 9), (6, 3, 5, 5), padding=2),
    "7x7-stride-2": Conv((1, 3, 15, 13), (8, 3, 7, 7), stride=2, padding=3),
    "3x3-strided-dilated-grouped": Conv((2, 6, 9, 8), (8, 3, 3, 3), stride=2, padding=1, dilation=2, groups=2),
    "3x5-asymmetric": Conv((2, 4, 11, 8), (7, 4, 3, 5), stride=(2, 1), padding=(0, 2), dilation=(1, 2)),
    "1x3-padded-beyond-the-kernel": Conv((3, 4, 2, 3), (5, 4, 1, 3), padding=(2, 3)),
    "one-output-position": Conv((5, 3, 3, 3), (7, 3, 3, 3)),
    "one-input-position": Conv((5, 3, 1, 1), (7, 3, 3, 3), padding=1),
    "one-channel": Conv((2, 1, 6, 5), (1, 1, 3, 3), padding=1),
    "groups-over-the-block": Conv((1, 36, 5, 6), (66, 18, 1, 3), groups=2),
    "depthwise": Conv((2, 7, 6, 5), (7, 1, 3, 3), padding=1, groups=7),
    "3x3x3": Conv((1, 3, 3, 5, 4), (4, 3, 3, 3, 3), padding=1),
    "1x1x1": Conv((2, 33, 2, 3, 8), (5, 33, 1, 1, 1)),
    "3x1x2-asymmetric": Conv((2, 4, 5, 6, 7), (6, 4, 3, 1, 2), stride=(1, 2, 2), padding=(1, 0, 1), dilation=(2, 1, 1)),
}
FORMATS = {
    "planes": (False, False),
    "planes-to-rows": (False, True),
    "rows-to-planes": (True, False),
    "rows": (True, True),
}
# One tap and several taps, aligned and unaligned.
SOME = ("3x3", "1x1-aligned", "1x1-odd-plane", "3x1x2-asymmetric")
PATHS = [pytest.param(CONVS[name], id=name) for name in SOME]


def formats():
    """Every convolution in planes and in rows, and four of them with a change of the format."""
    for name, conv in CONVS.items():
        for fmt, (rows_in, rows_out) in FORMATS.items():
            if rows_in == rows_out or name in SOME:
                yield pytest.param(conv, rows_in, rows_out, id=f"{name}-{fmt}")


@pytest.mark.parametrize(("conv", "rows_in", "rows_out"), [*formats()])
def test_training(conv, rows_in, rows_out, device):
    given, out = inputs(conv, torch.float32, device, rows_in), output(conv, torch.float32, device, rows_out)
    check(conv, given, out, running=running_statistics(conv, device))


@pytest.mark.parametrize(("conv", "rows"), [(conv, n % 2 == 1) for n, conv in enumerate(CONVS.values())], ids=CONVS)
def test_running_statistics_in_eval(conv, rows, device):
    """Eval mode takes one launch, which adds the convolution's bias."""
    given, out = inputs(conv, torch.float32, device, rows), output(conv, torch.float32, device, rows)
    running = running_statistics(conv, device)
    check(conv, given, out, training=False, running=running)
    assert all(map(torch.equal, running, running_statistics(conv, device)))


def in_turn(one, other):
    """Each of two dtypes in training and in eval mode, once in planes and once in rows."""
    rows = [(one, True, False), (other, True, True), (one, False, True), (other, False, False)]
    return pytest.mark.parametrize(("dtype", "training", "rows"), rows, ids=str)


@in_turn(torch.float16, torch.bfloat16)
@pytest.mark.parametrize("conv", PATHS)
def test_half_precision(conv, dtype, training, rows, device):
    given, out = inputs(conv, dtype, device, rows), output(conv, dtype, device, rows)
    check(conv, given, out, training=training, running=running_statistics(conv, device))


@in_turn(torch.float32, torch.float16)
def test_kept_channels(dtype, training, rows, device):
    """Channels are kept for weight 0, and for a weight too small beside its bias.

    In eval mode y is stored with the convolution's bias, and then normalised.
    """
    conv = CONVS["3x3"]
    given, out = inputs(conv, dtype, device, rows), output(conv, dtype, device, rows)
    given.weight[0], given.weight[2], given.bias[2] = 0.0, 1e-4, -0.5
    kept = slots_of([0, 2], conv.w[0], device)
    check(conv, given, out, training=training, running=running_statistics(conv, device), kept=kept)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("act", [ELU, IDENTITY], ids=lambda act: act[0])
def test_activations(act, training, device):
    conv = CONVS["3x3"]
    given, out = inputs(conv, torch.float32, device), output(conv, torch.float32, device)
    check(conv, given, out, act, training, running_statistics(conv, device))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_without_biases_and_affine(training, device):
    conv = CONVS["3x3"]
    x, w, *_ = inputs(conv, torch.float32, device)
    # In training the running statistics may be absent.
    running = (None, None) if training else running_statistics(conv, device)
    given = Inputs(x, w, None, None, None)
    check(conv, given, output(conv, torch.float32, device), training=training, running=running)


@pytest.mark.parametrize("name", ["3x3", "1x1-aligned", "3x3-strided-dilated-grouped"])
def test_a_channels_last_weight_gives_the_same(name, device):
    conv = CONVS[name]
    given, out, again = inputs(conv, torch.float32, device), *(output(conv, torch.float32, device) for _ in range(2))
    launch(conv, given, out)
    launch(conv, given._replace(w=channels_last(given.w)), again)
    assert torch.equal(again, out)


@by_layout
@pytest.mark.parametrize("shape", [(1, 5, 1, 7), (1, 5, 6, 1), (3, 1, 4, 5), (4, 5, 1, 1)], ids=str)
def test_strides_of_sizes_of_one_do_not_matter(shape, rows, device):
    conv = Conv(shape, (6, shape[1], 3, 3), padding=1)

    def oddly_strided(t):
        pairs = zip(t.shape, t.stride(), strict=True)
        return t.as_strided(t.shape, [77 if size == 1 else stride for size, stride in pairs])

    given, out = inputs(conv, torch.float32, device, rows), output(conv, torch.float32, device, rows)
    x, out = oddly_strided(given.x), oddly_strided(out)
    check(conv, given._replace(x=x, w=oddly_strided(given.w)), out, running=running_statistics(conv, device))


@pytest.fixture
def small_grid(monkeypatch, replanned):
    """Gives each program several tiles, and each merge few partial results, as for large tensors."""
    from fusedseg.kernels import conv, norm_stats

    monkeypatch.setattr(conv, "multiprocessors", lambda device: 8)
    monkeypatch.setattr(conv, "PROGRAMS_PER_SM", 1)
    monkeypatch.setattr(norm_stats, "MAX_PARTIALS", 1)
    monkeypatch.setattr(norm_stats, "MAX_SPLITS", 2)


# 13 tiles of 64 positions, the last one incomplete, in 7 splits; three launches merge them to 4, 2 and 1.
SPLIT = Conv((2, 3, 43, 9), (5, 3, 1, 1))


@pytest.mark.usefixtures("small_grid")
@pytest.mark.parametrize(("rows_in", "rows_out"), FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_several_tiles_a_split_and_several_merges(dtype, rows_in, rows_out, device):
    from fusedseg.kernels.conv import conv_blocks

    blocks = conv_blocks(2 * 43 * 9, SPLIT.w, 1, dtype, True, device)
    assert (blocks.splits, blocks.tiles_per_split, blocks.meta["BLOCK_M"]) == (7, 2, 64)
    given, out = inputs(SPLIT, dtype, device, rows_in), output(SPLIT, dtype, device, rows_out)
    check(SPLIT, given, out, running=running_statistics(SPLIT, device))


@pytest.mark.usefixtures("small_grid")
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@by_layout
def test_the_order_of_programs_does_not_matter(rows, training, device):
    """The bits are the same in any order: programs of a launch are independent, and results merge in a fixed order."""
    conv = SPLIT._replace(w=(40, 3, 3, 1), padding=(1, 0))
    given = inputs(conv, torch.float32, device, rows)
    found = []
    for order in (contextlib.nullcontext(), reordered(device)):
        out, running = output(conv, torch.float32, device, rows), running_statistics(conv, device)
        with order:
            mean, rstd, _ = launch(conv, given, out, training=training, running=running)
        found.append((out, mean, rstd, *running))
    assert all(map(torch.equal, *found))


def partial_statistics(x, w, out):
    """Computes count, mean and M2 of all stored values from the partial results of the convolution."""
    from fusedseg.kernels.conv_abn import launch_conv

    with checked(x.device):
        partial = launch_conv(x, w, out, layout_of(x), layout_of(out), ((1, 1), (0, 0), (1, 1), 1), "stats", False)
    n, mean, m2 = partial.double()
    total = (n * mean).sum(0) / n.sum(0)
    return n.sum(0), total, (m2 + n * (mean - total).square()).sum(0)


# Two adjacent fp16 or bf16 values, and how often the upper one occurs, so that the variance is 0.01.
AROUND_300 = {torch.float16: (300.25, 0.2), torch.bfloat16: (302.0, 0.0025)}


@pytest.mark.usefixtures("small_grid")
@by_layout
@pytest.mark.parametrize("dtype", AROUND_300, ids=str)
def test_mean_300_and_variance_a_hundredth(dtype, rows, device):
    """In fp32, E[y^2] - E[y]^2 gives 0 or less here; subtracting a rounded mean can give that too."""
    upper, share = AROUND_300[dtype]
    conv = Conv((2, 16, 40, 40), (16, 16, 1, 1))
    x = torch.where(torch.rand(conv.x) < share, upper, 300.0).to(device, dtype)
    if rows:
        x = channels_last(x)
    w, out = torch.eye(16, device=device, dtype=dtype).view(conv.w), output(conv, dtype, device, rows)
    n, mean, m2 = partial_statistics(x, w, out)
    assert torch.equal(out, x)
    stored = out.double()
    axes = (0, 2, 3)
    assert n.tolist() == [2 * 40 * 40] * 16
    assert relative_error(mean, stored.mean(axes)) <= 1e-6
    assert ((m2 / n) / stored.var(axes, correction=0) - 1).abs().max() <= 1e-3
    # The result after the merging launches must agree as well.
    given = Inputs(x, w, None, None, None)
    _, rstd, _ = launch(conv, given, out)
    assert (rstd.double() ** -2 / (stored.var(axes, correction=0) + EPS) - 1).abs().max() <= 1e-3


def test_statistics_are_of_what_was_stored(device):
    """Sums between 299.5 and 300.5 are all stored as 300 in bf16, so their variance is 0; the accumulator's was not."""
    conv = Conv((2, 2, 8, 9), (2, 2, 1, 1))
    x = torch.rand(conv.x, device=device).bfloat16()
    x[:, 0] = 300
    w = torch.tensor([[1, 0.5], [1, -0.5]], device=device, dtype=torch.bfloat16).view(conv.w)
    n, mean, m2 = partial_statistics(channels_last(x), w, output(conv, torch.bfloat16, device))
    assert n.tolist() == [2 * 8 * 9] * 2
    assert mean.tolist() == [300, 300]
    assert m2.tolist() == [0, 0]
