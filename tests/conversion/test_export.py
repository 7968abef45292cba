"""``revert`` gives a model that leaves Python as it did before it was converted."""

import copy
import importlib.util

import pytest
import torch

import fusedseg
from tests.conversion import networks

NETWORKS = {"unet": networks.UNet, "resnet": networks.ResNet, "nnunet": networks.NNUNet}


@pytest.fixture(params=NETWORKS)
def model_and_output(request):
    """A model that was converted, has trained, and was reverted; what it gives, and for what."""
    model = NETWORKS[request.param]()
    x = torch.randn(2, 3, 32, 32)
    fusedseg.convert(model, example_inputs=x)
    model(x).sum().backward()
    expected = copy.deepcopy(model).eval()(x)
    out = fusedseg.revert(model).eval()(x)
    assert torch.allclose(out, expected, atol=1e-5)
    return model, x, out


def test_torchscript(model_and_output, tmp_path):
    model, x, out = model_and_output
    torch.jit.script(model).save(tmp_path / "model.pt")
    assert torch.allclose(torch.jit.load(tmp_path / "model.pt")(x), out, atol=1e-6)


def test_export(model_and_output):
    model, x, out = model_and_output
    assert torch.allclose(torch.export.export(model, (x,)).module()(x), out, atol=1e-6)


def test_onnx(model_and_output, tmp_path):
    if any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxscript")):
        pytest.skip("onnx and onnxscript are not installed")
    model, x, _ = model_and_output
    torch.onnx.export(model, (x,), tmp_path / "model.onnx", dynamo=True)
    assert (tmp_path / "model.onnx").stat().st_size > 1000
