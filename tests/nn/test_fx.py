"""``torch.fx.symbolic_trace`` of converted models, and of networks of this package's modules."""

import copy

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import fusedseg
from fusedseg import functional
from fusedseg.nn import Interpolated
from tests.conversion import networks
from tests.conversion.compare import assert_same


class Residual(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 1), norm

    def forward(self, x):
        return self.norm(self.conv(x), x)


class Joins(nn.Module):
    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.small, self.conv = nn.Conv2d(3, 5, 2, stride=2), conv

    def forward(self, x):
        small = F.relu(self.small(x))
        return self.conv([x, Interpolated(small, x.shape[2:], "bilinear", align_corners=False)])


class Enlarges(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = fusedseg.ConvABN2d(3, 4, 1)

    def forward(self, x):
        return self.conv(functional.Interpolated(x, (16, 16), "nearest"))


def after_conv(module: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), module)


NETWORKS = {
    "InPlaceABN": lambda: after_conv(fusedseg.InPlaceABN(4)),
    "InPlaceInstanceNormAct": lambda: after_conv(fusedseg.InPlaceInstanceNormAct(4)),
    "InPlaceGroupNormAct": lambda: after_conv(fusedseg.InPlaceGroupNormAct(2, 4)),
    "InPlaceABNSync": lambda: after_conv(fusedseg.InPlaceABNSync(4)),
    "BatchNormAct": lambda: after_conv(fusedseg.BatchNormAct(4, activation="silu")),
    "BatchNormActSync": lambda: after_conv(fusedseg.BatchNormActSync(4)),
    "InstanceNormAct": lambda: after_conv(fusedseg.InstanceNormAct(4)),
    "GroupNormAct": lambda: after_conv(fusedseg.GroupNormAct(2, 4)),
    "residual, exact": lambda: Residual(fusedseg.BatchNormAct(3, activation="relu")),
    "residual, in place": lambda: Residual(fusedseg.InPlaceABN(3)),
    "ConvABN2d": lambda: nn.Sequential(fusedseg.ConvABN2d(3, 4, 3), nn.Conv2d(4, 4, 1)),
    "JoinConv2d": lambda: Joins(fusedseg.nn.JoinConv2d(8, 4, 3, padding=1)),
    "ConvABN2d of several": lambda: Joins(fusedseg.ConvABN2d(8, 4, 3, padding=1)),
    "Interpolated": Enlarges,
    "MaxPool2d": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), fusedseg.MaxPool2d(2)),
    "UNet": lambda: fusedseg.unet.UNet(3, 2, widths=(4, 8)),
}
CONVERTED = networks.NETWORKS | {
    "densenet": networks.DenseNet,
    "inner": lambda: nn.Sequential(networks.UNet(), nn.Softplus()),
}


@pytest.fixture
def image():
    return torch.randn(2, 3, 16, 16, dtype=torch.float64)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.filterwarnings("ignore:fusedseg. torch.distributed is not initialised")
def test_networks_of_these_modules(name, training, image):
    model = NETWORKS[name]().double()
    graph = fx.symbolic_trace(copy.deepcopy(model).train(training))
    assert_same(graph, model, image, 1e-12, training)
    assert list(graph.state_dict()) == list(model.state_dict())


@pytest.mark.parametrize("name", CONVERTED)
def test_converted_models(name, image):
    model = CONVERTED[name]().double()
    stock = copy.deepcopy(model)
    # A converted model inside another model can be traced as well.
    fusedseg.convert(model[0] if name == "inner" else model, example_inputs=image)
    for training in (True, False):
        graph = fx.symbolic_trace(copy.deepcopy(model).train(training))
        assert not [node for node in graph.graph.nodes if "batch_norm" in str(node.target)]
        assert_same(copy.deepcopy(graph), copy.deepcopy(stock), image, training=training)
        assert_same(copy.deepcopy(graph), copy.deepcopy(model), image, 1e-12, training)


def test_marks_for_shared_activations(image):
    model = networks.ResNet().double()
    fusedseg.convert(model, example_inputs=image, mode="leaky", slope=0.2)
    assert_same(fx.symbolic_trace(copy.deepcopy(model)), model, image, 1e-12)


def test_a_module_of_this_package_is_not_traced_itself():
    with pytest.raises(TypeError, match=r"InPlaceABN: torch.fx records a call .* such as nn\.Sequential"):
        fx.symbolic_trace(fusedseg.InPlaceABN(4))
