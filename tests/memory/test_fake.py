"""Models, inputs and steps without values: they have the sizes of real ones."""

from functools import partial

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import fusedseg
from fusedseg.memory import measure
from fusedseg.memory.fake import bytes_before, eager_step, fake_inputs, fake_mode, fake_model
from fusedseg.ops.norm import aten_norms
from fusedseg.unet import UNet
from tests.resnet import ResNet18

MODELS = {
    "resnet": (partial(ResNet18, 10, 8), (2, 3, 64, 64)),
    "unet": (partial(UNet, 3, 4, widths=(8, 16, 32), plain=True), (2, 3, 48, 40)),
    "ours": (partial(UNet, 3, 4, widths=(8, 16, 32)), (2, 3, 48, 40)),
    "3D": (partial(UNet, 1, 4, dims=3, widths=(4, 8, 16), plain=True), (1, 1, 16, 16, 12)),
}


def step_of(model, *shapes, dtype=torch.float32, **options):
    with fake_mode():
        return eager_step(fake_model(model, dtype), fake_inputs(shapes, dtype), **options)


@pytest.mark.parametrize(("model", "autocast"), [("resnet", False), ("unet", True), ("ours", True), ("3D", False)])
def test_fake_and_real_agree(model, autocast, monkeypatch):
    """Kept bytes agree, and the peak within 3 %, because our ops work in pieces on real tensors.

    On a CPU a piece of a norm's backward is larger than the tensors of these networks, so smaller ones take its place.
    BatchNorm on a CPU keeps the statistics of a half-precision tensor in fp32; with fake tensors it does not.
    """
    monkeypatch.setattr(aten_norms, "_plane_tiles", lambda x, norm: None)
    build, shape = MODELS[model]
    net, x = build(), torch.randn(shape)
    half = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
    real = measure(half(net.forward), x, owned=[x, *net.parameters(), *net.buffers()])
    fake = step_of(build, shape, autocast=torch.bfloat16 if autocast else None)
    assert fake.saved == pytest.approx(real.saved, rel=0.01 if autocast else 0)
    assert fake.peak == pytest.approx(real.peak, rel=0.03)


@pytest.mark.parametrize(
    ("dtype", "of"), [(torch.float16, "channels_last"), (torch.float32, "channels_last"), (torch.float64, "contiguous")]
)
@pytest.mark.parametrize("laid_out", ["image", "weight"])
def test_convolutions_return_the_memory_format_of_a_gpu(dtype, of, laid_out):
    """They returned that of this CPU, which depends on its instructions and on the number of threads."""
    image, weight = (2, 4, 6, 6, 6), (8, 4, 3, 3, 3)
    with fake_mode():
        x, w = (torch.empty(shape, dtype=dtype, requires_grad=True) for shape in (image, weight))
        if laid_out == "image":
            x = x.to(memory_format=torch.channels_last_3d)
        else:
            w = w.to(memory_format=torch.channels_last_3d)
        y = F.conv3d(x, w)
        gradients = torch.autograd.grad(y, (x, w), torch.empty_like(y))
    formats = {"channels_last": torch.channels_last_3d, "contiguous": torch.contiguous_format}
    assert all(t.is_contiguous(memory_format=formats[of]) for t in (y, *gradients))


def test_convolutions_keep_their_memory_format_outside():
    of_this_cpu, remembered = torch._C._conv_determine_backend_memory_format, FakeTensorMode.cache
    with pytest.raises(ValueError, match="stop"), fake_mode(), fake_mode():
        raise ValueError("stop")
    assert torch._C._conv_determine_backend_memory_format is of_this_cpu
    assert FakeTensorMode.cache is remembered


def test_what_is_there_before_a_step():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    weights = sum(parameter.nbytes for parameter in net.parameters())
    with fake_mode():
        inputs = fake_inputs([(2, 3, 16, 16)], torch.float32)
        found = bytes_before(fake_model(net, torch.float32), inputs, optimizer=torch.optim.AdamW)
    # AdamW counts the steps of each parameter.
    assert found == {
        "parameters": weights, "buffers": 2 * 32 + 8, "optimizer state": 2 * weights + 4 * 4,
        "inputs": 2 * 3 * 16 * 16 * 4,
    }  # fmt: skip


def test_a_second_step_needs_what_the_first_one_needs():
    """Gradients of the first step were there before the second one, so its peak was lower."""
    net = nn.Linear(256, 256)
    with fake_mode():
        fake, inputs = fake_model(net, torch.float32), fake_inputs([(2, 256)], torch.float32)
        assert eager_step(fake, inputs) == eager_step(fake, inputs)


def test_a_loss():
    classes = torch.empty(1, 16, 16, dtype=torch.int64, device="meta")
    with fake_mode():
        net = fake_model(partial(UNet, 3, 4, widths=(4, 8)), torch.float32)
        x, y = fake_inputs([(1, 3, 16, 16), classes], torch.float32)
        with_loss = eager_step(net, [x], loss=lambda out: F.cross_entropy(out, y))
        alone = eager_step(net, [x])
    assert with_loss.saved == alone.saved


def test_a_model_without_inputs_gets_none():
    """It was called with a tensor without dimensions."""
    with fake_mode():
        assert fake_inputs((), torch.float32) == []


def test_a_module_is_copied_without_its_values():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    net[1].register_buffer("shared", net[1].running_mean)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    step_of(net, (1, 3, 16, 16), dtype=torch.float16)
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
    x, net = torch.randn(1, 3, 32, 32), PlainTensors()
    real = measure(PlainTensors(), x, owned=[x])
    for model in (net, PlainTensors):
        assert step_of(model, (1, 3, 32, 32)).saved == real.saved
    assert torch.equal(net.nested["b"].inside, torch.full((4, 1, 1), 2.0))


def test_shared_parameters_stay_shared():
    first = nn.Linear(8, 8)
    second = nn.Linear(8, 8)
    second.weight = first.weight
    with fake_mode():
        net = fake_model(nn.Sequential(first, second), torch.float32)
        assert bytes_before(net, [])["parameters"] == (8 * 8 + 8 + 8) * 4


def test_a_model_far_larger_than_the_machine():
    def huge():
        return nn.Sequential(*(nn.Conv2d(4096, 4096, 3, padding=1, bias=False) for _ in range(40)))

    with fake_mode():
        net, inputs = fake_model(huge, torch.float32), fake_inputs([(64, 4096, 128, 128)], torch.float32)
        assert bytes_before(net, inputs)["parameters"] == 40 * 4096 * 4096 * 9 * 4
        found = eager_step(net, inputs)
    # The first convolution keeps the input, which is there anyway.
    assert found.saved == 39 * 64 * 4096 * 128 * 128 * 4


def test_a_constructor_that_reads_values():
    def build():
        rates = [rate.item() for rate in torch.linspace(0, 0.5, 3)]
        return nn.Sequential(*(nn.Dropout(rate) for rate in rates), nn.Linear(4, 4))

    assert step_of(build, (2, 4)).saved > 0


def test_a_forward_that_reads_values_is_told_so():
    class Reads(nn.Module):
        def forward(self, x):
            return x * int(x.sum().item())

    with pytest.raises(RuntimeError, match=r"Reads asks for the value of a tensor"):
        step_of(Reads, (2, 4))


def test_profile_in_anomaly_mode():
    """It raised an error, because the mode looked for NaN in tensors without values."""
    with torch.autograd.set_detect_anomaly(True):
        found = fusedseg.profile(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), (2, 3, 8, 8), convert=None)
    assert found.ways
