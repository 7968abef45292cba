"""``profile`` of shapes gives the figures of real tensors without allocating them."""

import itertools
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fusedseg.memory import compare, plan, profile
from fusedseg.unet import UNet, unet3d_large, unet3d_small
from tests.resnet import ResNet18

MEBIBYTE = 2**20
VOLUME = (2, 1, 320, 150, 26)


def kept_by_shape(report):
    """Kept bytes by shape, without vectors.

    BatchNorm on a CPU keeps the statistics of a half-precision tensor in fp32; with fake tensors it does not.
    """
    return Counter((s.shape, s.dtype, s.nbytes) for s in report.saved_storages if len(s.shape) > 1)


MODELS = {
    "resnet": (partial(ResNet18, 10, 8), (2, 3, 64, 64)),
    "unet": (partial(UNet, 3, 4, widths=(8, 16, 32), plain=True), (2, 3, 48, 40)),
    "ours": (partial(UNet, 3, 4, widths=(8, 16, 32)), (2, 3, 48, 40)),
    "3D": (partial(UNet, 1, 4, dims=3, widths=(4, 8, 16), plain=True), (1, 1, 16, 16, 12)),
}
AUTOCAST = {"fp32": None, "autocast": torch.bfloat16}
# The default run has each model and each dtype, and the slow run has every pair.
PAIRS = [("resnet", "fp32"), ("unet", "autocast"), ("ours", "autocast"), ("3D", "fp32")]


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        pytest.param(*pair, marks=[] if pair in PAIRS else [pytest.mark.slow])
        for pair in itertools.product(MODELS, AUTOCAST)
    ],
)
def test_fake_and_real_agree(model, dtype):
    """Saved bytes agree exactly and the peak within 3 %, because our ops work in pieces on real tensors."""
    (build, shape), autocast = MODELS[model], AUTOCAST[dtype]
    optimizer = torch.optim.AdamW
    real = profile(build(), torch.randn(shape), optimizer=optimizer, autocast=autocast)
    fake = profile(build, shape, optimizer=optimizer, autocast=autocast)
    assert kept_by_shape(fake) == kept_by_shape(real)
    if autocast is None:
        assert fake.saved == real.saved
    assert fake.peak == pytest.approx(real.peak, rel=0.03)
    assert fake.resident == real.resident
    assert [(row.name, row.hook_type) for row in fake.rows] == [(row.name, row.hook_type) for row in real.rows]
    assert (fake.device, real.device) == ("fake", "cpu")


def test_3d_unets_in_half_precision_and_why_the_small_one_keeps_more():
    large = profile(partial(unet3d_large, plain=True), VOLUME, dtype=torch.float16, label="large")
    small = profile(partial(unet3d_small, plain=True), VOLUME, dtype=torch.float16, label="small")
    assert large.saved / MEBIBYTE == pytest.approx(4081, rel=0.01)
    assert small.saved / MEBIBYTE == pytest.approx(4620, rel=0.01)
    text = " ".join(str(compare(large, small)).split())
    assert "small keeps 539.4 MiB more than large, with 64 % fewer parameters" in text
    # A joined map of 192 channels at full size takes the place of one of 128 channels.
    assert "320×150×26" in text
    assert "concatenation" in text
    # The summary of one model names the largest shape too.
    assert "320×150×26 are 73% of what is kept; the parameters weigh 27.6 MiB" in small.summary()


def test_a_module_is_copied_without_its_values():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    net[1].register_buffer("shared", net[1].running_mean)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    report = profile(net, (1, 3, 16, 16), dtype=torch.float16)
    assert report.saved_by("dtype")["float16"] > 0
    assert report.parameters == sum(p.numel() for p in net.parameters())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(p.dtype == torch.float32 and type(p) is nn.Parameter for p in net.parameters())


class Bare:
    def __init__(self):
        self.inside = torch.full((4, 1, 1), 2.0)


class PlainTensors(nn.Module):
    """Tensors that are neither parameters nor buffers, in the places where modules hold them."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.plain = torch.ones(4, 1, 1)
        self.nested = {"a": [torch.zeros(4, 1, 1)], "b": Bare()}
        self.unregistered = [nn.Parameter(torch.ones(4, 1, 1))]
        self.trained = torch.ones(4, 1, 1, requires_grad=True)

    def forward(self, x):
        x = self.conv(x) * self.plain + self.nested["a"][0] + self.nested["b"].inside
        return x * self.unregistered[0] * self.trained


def test_tensors_in_attributes():
    """Their values are neither copied nor lost."""
    real, net = profile(PlainTensors(), torch.randn(1, 3, 32, 32)), PlainTensors()
    for model in (net, PlainTensors):
        fake = profile(model, (1, 3, 32, 32))
        assert (fake.saved, fake.peak, fake.resident) == (real.saved, real.peak, real.resident)
    assert torch.equal(net.nested["b"].inside, torch.full((4, 1, 1), 2.0))
    assert len(plan(net, (3, 32, 32), 2**24).options) > 0


def test_shared_parameters_stay_shared():
    first = nn.Linear(8, 8)
    second = nn.Linear(8, 8)
    second.weight = first.weight
    report = profile(nn.Sequential(first, second), (4, 8))
    assert report.resident_by_kind()["parameters"] == (8 * 8 + 8 + 8) * 4


def test_a_model_far_larger_than_the_machine():
    def huge():
        return nn.Sequential(*(nn.Conv2d(4096, 4096, 3, padding=1, bias=False) for _ in range(40)))

    report = profile(huge, (64, 4096, 128, 128))
    assert report.resident_by_kind()["parameters"] == 40 * 4096 * 4096 * 9 * 4
    assert report.saved == 40 * 64 * 4096 * 128 * 128 * 4


def test_a_constructor_that_reads_values():
    def build():
        rates = [rate.item() for rate in torch.linspace(0, 0.5, 3)]
        return nn.Sequential(*(nn.Dropout(rate) for rate in rates), nn.Linear(4, 4))

    assert profile(build, (2, 4)).saved > 0


def test_a_forward_that_reads_values_is_told_so():
    class Reads(nn.Module):
        def forward(self, x):
            return x * int(x.sum().item())

    with pytest.raises(RuntimeError, match=r"Reads asks for the value of a tensor .* pass real tensors"):
        profile(Reads, (2, 4))


def test_targets_and_inputs_may_be_tensors():
    net = partial(UNet, 3, 4, widths=(4, 8))
    images, classes = torch.randn(1, 3, 16, 16), torch.randint(4, (1, 16, 16))
    report = profile(net, images.to("meta"), loss=F.cross_entropy, targets=classes)
    assert report.resident_by_kind()["inputs"] == images.nbytes + classes.nbytes
    assert report.saved == profile(net, (1, 3, 16, 16)).saved


def test_it_says_what_it_cannot_know():
    assert "workspaces and the allocator's rounding are not in here" in str(profile(nn.ReLU(), (2, 4)))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: profile("resnet", (2, 4)),
            TypeError,
            "model must be a module or a function that builds one, got str",
        ),
        (
            lambda: profile(lambda: 3, (2, 4)),
            TypeError,
            "model must be a module or build one, and built an object of class int",
        ),
        (lambda: profile(nn.ReLU(), (2, -4)), TypeError, r"a shape must be a sequence of integers, got \(2, -4\)"),
        (lambda: profile(nn.ReLU(), torch.ones(2), dtype=torch.float16), ValueError, "dtype belongs to shapes"),
    ],
    ids=["model", "builder", "negative", "dtype"],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
