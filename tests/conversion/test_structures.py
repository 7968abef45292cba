"""The structures of published libraries: the class that each module becomes, and that the function stays."""

import operator
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fusedseg
from fusedseg.unet import UNet
from tests.conversion import networks
from tests.conversion.compare import converted, reasons, replaced

pytestmark = pytest.mark.usefixtures("uncounted")


def test_unet(image):
    _, report = converted(networks.UNet, image)
    relu = "BatchNormAct(relu)"
    assert list(replaced(report).values()) == [relu] * 2 + ["MaxPool2d"] + [relu] * 2 + ["JoinConv2d"] + [relu] * 2
    assert [row.what for row in report.recomputed] == ["Upsample", "pad()", "cat()"]
    assert not report.skipped


def test_an_activation_that_can_be_inverted_is_written_over_the_convolution(image):
    model, report = converted(lambda: networks.UNet(lambda: nn.LeakyReLU(0.2)), image)
    assert [(row.what, row.to) for row in report.replaced if row.paths != ("pool",)] == [
        ("cat() + " * joined + "Conv2d + BatchNorm2d + LeakyReLU", "ConvABN2d(leaky_relu(0.2))")
        for joined in (0, 0, 0, 0, 1, 0)
    ]
    assert report.replaced[0].paths == ("inc.0.0", "inc.0.1", "inc.0.2")
    assert isinstance(model.inc[0][1], fusedseg.InPlaceABN)


def test_blocks_of_fusedseg_are_seen_through(image):
    _, report = converted(lambda: UNet(3, 4, widths=(4, 8), plain=True), image)
    two = ["ConvABN2d(leaky_relu(0.01))"] * 2
    # The joined convolution reads an enlarged tensor.
    assert list(replaced(report).values()) == [*two, "MaxPool2d", *two, "JoinConv2d", *two]
    assert not report.skipped


# ``tests/test_activation.py`` converts every row of the table of activations.
@pytest.mark.parametrize(
    ("act", "to"),
    [
        (nn.LeakyReLU(0.0), "BatchNormAct(leaky_relu(0.0))"),
        (nn.LeakyReLU(-0.5), "BatchNormAct(leaky_relu(-0.5))"),
        (nn.GELU(), "BatchNormAct(gelu(none))"),
        (nn.GELU("tanh"), "BatchNormAct(gelu(tanh))"),
    ],
    ids=str,
)
def test_activations(image, act, to):
    _, report = converted(lambda: networks.double_conv(3, 8, act), image)
    assert [row.to for row in report.replaced] == [to]


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (nn.PReLU(8), "followed by PReLU, whose slope is learned: a fused module would keep as much as the scope does"),
        (nn.LeakyReLU(True), "the slope of its activation is True, which is not a finite number"),
    ],
    ids=["prelu", "slope True"],
)
def test_activations_that_are_left(image, act, why):
    _, report = converted(lambda: networks.double_conv(3, 8, act), image)
    assert replaced(report) == {}
    assert reasons(report)["1"] == why


