"""Exports of fused modules for inference by ``torch.export``, TorchScript and ONNX.

The exported programs contain only stock functions, so they run without this package.
"""

import copy
import importlib.util

import pytest
import torch
from torch import nn

import fusedseg
from fusedseg.unet import MultiEncoderUNet, UNet
from tests.tools import warm

MODULES = {
    "InPlaceABN": lambda: fusedseg.InPlaceABN(4, activation="elu", activation_param=1.2),
    "InPlaceABNSync": lambda: fusedseg.InPlaceABNSync(4),
    "InPlaceInstanceNormAct": lambda: fusedseg.InPlaceInstanceNormAct(4, affine=True),
    "tracked InPlaceInstanceNormAct": lambda: fusedseg.InPlaceInstanceNormAct(4, track_running_stats=True),
    "InPlaceGroupNormAct": lambda: fusedseg.InPlaceGroupNormAct(2, 4, activation="identity"),
    "one channel a group": lambda: fusedseg.InPlaceGroupNormAct(4, 4),
    "InstanceNormAct": lambda: fusedseg.InstanceNormAct(4, activation="relu"),
    "tracked InstanceNormAct": lambda: fusedseg.InstanceNormAct(4, track_running_stats=True, activation="relu6"),
    "GroupNormAct": lambda: fusedseg.GroupNormAct(2, 4, activation="hardswish"),
    # ``tests/test_activation.py`` exports every activation.
    "BatchNormAct": lambda: fusedseg.BatchNormAct(4, activation="prelu"),
    "ConvABN2d": lambda: fusedseg.ConvABN2d(4, 4, 3, padding="same", padding_mode="reflect"),
    "JoinConv2d": lambda: fusedseg.nn.JoinConv2d(4, 2, 2, padding="same"),
    "MaxPool2d": lambda: fusedseg.MaxPool2d(3, 2, 1, ceil_mode=True),
}
NETWORKS = {
    "2D": (lambda: UNet(2, 3, widths=(4, 8)), [(2, 2, 8, 12)]),
    "two encoders, padded": (
        lambda: MultiEncoderUNet((2, 1), 3, widths=(4, 8), fit="pad"),
        [(2, 2, 9, 8), (2, 1, 9, 8)],
    ),
    "3D, instance": (
        lambda: UNet(1, 2, dims=3, widths=(2, 4), mode="transposed", norm_act="instance"),
        [(2, 1, 8, 8, 4)],
    ),
}
CASES = {name: (build, [(2, 4, 7, 6)]) for name, build in MODULES.items()} | NETWORKS
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
pytestmark = [
    # The traced checks of sizes give this warning.
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore:fusedseg. torch.distributed is not initialised"),
]


def case(name):
    """Returns a network in eval mode whose statistics have moved, images, and the network's output for them."""
    torch.manual_seed(0)
    build, shapes = CASES[name]
    net, images = build(), tuple(torch.randn(shape) for shape in shapes)
    with torch.no_grad():
        net(*(image.clone() for image in images))
        net.eval()
        return net, images, net(*(image.clone() for image in images))


def exported(net, images, **options):
    with torch.no_grad():
        return torch.export.export(net, images, **options)


@pytest.mark.parametrize("name", CASES)
def test_export_holds_stock_ops_alone(name):
    net, images, expected = case(name)
    state = copy.deepcopy(net.state_dict())
    program = exported(net, images)
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert all(target.startswith("aten.") for target in called), called
    torch.testing.assert_close(program.module()(*images), expected, **CLOSE)
    torch.testing.assert_close(net.state_dict(), state, rtol=0, atol=0)


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_export_of_any_size(strict):
    """The program takes all sizes that the stock network's program takes: with PyTorch 2.11 only even sizes."""
    net, images, _ = case("2D")
    sizes = {0: torch.export.Dim("batch", max=64), 2: torch.export.Dim.AUTO, 3: torch.export.Dim.AUTO}
    plain, program = (
        exported(model, images, dynamic_shapes=(sizes,), strict=strict).module()
        for model in (UNet(2, 3, widths=(4, 8), plain=True).eval(), net)
    )
    for shape in ((5, 2, 8, 12), (3, 2, 18, 22), (3, 2, 17, 22)):
        x = torch.randn(shape)
        try:
            plain(x)
        except AssertionError:
            assert shape[2] % 2
            continue
        torch.testing.assert_close(program(x), net(x), **CLOSE)


