"""The scope with ``bits`` and a budget: calls of exact values run twice, and the gradient stays right on average."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fusedseg
from fusedseg import recompute
from fusedseg.memory import SavedBytes, measure
from fusedseg.ops.recompute.guide import Observe
from fusedseg.ops.recompute.packed import Rounding
from fusedseg.unet import MultiEncoderUNet
from tests.ops.test_low_bit_scope import IMAGE, NETWORKS, InPlace, gradient, network

pytestmark = pytest.mark.usefixtures("no_choices")


def everything(seed):
    """A scope in which every call runs twice that may."""
    return recompute.guided(Observe, rounding=Rounding(4, seed))


class AfterASum(nn.Module):
    """A norm in place overwrites a sum of rounded tensors, so its result must not be rebuilt from them."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(channels, 8, 3, padding=1) for channels in (3, 8, 8))
        self.norms, self.head = nn.ModuleList(InPlace(8) for _ in range(3)), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        for conv, norm in zip(self.convs, self.norms, strict=True):
            y = conv(x)
            x = norm(y if x.shape[1] == 3 else x + y)
        return self.head(x)


@pytest.mark.parametrize("name", ["BN ReLU", "in place", "residual in place", "sum in place"])
def test_the_gradient_is_right_on_average(name):
    """As the test of this name without a budget; a call of rounded values that ran twice would give a bias."""
    torch.manual_seed(0)
    make = AfterASum if name == "sum in place" else NETWORKS[name]
    model, x, times = make().double(), IMAGE.double(), 32
    out, expected = gradient(model, x)
    found = []
    for seed in range(times):
        with everything(seed):
            rounded_out = model(x)
        assert torch.equal(rounded_out, out)
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        loss = (rounded_out * (weights + rounded_out)).mean()
        found.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]))
    got = torch.stack(found)
    mean, error_squared = got.mean(0), (got - expected).square().sum(1).mean()
    bias_squared = (mean - expected).square().sum() - (got - mean).square().sum() / (times - 1) / times
    assert error_squared > 0
    assert bias_squared / error_squared < 0.05


@pytest.mark.parametrize("fused", [False, True])
def test_a_large_weight_is_not_packed(fused):
    """The weight of the first convolution has 4,800 values; it was packed, so that the second run rounded it."""
    torch.manual_seed(0)
    norm = [fusedseg.BatchNormAct(64, activation="relu")] if fused else [nn.BatchNorm2d(64), nn.ReLU()]
    model = nn.Sequential(nn.Conv2d(3, 64, 5), *norm, nn.Conv2d(64, 2, 1))
    _, expected = gradient(model)
    with everything(0):
        out = model(IMAGE)
    weights = torch.linspace(-1, 1, out.numel()).view_as(out)
    grads = torch.autograd.grad((out * (weights + out)).mean(), list(model.parameters()))
    # Nothing in this network is rounded.
    assert torch.equal(torch.cat([g.flatten() for g in grads]), expected)


def unet():
    torch.manual_seed(0)
    return MultiEncoderUNet((3, 2), 4, widths=(8, 16), plain=True)


IMAGES = torch.randn(2, 3, 32, 32), torch.randn(2, 2, 32, 32)


def test_converted_keeps_what_was_planned():
    """The first convolution of each encoder runs twice, and its output is not kept."""
    packed, both = unet(), unet()
    before = fusedseg.convert(packed, example_inputs=IMAGES, bits=4)
    report = fusedseg.convert(both, example_inputs=IMAGES, bits=4, extra_flops=0.2)
    assert [path for path, _ in report.twice.paths] == ["incs.0.0.conv", "incs.1.0.conv"]
    # Two outputs of 2 x 8 planes of 1,024 values in 4 bits, with two fp32 numbers for each 256 of them.
    saved = 2 * (2 * 8 * 1024 // 2 + 2 * 8 * 4 * 8)
    # Beside a packed tensor lies the kink of each channel.
    assert before.after.saved - report.after.saved == pytest.approx(saved, abs=2 * 8 * 4)
    assert report.twice.choice.kept == pytest.approx(report.after.saved, abs=2 * 8 * 4)
    owned = [*both.parameters(), *both.buffers()]
    assert measure(both, *IMAGES, owned=owned).saved == report.after.saved
    assert '"bits": 4' in report.to_json()
    text = str(report)
    assert "run twice" in text
    assert "kept in 4 bits" in text


def test_convolutions_with_their_norm_run_once():
    """When they ran twice, the network kept more than without a budget."""
    kept = []
    for options in ({}, {"extra_flops": 1.0}):
        torch.manual_seed(0)
        net = MultiEncoderUNet((3, 2), 4, widths=(8, 16))
        kept.append(fusedseg.convert(net, example_inputs=IMAGES, bits=4, **options).after.saved)
    assert kept[0] == kept[1]


def test_a_budget_that_is_met_and_one_that_is_not():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = fusedseg.convert(unet(), example_inputs=IMAGES, bits=4, budget=0.12)
    assert report.after.saved <= 0.12 * report.before.saved
    with pytest.warns(UserWarning, match="cannot be reached"):
        fusedseg.convert(unet(), example_inputs=IMAGES, bits=4, budget=0.01)


@pytest.mark.filterwarnings("ignore:fusedseg.recompute")
def test_a_bare_scope_learns_for_its_bits():
    """A choice that was made with other bits is not followed."""
    model, found = network(), []
    for options in ({"bits": 4}, {}, {"bits": 4}, {"bits": 4, "unrounded": [model]}):
        with SavedBytes([*model.parameters()]) as saved, recompute(0.01, **options):
            out = model(IMAGE)
        found.append(saved.nbytes)
        del out
    first, exact, second, unrounded = found
    # The output of the first convolution has 16,384 values.
    assert first - second == pytest.approx(16384 // 2 + 64 * 8, abs=100)
    assert exact > second
    assert unrounded > second


def test_gradients_with_a_planned_choice():
    model = network()
    _, expected = gradient(model)
    converted = copy.deepcopy(model)
    fusedseg.convert(converted, example_inputs=IMAGE, bits=8, extra_flops=1.0)
    _, got = gradient(converted)
    assert 0 < (got - expected).norm() / expected.norm() < 0.01


def test_under_autocast():
    model = network()
    found = []
    for options in ({}, {"bits": 8, "extra_flops": 1.0}, {"bits": 8, "extra_flops": 1.0}):
        with torch.autocast("cpu", torch.bfloat16), recompute(**options):
            loss = F.avg_pool2d(model(IMAGE), 2).float().square().mean()
        found.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]))
    for got in found[1:]:
        assert 0 < (got - found[0]).norm() / found[0].norm() < 0.02