# How a network is built, the modules that are replaced, and the reasons for those that are not.
STRUCTURES = {
    "dropout of nothing before the activation": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), networks.ADN(8)),
        {"1.N": "InPlaceInstanceNormAct(leaky_relu(0.1))"}, {},
    ),
    "dropout before the activation": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), networks.ADN(8, 0.5)), {}, {"1.N": "followed by Dropout"},
    ),
    "identity before the activation": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Identity(), nn.ReLU()),
        {"1": "BatchNormAct(relu)"}, {},
    ),
    "group norm": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.LeakyReLU()),
        {"1": "InPlaceGroupNormAct(leaky_relu(0.01))"}, {},
    ),
    "activation before the norm": (
        lambda: networks.NNUNet(nonlin_first=True), {}, {"encoder.0.norm": "followed by Conv2d"},
    ),
    "activation as a function": (
        networks.Functional, {}, {"bn": "followed by relu(), a function called in the forward code"},
    ),
    "pre-activation": (lambda: networks.PreActivation(nn.ReLU()), {"bn": "BatchNormAct(relu)"}, {}),
    # The residual is the input of the norm, which nothing may overwrite.
    "leaky pre-activation": (
        lambda: networks.PreActivation(nn.LeakyReLU()), {"bn": "BatchNormAct(leaky_relu(0.01))"}, {},
    ),
    "DenseNet": (networks.DenseNet, {f"layers.{i}.0": "BatchNormAct(relu)" for i in range(3)}, {}),
    "output read twice": (networks.Twice, {}, {"bn": "its output is read by ReLU and add()"}),
    "input read twice": (
        lambda: networks.InputTwice(nn.LeakyReLU()), {"bn": "BatchNormAct(leaky_relu(0.01))"}, {},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "to", "why"), STRUCTURES.values(), ids=STRUCTURES)
def test_structures(image, make, to, why):
    _, report = converted(make, image)
    assert replaced(report) == to
    assert reasons(report).items() >= why.items()


def test_resnet(image):
    _, report = converted(networks.ResNet, image)
    assert sum(to == "BatchNormAct(relu)" for to in replaced(report).values()) == 5
    assert sum(why.startswith("followed by add") for why in reasons(report).values()) == 5
    assert replaced(report)["maxpool"] == "MaxPool2d"
    assert not report.skipped


def test_one_activation_for_two_norms_registered_before_them():
    x = torch.randn(2, 4, 5, 6, 7, dtype=torch.float64)
    _, report = converted(lambda: networks.DynUNetBlock(4), x)
    to = "InPlaceInstanceNormAct(leaky_relu(0.01))"
    assert replaced(report) == {"norm1": to, "norm2": to}


def test_norms_of_four_names(image):
    model, report = converted(networks.NNUNet, image)
    encoders, names = ("encoder", "decoder.encoder"), ("norm", "all_modules.1")
    assert [row.paths for row in report.replaced] == [
        (*(f"{encoder}.{i}.{name}" for encoder in encoders for name in names), f"encoder.{i}.nonlin") for i in range(2)
    ]
    block = model.decoder.encoder[0]
    assert block.norm is block.all_modules[1]
    assert isinstance(block.norm, fusedseg.InPlaceInstanceNormAct)
    assert block.norm is model.encoder[0].norm


def test_norm_and_activation_in_one_module(image):
    make = lambda: nn.Sequential(nn.Conv2d(3, 8, 3), networks.BatchNormAct2d(8))  # noqa: E731
    _, report = converted(make, image)
    assert replaced(report) == {}
    assert [row.what for row in report.recomputed] == ["batch_norm()", "ReLU"]
    assert not report.skipped


def test_shared_norm_with_one_activation_is_replaced_once(image):
    norm = nn.BatchNorm2d(8)
    leaky = nn.LeakyReLU
    make = lambda: nn.Sequential(nn.Conv2d(3, 8, 3), norm, leaky(), nn.Conv2d(8, 8, 3), norm, leaky())  # noqa: E731
    _, report = converted(make, image)
    assert [(row.paths, row.to) for row in report.replaced] == [(("1", "4", "2", "5"), "InPlaceABN(leaky_relu(0.01))")]


def test_shared_norm_with_two_activations_is_left(image):
    norm = nn.BatchNorm2d(8)
    make = lambda: nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.SiLU(), nn.Conv2d(8, 8, 3), norm, nn.ReLU())  # noqa: E731
    _, report = converted(make, image)
    assert reasons(report)["1"] == "it is called several times, followed by silu and relu"


def test_tied_convolutions(image):
    def make():
        block = lambda: (nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), nn.ELU())  # noqa: E731
        model = nn.Sequential(*block(), *block())
        model[3].weight = model[0].weight
        return model

    model, report = converted(make, image)
    assert model[3].weight is model[0].weight
    assert replaced(report) == {"0": "ConvABN2d(elu(1.0))", "3": "ConvABN2d(elu(1.0))"}


