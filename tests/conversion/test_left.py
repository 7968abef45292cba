"""Modules that ``convert`` leaves as they are, and the reasons that the report gives."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import fusedseg
from tests.conversion import networks
from tests.conversion.compare import converted, reasons, replaced

pytestmark = pytest.mark.usefixtures("uncounted")


@pytest.mark.parametrize("where", ["norm", "act"])
def test_hooks_go_on_seeing_what_they_saw(image, where):
    seen = []

    def make():
        model = nn.Sequential(*networks.double_conv(3, 8, nn.LeakyReLU()))
        model[1 if where == "norm" else 2].register_forward_hook(lambda m, args, out: seen.append(out.detach().clone()))
        return model

    model, report = converted(make, image)
    assert replaced(report) == {}
    name = {"norm": "BatchNorm2d", "act": "LeakyReLU"}[where]
    assert reasons(report)["1"] == f"{name} has hooks, which would see other tensors"
    seen.clear()
    for net in (model, fusedseg.revert(copy.deepcopy(model))):
        net(image)
    assert torch.equal(*seen)


def test_a_norm_whose_forward_was_replaced_is_left(image):
    def make():
        model = networks.double_conv(3, 8)
        model[1].forward = lambda x: 2 * nn.functional.batch_norm(x, None, None, training=True)
        return model

    _, report = converted(make, image)
    assert reasons(report)["1"] == "the forward of its BatchNorm2d was replaced"


def test_what_a_hook_of_the_convolution_keeps_is_not_overwritten(image):
    def make():
        model = networks.double_conv(3, 8, nn.LeakyReLU())
        model[0].register_forward_hook(lambda m, args, out: None)
        return model

    assert replaced(converted(make, image)[1]) == {"1": "BatchNormAct(leaky_relu(0.01))"}


@pytest.mark.parametrize(("act", "name"), [(nn.ReLU(), "relu"), (nn.LeakyReLU(), "leaky_relu(0.01)")], ids=str)
@pytest.mark.parametrize("norm", [parametrizations.spectral_norm, torch.nn.utils.spectral_norm], ids=["new", "old"])
def test_spectral_norm_of_the_convolution(image, norm, act, name):
    def make():
        model = networks.double_conv(3, 8, act)
        norm(model[0])
        return model

    model, report = converted(make, image)
    assert replaced(report) == {"1": f"BatchNormAct({name})"}
    assert type(model[0].weight) in (nn.Parameter, torch.Tensor)


def test_a_parametrized_norm_is_left(image):
    class Double(nn.Module):
        def forward(self, weight):
            return 2 * weight

    def make():
        model = networks.double_conv(3, 8)
        parametrize.register_parametrization(model[1], "weight", Double())
        return model

    _, report = converted(make, image)
    assert replaced(report) == {}
    why = "its class ParametrizedBatchNorm2d is a subclass of BatchNorm2d, and only BatchNorm2d is known"
    assert reasons(report)["1"] == why


def test_synchronised_norms_are_left():
    model = nn.SyncBatchNorm.convert_sync_batchnorm(networks.double_conv(3, 8))
    report = fusedseg.convert(model)
    assert type(model[1]) is nn.SyncBatchNorm
    assert reasons(report)["1"].startswith("its statistics are shared by several processes: convert BatchNorms, then")


def test_lazy_modules_are_left_until_they_have_run():
    example = torch.randn(2, 3, 8, 8)
    model = nn.Sequential(nn.LazyConv2d(8, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.LazyConv2d(4, 3), nn.BatchNorm2d(4))
    report = fusedseg.convert(model, example_inputs=example)
    assert "lazy" in reasons(report)["1"]
    assert "lazy" in reasons(report)["0"]
    assert all(nn.parameter.is_lazy(p) for p in (*model[0].parameters(), *model[1].parameters()))
    model(torch.randn(2, 3, 8, 8))
    assert replaced(fusedseg.convert(model, example_inputs=example)) == {"1": "BatchNormAct(relu)"}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor.*deprecated:UserWarning")
@pytest.mark.filterwarnings("ignore:quantized..linear_dynamic. an autograd kernel:UserWarning")
def test_quantised_modules_are_left():
    model = nn.Sequential(networks.double_conv(3, 8), nn.Flatten(), torch.ao.nn.quantized.dynamic.Linear(8 * 36, 4))
    x = torch.randn(2, 3, 6, 6)
    expected = model.eval()(x)
    report = fusedseg.convert(model, example_inputs=x)
    assert replaced(report) == {"0.1": "BatchNormAct(relu)"}
    assert torch.allclose(model(x), expected)


def test_a_scripted_model_is_left():
    model = torch.jit.script(networks.double_conv(3, 8))
    report = fusedseg.convert(model)
    assert reasons(report) == {"": "it is scripted: convert the model before torch.jit.script"}


def test_max_pooling_that_returns_indices_is_left(image):
    class Indices(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.unpool = nn.Conv2d(3, 4, 3, padding=1), nn.MaxUnpool2d(2)
            self.pool = nn.MaxPool2d(2, return_indices=True)

        def forward(self, x):
            return self.unpool(*self.pool(self.conv(x)))

    _, report = converted(Indices, image)
    assert reasons(report)["pool"] == "it returns indices"
