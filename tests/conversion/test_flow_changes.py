"""The flow of a model changes after it was converted: what stays right, and what the report says about it."""

import copy
import json
import logging

import pytest
import torch
from torch import nn

import fusedseg
from fusedseg.__main__ import main
from fusedseg.conversion.verify import verify
from tests.conversion import networks
from tests.conversion.compare import assert_same, converted, replaced
from tests.conversion.networks import LEAKY, Flagged

pytestmark = pytest.mark.usefixtures("uncounted")


def error_once_the_flag_is_set(model: nn.Module, image: torch.Tensor, **options) -> float:
    stock = copy.deepcopy(model)
    fusedseg.convert(model, example_inputs=image, **options)
    assert_same(model, stock, image)
    for net in (model, stock):
        net.flag = True
    return (model(image) - stock(image)).abs().max().item()


def test_in_place_a_flag_makes_the_output_wrong_and_the_report_says_what_must_stay(image):
    model = Flagged().double()
    assert error_once_the_flag_is_set(model, image) > 0.1
    model.flag = False
    report = fusedseg.convert(model, example_inputs=image)
    assert "\nIf the flow changes later, by a flag for example\n  In place (1): only the norm may read" in str(report)


def test_exact_modules_are_right_whoever_reads_the_convolution(image):
    model = Flagged().double()
    stock = copy.deepcopy(model)
    report = fusedseg.convert(model, inplace=False, example_inputs=image)
    assert replaced(report) == {"bn": "BatchNormAct(leaky_relu(0.1))"}
    text = str(report)
    assert "\n  Exact (1): only the activation may read the norm's output; any other change is safe" in text
    assert "In place" not in text
    for flag in (False, True):
        for net in (model, stock):
            net.flag = flag
        for training in (True, False):
            assert_same(model, stock, image, training=training)


def test_what_must_stay_in_exact_modules_too(image):
    """The limit that the docstring and the report state: a fused norm returns the activated tensor."""

    class ReadsTheNorm(Flagged):
        def forward(self, x):
            y = self.bn(self.conv(x))
            return y if self.flag else self.act(y)

    assert error_once_the_flag_is_set(ReadsTheNorm().double(), image, inplace=False) > 0.1


def test_the_compiler_backend_follows_a_flag(image):
    """The way that the report names."""
    model = Flagged().double()
    compiled = torch.compile(model, backend="fusedseg", options={"codegen": "aten"})
    for model.flag in (False, True):
        assert torch.equal(compiled(image), copy.deepcopy(model)(image))


def test_modules_that_the_model_was_built_with_stay(image):
    def make():
        abn = fusedseg.InPlaceABN(8, activation="identity")
        return nn.Sequential(nn.Conv2d(3, 8, 3), abn, nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), LEAKY())

    model, report = converted(make, image, inplace=False)
    assert replaced(report) == {"3": "BatchNormAct(leaky_relu(0.1))"}
    assert type(model[1]) is fusedseg.InPlaceABN


def test_a_concatenation_and_leaky_mode(image):
    model = networks.UNet().double()
    report = fusedseg.convert(model, example_inputs=image, mode="leaky", slope=0.2, inplace=False)
    assert set(replaced(report).values()) == {"BatchNormAct(leaky_relu(0.2))", "JoinConv2d", "MaxPool2d"}
    assert verify(model, image).largest < 1e-10


@pytest.mark.parametrize(
    ("make", "pooled"),
    [(lambda: networks.UNet(LEAKY), 2 * 8 * 32 * 32 * 4), (networks.NNUNet, 0)],
    ids=["batch norm", "instance norm"],
)
def test_about_as_many_bytes_are_kept(make, pooled, counted):
    """The scope keeps the output of a pool of a rebuilt tensor; statistics are a few vectors for each norm."""
    image = torch.randn(2, 3, 64, 64)
    inplace, exact = (fusedseg.convert(make(), example_inputs=image, inplace=value) for value in (True, False))
    assert inplace.before == exact.before
    assert abs(exact.after.saved - inplace.after.saved - pooled) < 2000
    assert exact.after.saved < 0.62 * exact.before.saved


def test_the_last_conversion_counts(image):
    model = Flagged().double()
    for inplace, to in ((True, "ConvABN2d"), (False, "BatchNormAct"), (True, "ConvABN2d")):
        report = fusedseg.convert(model, example_inputs=image, inplace=inplace)
        assert [row.to.partition("(")[0] for row in report.replaced] == [to]
    assert type(fusedseg.revert(model).conv) is nn.Conv2d


def test_an_option_that_is_no_bool():
    with pytest.raises(TypeError, match=r"fusedseg\.convert: inplace must be True or False, got 'no'"):
        fusedseg.convert(Flagged(), inplace="no")


def test_command(capsys, counted, tmp_path):
    command = ["convert", "tests.conversion.networks:Flagged", "--input", "2,3,8,8"]
    assert main([*command, "--no-inplace"]) == 0
    out = capsys.readouterr().out
    assert "BatchNormAct(leaky_relu(0.1))" in out
    assert "Exact (1)" in out
    assert main([*command, "--json", str(tmp_path / "report.json")]) == 0
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["guarantee"].startswith("In place (1)")


def test_what_fails_on_tensors_without_values_is_not_logged(caplog, counted):
    """PyTorch logged a traceback of dozens of lines for a model that cannot be called with the example's size."""

    class Skip(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.up = nn.Conv2d(3, 3, 2, stride=2), nn.ConvTranspose2d(3, 3, 2, stride=2)

        def forward(self, x):
            return torch.cat([x, self.up(self.down(x))], 1)

    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(caplog.handler)
    try:
        with pytest.raises(ValueError, match="the model cannot be called with the example: RuntimeError: Sizes of"):
            fusedseg.convert(Skip(), example_inputs=torch.randn(1, 3, 33, 33))
    finally:
        logger.removeHandler(caplog.handler)
    assert not caplog.records


def test_a_model_without_fused_norms_promises_nothing(image):
    report = fusedseg.convert(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).double(), example_inputs=image)
    assert report.guarantee == ""
    assert "If the flow changes" not in str(report)
