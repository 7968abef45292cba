"""``ConversionReport``, ``verify`` and ``python -m fusedseg convert``."""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fusedseg
from fusedseg.__main__ import main
from fusedseg.conversion.verify import Difference, Verification, _largest
from fusedseg.memory.fake import fake_mode
from fusedseg.memory.meter import measure
from tests.conversion import networks


@pytest.fixture
def image():
    return torch.randn(3, 3, 32, 32)


@pytest.mark.parametrize("shape", [(2, 2, 256, 256), (1, 2, 32, 96, 96)], ids=["whole", "in parts"])
@pytest.mark.parametrize("norm", ["GroupNorm", "BatchNorm", "InstanceNorm"])
def test_the_peak_counts_what_a_large_norm_in_place_needs(norm, shape):
    """Tensors without values knew nothing of the parts of a GroupNorm (56 MiB for 72).

    In backward of the other norms they counted a gradient that aten does not allocate (56 MiB for 48).
    """
    d = len(shape) - 2
    made = nn.GroupNorm(4, 16) if norm == "GroupNorm" else getattr(nn, f"{norm}{d}d")(16, affine=True)
    conv = getattr(nn, f"Conv{d}d")
    model = nn.Sequential(conv(2, 16, 1), made, nn.LeakyReLU(), conv(16, 2, 1))
    image = torch.randn(shape)
    report = fusedseg.convert(model, example_inputs=image)
    measure(model, image)
    assert report.after.peak == pytest.approx(measure(model, image).peak, rel=0.001)


def test_the_table_tells_everything(image):
    text = str(fusedseg.convert(networks.ResNet(), example_inputs=image))
    for words in ("modules (6)", "instead of kept (9)", "  bn1, relu ", "BatchNorm2d + ReLU", "BatchNormAct(relu)",
                  "  layers.0.bn2 ", "followed by add_()", "after add_()", "\n  kept for backward ",
                  "\n  at the peak "):  # fmt: skip
        assert words in text


def test_bytes_are_those_of_a_real_step(image):
    model = networks.UNet()
    real = measure(model, image)
    report = fusedseg.convert(model, example_inputs=image)
    assert report.before.saved == real.saved
    assert report.before.peak == pytest.approx(real.peak, rel=0.01)
    real = measure(model, image)
    assert report.after.saved == real.saved
    assert report.after.peak == pytest.approx(real.peak, rel=0.01)


def test_the_peak_is_that_of_the_device_of_the_model():
    """On a CPU, backward of the last convolution holds its rebuilt input; on a GPU it needs the input's shape alone."""

    def make():
        return nn.Sequential(nn.Conv2d(4, 8, 1), nn.Upsample(scale_factor=2), nn.Conv2d(8, 2, 3, padding=1))

    model, image = make(), torch.randn(1, 4, 256, 256)
    report = fusedseg.convert(model, example_inputs=image)
    assert report.after.peak == measure(model, image).peak
    with fake_mode():
        on_gpu = fusedseg.convert(make(), example_inputs=torch.empty(1, 4, 256, 256))
    assert on_gpu.after.saved == report.after.saved
    assert on_gpu.after.peak <= report.after.peak - 7 * 2**20


def test_bytes_saved_by_a_row(image):
    """A norm saves one activation tensor, and a pool seven bytes for each element of its output.

    The row of a concatenation says how much its convolution saves.
    """
    report = fusedseg.convert(networks.UNet(), example_inputs=image)
    full = 3 * 8 * 32 * 32
    assert [row.nbytes for row in report.replaced] == [
        4 * full, 4 * full, 7 * full // 4, 2 * full, 2 * full, None, 4 * full, 4 * full,
    ]  # fmt: skip


def test_json(image):
    report = fusedseg.convert(networks.UNet(), example_inputs=image)
    data = json.loads(report.to_json())
    assert data["model"] == "UNet"
    assert data["mode"] == "exact"
    assert len(data["replaced"]) == 8
    assert data["replaced"][0]["paths"] == ["inc.0.1", "inc.0.2"]
    assert data["before"] == {"saved": report.before.saved, "held": report.before.held, "peak": report.before.peak}
    assert json.loads(fusedseg.convert(networks.UNet()).to_json())["after"] is None


@pytest.mark.parametrize("act", [nn.ReLU, nn.LeakyReLU])
def test_verify_finds_equal_what_is(image, act):
    model = networks.UNet(act).double()
    image = image.double()
    report = fusedseg.convert(model, example_inputs=image)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    for training in (True, False, None):
        found = report.verify(image, training=training)
        assert found.largest < 1e-10
        if found.largest == 0:
            assert str(found).endswith(": none, outputs, gradients and buffers are identical to the last bit")
        else:
            title, *lines = str(found).splitlines()
            assert title == "largest relative difference to the stock model (one rounding is 2.2e-16)"
            assert [line.split()[0] for line in lines] == ["outputs", "gradients", "buffers"]
    # The comparison ran on copies.
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_verify_finds_what_is_wrong(image):
    model = networks.UNet(nn.LeakyReLU)
    report = fusedseg.convert(model, example_inputs=image)
    norm = model.dec[1][1]
    # This changes the fused module alone, and not the module that revert() restores.
    norm._act = norm._act._replace(param=0.5)
    found = report.verify(image)
    assert found.value.size > 1e-3
    assert found.gradient.size > 1e-3
    assert found.largest == max(found.value.size, found.gradient.size)
    with torch.no_grad():
        model.inc[0][0].weight.fill_(float("nan"))
    assert not report.verify(image).largest <= 1.0


