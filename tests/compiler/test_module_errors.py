"""The error of a model that gets a wrong input begins with the module that raised it."""

import functools

import pytest
import torch
from torch import nn

from fusedseg.compiler import backend

pytestmark = pytest.mark.usefixtures("compiled_afresh")


class TwoEncoders(nn.Module):
    def __init__(self):
        super().__init__()
        self.optical = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.InstanceNorm2d(4), nn.ReLU())
        self.lidar = nn.ModuleDict({"stem": nn.Conv2d(5, 4, 3, padding=1)})
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, image, points):
        return self.head(torch.cat([self.optical(image), self.lidar["stem"](points)], 1))


def message_of(model, *inputs):
    with pytest.raises(RuntimeError) as caught:
        model(*inputs)
    return str(caught.value).splitlines()[0]


@pytest.mark.parametrize(
    ("channels", "module", "expected"), [((2, 5), "optical.0", 3), ((3, 2), "lidar.stem", 5)], ids=["first", "nested"]
)
@pytest.mark.parametrize("before", [False, True], ids=["first-call", "second-call"])
def test_channels(channels, module, expected, before):
    """The message was 20 lines of PyTorch, of which none named a module."""
    model = torch.compile(TwoEncoders(), backend="fusedseg", options={"codegen": "aten"})
    if before:
        model(torch.randn(1, 3, 8, 8), torch.randn(1, 5, 8, 8)).sum().backward()
    line = message_of(model, *(torch.randn(1, n, 8, 8) for n in channels))
    assert line.startswith(f'torch.compile(backend="fusedseg"): {module} (Conv2d): Given groups=1, ')
    assert f"to have {expected} channels" in line


def test_a_model_that_is_one_layer():
    model = torch.compile(nn.Conv2d(3, 4, 1), backend="fusedseg")
    assert "the model (Conv2d): " in message_of(model, torch.randn(1, 2, 8, 8))


def test_a_model_that_is_compiled_in_place():
    model = TwoEncoders()
    model.compile(backend="fusedseg")
    assert "optical.0 (Conv2d): " in message_of(model, torch.randn(1, 2, 8, 8), torch.randn(1, 5, 8, 8))


@pytest.mark.parametrize("given", ["function", "partial"])
def test_a_backend_that_is_given_as_a_function(given):
    """The module was named for the text "fusedseg" alone, which nnU-Net's trainers do not use."""
    options = {"codegen": "aten"}
    run = {"function": backend, "partial": functools.partial(backend, options=options)}[given]
    model = torch.compile(TwoEncoders(), backend=run, options=options if given == "function" else None)
    assert "optical.0 (Conv2d): " in message_of(model, torch.randn(1, 2, 8, 8), torch.randn(1, 5, 8, 8))


def test_another_backend_keeps_its_message():
    model = torch.compile(TwoEncoders(), backend="aot_eager")
    line = message_of(model, torch.randn(1, 2, 8, 8), torch.randn(1, 5, 8, 8))
    assert "fusedseg" not in line
    assert "optical" not in line