def test_export_for_training():
    """The exported program for training computes the same."""
    net, images, _ = case("2D")
    other = copy.deepcopy(net).train()
    program = torch.export.export(net.train(), images)
    torch.testing.assert_close(program.module()(*images), other(*images), **CLOSE)


def test_export_with_residual():
    for made in (fusedseg.BatchNormAct(4, activation="relu"), fusedseg.InPlaceABN(4)):
        x, residual = torch.randn(2, 2, 4, 5)
        expected = made.eval()(x.clone(), residual)
        torch.testing.assert_close(exported(made, (x, residual)).module()(x, residual), expected)


def test_compiled_code_survives_an_export():
    """After an export, compiled code still keeps the channels that backward needs."""
    torch._dynamo.reset()
    net = fusedseg.InPlaceABN(3).double()
    with torch.no_grad():
        net.weight[1] = 0
    compiled = torch.compile(nn.Sequential(nn.Conv2d(2, 3, 1).double(), net), backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 2, 4, 4, dtype=torch.float64)
    before = torch.autograd.grad(compiled(x).square().sum(), net.weight)
    exported(net, (torch.randn(2, 3, 4, 4, dtype=torch.float64),))
    torch.testing.assert_close(torch.autograd.grad(compiled(x).square().sum(), net.weight), before)
    torch._dynamo.reset()


ELSEWHERE = """
import sys, warnings
assert "fusedseg" not in sys.modules
sys.modules["fusedseg"] = None
import torch
warnings.simplefilter("ignore")
images, expected = torch.load("images.pt")
for program in (torch.export.load("program.pt2").module(), torch.jit.load("script.pt")):
    torch.testing.assert_close(program(*images), expected, rtol=1e-5, atol=1e-5)
"""


def test_programs_run_without_the_package(tmp_path):
    net, images, expected = case("2D")
    torch.export.save(exported(net, images), tmp_path / "program.pt2")
    torch.jit.trace(net, images).save(tmp_path / "script.pt")
    torch.save((images, expected), tmp_path / "images.pt")
    (tmp_path / "elsewhere.py").write_text(ELSEWHERE)
    run = warm.run("elsewhere", cwd=tmp_path)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("name", CASES)
def test_traced(name):
    net, images, expected = case(name)
    with torch.no_grad():
        traced = torch.jit.trace(net, tuple(image.clone() for image in images))
        torch.testing.assert_close(traced(*(image.clone() for image in images)), expected, **CLOSE)


def test_traced_for_any_size():
    net, images, _ = case("2D")
    with torch.no_grad():
        traced = torch.jit.trace(net, images)
        x = torch.randn(1, 2, 17, 22)
        torch.testing.assert_close(traced(x), net(x), **CLOSE)


@pytest.mark.parametrize("name", CASES)
def test_scripting_says_what_to_do_instead(name):
    with pytest.raises(RuntimeError, match=r"torch.jit.script cannot compile .* torch.jit.trace"):
        torch.jit.script(case(name)[0])


@pytest.mark.parametrize("name", NETWORKS)
def test_onnx(name, tmp_path):
    if any(importlib.util.find_spec(package) is None for package in ("onnx", "onnxscript", "onnxruntime")):
        pytest.skip("the extra `export` is not installed")
    import onnxruntime

    net, images, expected = case(name)
    path = str(tmp_path / "net.onnx")
    with torch.no_grad():
        torch.onnx.export(net, images, path, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]
    (out,) = session.run(None, {key: image.numpy() for key, image in zip(names, images, strict=True)})
    torch.testing.assert_close(torch.from_numpy(out), expected, rtol=1e-4, atol=1e-5)