def test_values_that_someone_keeps_are_not_overwritten(image):
    """No call of the forward reads a feature that the forward stores."""

    class Stores(networks.Twice):
        def forward(self, x):
            self.feature = self.conv(x)
            return self.act(self.bn(self.feature))

    _, report = converted(lambda: Stores(nn.LeakyReLU()), image)
    assert replaced(report) == {"bn": "BatchNormAct(leaky_relu(0.01))"}


WRITES = {
    "y += x": lambda y: operator.iadd(y, 1),
    "y.mul_(x)": lambda y: y.mul_(2),
    "y[:, :1] += x": lambda y: y[:, :1].add_(1) is None or y,
    "F.relu(y, True)": lambda y: F.relu(y, True),
    "F.threshold_": lambda y: F.threshold_(y, 0.1, 0.0),
    "F.dropout": lambda y: F.dropout(y, 0.5, True, True),
    "nn.Dropout": nn.Dropout(inplace=True),
    "nn.ReLU": nn.ReLU(inplace=True),
    "y.masked_fill_": lambda y: y.masked_fill_(y.detach() > 1, 0),
    "y.copy_": lambda y: y.copy_(y * 2),
    "out=": lambda y: torch.add(y.detach() * 1, 1, out=y.detach()) is None or y,
    "y.data.mul_": lambda y: y.data.mul_(2) is None or y,
    "y.T.mul_": lambda y: y.mT.mul_(2) is None or y,
    "nn.Flatten": nn.Sequential(nn.Flatten(), nn.ReLU(inplace=True)),
    "_foreach_mul_": lambda y: torch._foreach_mul_([y], 2.0) is None or y,
}


@pytest.mark.parametrize("write", WRITES)
def test_an_output_that_the_model_changes_is_not_kept_for_backward(image, write):
    """Network 195 of the hunt: backward of the converted network raised an error, and that of the stock one did not.

    With ``torch._foreach_mul_`` in a checkpoint, and with ``.data``, gradients were wrong without an error.
    """

    class Changes(networks.Twice):
        def __init__(self, act):
            super().__init__(act)
            self.write = WRITES[write]

        def forward(self, x):
            return self.write(self.act(self.bn(self.conv(x))))

    _, report = converted(lambda: Changes(nn.LeakyReLU()), image)
    assert replaced(report) == {"bn": "BatchNormAct(leaky_relu(0.01))"}


def test_scripted_children_are_left(image):
    make = lambda: nn.Sequential(torch.jit.script(networks.double_conv(3, 8)), networks.double_conv(8, 8))  # noqa: E731
    model = make()
    report = fusedseg.convert(model, example_inputs=image.float())
    assert replaced(report) == {"1.1": "BatchNormAct(relu)"}
    assert "scripted" in reasons(report)["0"]


class Counting(nn.Module):
    """A forward that counts its calls in a buffer."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.LeakyReLU()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.steps.add_(1)
        return self.act(self.norm(self.conv(x)))


def test_buffers_that_forward_changes_are_as_before():
    net = Counting()
    steps = net.steps
    fusedseg.convert(net, example_inputs=torch.randn(2, 3, 8, 8))
    assert net.steps is steps
    assert steps == 0
    assert isinstance(net.norm, fusedseg.InPlaceABN)
    net(torch.randn(2, 3, 8, 8)).sum().backward()
    assert steps == 1


def test_a_container_that_refuses_changes_stays(image):
    """Models of other packages hold their configuration in one."""

    class Frozen(OrderedDict):
        def update(self, *args):
            raise TypeError("frozen")

    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).double()
    net.config = Frozen([("width", 4)])
    fusedseg.convert(net, example_inputs=image)
    assert isinstance(net[1], fusedseg.BatchNormAct)
    assert net.config == {"width": 4}
