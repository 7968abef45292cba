"""Export of converted models and of reverted models; TorchScript takes reverted models only."""

import copy
import functools
import importlib.util
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fusedseg
from tests.conversion import networks

# Another runtime rounds differently.
TOLERANCE = 1e-5
pytestmark = [
    pytest.mark.usefixtures("uncounted"),
    # Traced checks of sizes warn, and PyTorch warns that TorchScript is deprecated.
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore:.*(TorchScript|torch.jit).*:DeprecationWarning"),
    # PyTorch's own exporters warn.
    pytest.mark.filterwarnings("ignore:The feature will be removed:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*ONNX.*"),
]


@functools.cache
def converted(name: str) -> nn.Module:
    """The converted model that all tests copy."""
    torch.manual_seed(0)
    model = networks.NETWORKS[name]()
    fusedseg.convert(model, example_inputs=image())
    return model


@pytest.fixture(params=networks.NETWORKS)
def model(request):
    """A converted model in training mode."""
    return copy.deepcopy(converted(request.param))


def image() -> Tensor:
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=["reverted", "converted"])
def model_and_output(request, model):
    """A model in eval mode after one step of training, and the output of its stock form."""
    model(image()).sum().backward()
    model.eval()
    expected = fusedseg.revert(copy.deepcopy(model))(image()).detach()
    if request.param == "reverted":
        # Stock modules with the same parameters give the same bits.
        assert torch.equal(fusedseg.revert(model)(image()), expected)
    return model, expected


def close(out: Tensor, expected: Tensor) -> bool:
    return bool((out - expected).abs().max() <= TOLERANCE * expected.abs().max())


def test_torchscript(model, tmp_path):
    model.eval()
    with pytest.raises(RuntimeError, match=r"call fusedseg\.revert\(model\) before torch\.jit\.script"):
        torch.jit.script(model)
    with pytest.raises(RuntimeError, match=r"call fusedseg\.revert\(model\) before torch\.jit\.script"):
        torch.jit.script(nn.Sequential(model))
    out = fusedseg.revert(model)(image())
    torch.jit.script(model).save(tmp_path / "model.pt")
    assert close(torch.jit.load(tmp_path / "model.pt")(image()), out)


def test_trace(model_and_output, tmp_path):
    model, expected = model_and_output
    torch.jit.trace(model, image()).save(tmp_path / "model.pt")
    assert close(torch.jit.load(tmp_path / "model.pt")(image()), expected)


def test_export(model_and_output):
    model, expected = model_and_output
    program = torch.export.export(model, (image(),))
    assert close(program.module()(image()), expected)
    assert not [node.target for node in program.graph.nodes if "fusedseg" in str(node.target)]
    assert close(model(image()), expected)


NORMS = {
    "batch": nn.BatchNorm2d,
    "instance": functools.partial(nn.InstanceNorm2d, affine=True),
    "tracked instance": functools.partial(nn.InstanceNorm2d, track_running_stats=True),
    "group": functools.partial(nn.GroupNorm, 2),
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("act", [nn.LeakyReLU, nn.SiLU], ids=["in place", "exact"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_export_of_any_size(norm, act, training):
    """``torch.Size.numel()`` made constants of symbolic sizes, so that the program took the example's sizes alone."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), NORMS[norm](4), act())
    fusedseg.convert(model, example_inputs=image())
    model.train(training)
    any_size = dict.fromkeys((0, 2, 3), torch.export.Dim.DYNAMIC)
    program = torch.export.export(model, (image(),), dynamic_shapes=(any_size,)).module()
    other = torch.randn(3, 3, 20, 24)
    expected = fusedseg.revert(model)(other)
    assert close(program(other), expected)


# The condition is a mark, because fixtures would convert a model for a test that is skipped.
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxscript", "onnxruntime")),
    reason='not installed: pip install -e ".[export]"',
)
@pytest.mark.parametrize("dynamo", [True, False], ids=["torch.export", "torchscript"])
def test_onnx(model_and_output, dynamo, tmp_path):
    model, expected = model_and_output
    path = tmp_path / "model.onnx"
    torch.onnx.export(model, (image(),), path, dynamo=dynamo)
    assert close(run_onnx(path, image()), expected)


def run_onnx(path: Path, x: Tensor) -> Tensor:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (name,) = (given.name for given in session.get_inputs())
    return torch.from_numpy(session.run(None, {name: x.numpy()})[0])


def test_optimizers_step_after_a_model_was_reverted(model):
    """Compiled code keeps a list of modules to refresh after a step; a reverted norm must not stay on it."""
    torch.compile(fusedseg.InPlaceABN(4), backend="eager")(torch.randn(2, 4, 3, 3))
    fusedseg.revert(model)
    model(image()).sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