def test_verify_says_what_is_identical(image):
    """A difference of zero was printed as "none" once."""
    same = Difference(0.0, "")
    assert str(same) == "identical to the last bit"
    found = Verification(Difference(3e-7, "output 0"), same, same, 1.2e-7)
    assert str(found).splitlines() == [
        "largest relative difference to the stock model (one rounding is 1.2e-07)",
        "  outputs    3e-07 (output 0)",
        "  gradients  identical to the last bit",
        "  buffers    identical to the last bit",
    ]


def test_verify_compares_noise_with_the_largest_gradient(image):
    """The gradient of a bias before a BatchNorm consists of rounding errors, which cannot agree."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.LeakyReLU(0.1), nn.Conv2d(16, 4, 1))
    found = fusedseg.convert(model, example_inputs=image).verify(image)
    assert found.gradient.size < 2e-5
    assert found.rounding == torch.finfo(torch.float32).eps


def test_a_small_gradient_that_is_wrong_is_found(image):
    """Its difference is divided by the largest gradient's norm, and is still found."""
    ours = {"large": torch.ones(4), "small": torch.full((4,), 2e-4)}
    found = _largest(ours, {"large": torch.ones(4), "small": torch.full((4,), 1e-4)}, small=1e-3)
    assert found.where == "small"
    assert found.size == pytest.approx(1e-4)


class Joins(nn.Module):
    """Three concatenations that convolutions read, and one that the model returns."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(6 if i == 0 else 11, 8, 3, padding=1) for i in range(3))

    def forward(self, x):
        y = x
        for conv in self.convs:
            y = conv(torch.cat([x, F.silu(y)], 1))
        return torch.cat([torch.sigmoid(y), torch.sigmoid(2 * y)], 1)


def test_calls_of_a_function_are_told_together(image):
    """The report once gave the bytes of the first of three concatenations, and listed the returned one as kept."""
    report = fusedseg.convert(Joins(), example_inputs=image)
    assert [row.to for row in report.replaced] == ["JoinConv2d"] * 3
    full = 3 * 32 * 32 * 4
    joined = "formed for the convolution that reads it, which keeps its parts"
    assert [row[1:] for row in report.recomputed] == [
        ("silu(), 3 calls", "", "after an input and Conv2d", (3 + 8 + 8) * full),
        ("cat(), 3 calls", "", joined, (6 + 11 + 11) * full),
        ("sigmoid(), 2 calls", "", "after Conv2d and mul()", 2 * 8 * full),
    ]


def test_a_peak_that_stays_is_explained(image):
    conv = lambda cin, cout: nn.Conv2d(cin, cout, 3, padding=1)  # noqa: E731
    act = nn.LeakyReLU(0.1)
    model = nn.Sequential(conv(3, 64), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(2), conv(64, 64), act)
    report = fusedseg.convert(model, example_inputs=image)
    assert report.after.saved < 0.9 * report.before.saved
    assert report.after.peak > 0.97 * report.before.peak
    assert "The peak of a model of few layers is the backward of its largest layer" in str(report)
    assert "The peak of" not in str(fusedseg.convert(networks.UNet(), example_inputs=image))


def test_verify_takes_dropout_as_it_falls(image):
    model = nn.Sequential(networks.double_conv(3, 8), nn.Dropout(0.5), networks.double_conv(8, 8))
    report = fusedseg.convert(model.double(), example_inputs=image.double())
    assert report.verify(image.double()).largest < 1e-10


@pytest.mark.parametrize(
    "arguments", [[], ["--mode", "leaky", "--slope", "0.2"], ["--dtype", "bf16"], ["--verify"]], ids=str
)
def test_command(capsys, arguments):
    assert main(["convert", "tests.conversion.networks:UNet", "--input", "2,3,32,32", *arguments]) == 0
    out = capsys.readouterr().out
    leaky = "leaky" in arguments
    assert f"Replaced by fused modules ({7 if leaky else 8})" in out
    assert "A training step on the example" in out
    assert ("ConvABN2d(leaky_relu(0.2))" in out) == leaky
    assert ("largest relative difference" in out) == ("--verify" in arguments)


def test_command_writes_json(capsys, tmp_path):
    """``--json`` printed JSON here, and named a file in every other command."""
    path = tmp_path / "report.json"
    argv = ["convert", "tests.conversion.networks:UNet", "--input", "2,3,8,8", "--json", str(path)]
    assert main(argv) == 0
    assert json.loads(path.read_text())["model"] == "UNet"
    assert capsys.readouterr().out.endswith(f"wrote {path}\n")
    assert main(argv) == 2
    assert "report.json exists: choose another path, or pass --overwrite" in capsys.readouterr().err
