"""The vendor's convolution; on a CPU, oneDNN convolves a single small volume, for which torch would use a loop."""

import pytest
import torch

from fusedseg.ops.conv import convolution
from fusedseg.ops.conv.convolution import Geometry, convolve, convolve_backward
from tests.reference import FORWARD_TOLERANCE, GRADIENT_TOLERANCE, relative_error

PLAIN = Geometry((1,) * 3, (1,) * 3, (1,) * 3, 1)
# Shapes of x and w, and the geometry.
VOLUMES = {
    "3x3x3": ((1, 8, 6, 9, 7), (5, 8, 3, 3, 3), PLAIN),
    "pointwise": ((1, 8, 6, 9, 7), (5, 8, 1, 1, 1), PLAIN._replace(padding=(0,) * 3)),
    "stride, dilation": ((1, 4, 9, 8, 7), (6, 4, 3, 3, 3), Geometry((2, 1, 2), (2, 1, 0), (2, 1, 1), 1)),
    "groups": ((1, 8, 6, 5, 7), (4, 4, 3, 3, 3), PLAIN._replace(groups=2)),
    "one voxel": ((1, 8, 1, 1, 1), (5, 8, 3, 3, 3), PLAIN),
    "two volumes": ((2, 8, 6, 9, 7), (5, 8, 3, 3, 3), PLAIN),
    "large": ((1, 8, 52, 50, 2), (2, 8, 3, 3, 3), PLAIN),
}


def expected(x, w, bias, geometry, dy):
    leaves = [t.double().requires_grad_() for t in (x, w, bias)]
    y = torch.nn.functional.conv3d(*leaves, *geometry)
    return y.detach(), torch.autograd.grad(y, leaves, dy.double())


def data(of_x, of_w, geometry):
    generator = torch.Generator().manual_seed(0)
    shapes = of_x, of_w, of_w[:1], geometry.output_shape(torch.Size(of_x), torch.Size(of_w))
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last_3d], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("case", VOLUMES)
def test_values_and_gradients_of_volumes(case, memory_format):
    geometry = VOLUMES[case][-1]
    x, w, bias, dy = data(*VOLUMES[case])
    x = x.to(memory_format=memory_format)
    y, gradients = expected(x, w, bias, geometry, dy)
    found = convolve(x, w, bias, geometry)
    assert relative_error(found, y) < FORWARD_TOLERANCE[torch.float32]
    assert found.is_contiguous(memory_format=memory_format)
    for wanted in ((True, True, True), (True, False, False), (False, True, True), (False, True, False)):
        for got, gradient, asked in zip(convolve_backward(dy, x, w, geometry, wanted), gradients, wanted, strict=True):
            assert (got is not None) == asked
            if asked:
                assert got.layout == torch.strided
                assert relative_error(got, gradient) < GRADIENT_TOLERANCE[torch.float32]


class Calls:
    """Replaces ``torch.ops.aten`` in the module and records the called convolutions and the layouts of backward's
    inputs.

    A dispatch mode would not see oneDNN's tensors, because the module hides them from modes.
    """

    def __init__(self):
        self.seen = []

    def mkldnn_convolution(self, *args):
        self.seen.append("mkldnn_convolution")
        return torch.ops.aten.mkldnn_convolution(*args)

    def convolution_backward(self, dy, x, *args):
        self.seen.append(x.layout)
        return torch.ops.aten.convolution_backward(dy, x, *args)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
@pytest.mark.parametrize("case", VOLUMES)
def test_one_small_volume_is_not_convolved_by_a_loop(case, monkeypatch):
    """torch's loop made a step of a 3D U-Net three times as slow."""
    x, w, bias, dy = data(*VOLUMES[case])
    calls = Calls()
    monkeypatch.setattr(convolution, "aten", calls)
    convolve(x, w, bias, VOLUMES[case][-1])
    convolve_backward(dy, x, w, VOLUMES[case][-1], (True, True, True))
    small = case not in ("two volumes", "large")
    assert calls.seen == (["mkldnn_convolution", torch._mkldnn] if small else [torch.strided])


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning")
def test_onednn_is_left_alone_where_it_is_switched_off():
    x, w, bias, _ = data(*VOLUMES["3x3x3"])
    with torch.backends.mkldnn.flags(enabled=False):
        assert not convolution.looped(x)
        convolve(x, w, bias, PLAIN)
