"""Residual norms of published networks: norm, sum and activation are one op, whose backward gives both gradients."""

import pytest
import torch
from torch import nn

from fusedseg.compiler.graph import following
from fusedseg.ops.layout import FORMATS
from fusedseg.ops.norm.graph import Backward
from tests.compiler.networks import compiled, is_backward
from tests.resnet import LEAST_WIDTH_IN_ROWS, ResNet18, ResNet50


def basic_blocks():
    return ResNet18(10, width=LEAST_WIDTH_IN_ROWS, stages=2), torch.randn(2, 3, 32, 32), 4


def bottlenecks():
    net = ResNet50(10, width=4)
    # The first two stages have blocks of each kind, and are compiled in a third of the time.
    net.layers = net.layers[:7]
    net.fc = nn.Linear(32, 10)
    return net, torch.randn(2, 3, 32, 32), 7


def residual_encoder():
    unet = pytest.importorskip("dynamic_network_architectures.architectures.unet")
    net = unet.ResidualEncoderUNet(
        1, 2, (4, 8), nn.Conv3d, 3, (1, 2), (1, 2), 2, (1,), conv_bias=True, norm_op=nn.InstanceNorm3d,
        norm_op_kwargs={"affine": True}, nonlin=nn.LeakyReLU, nonlin_kwargs={"inplace": True},
    )  # fmt: skip
    return net, torch.randn(1, 1, 8, 8, 8), 3


def swin_unetr():
    nets = pytest.importorskip("monai.networks.nets")
    # Of ten residual blocks four add a permuted map, which lies otherwise than the result of the norm.
    return nets.SwinUNETR(in_channels=1, out_channels=2, feature_size=12), torch.randn(1, 1, 64, 32, 32), 6


RESIDUAL = {
    "ResNet-18": basic_blocks, "ResNet-50": bottlenecks, "ResidualEncoderUNet": residual_encoder,
    "SwinUNETR": swin_unetr,
}  # fmt: skip


# Bottlenecks have the sums of basic blocks.
@pytest.mark.usefixtures("norms_of_a_gpu")
@pytest.mark.parametrize("fmt", ["planes", "rows"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "ResNet-50")) for name in RESIDUAL]
)
def test_residual_norms_of_networks(name, fmt, emitted):
    """Each is one op, in planes too; its backward gives the shortcut's gradient, and sums of gradients are in place."""
    torch.manual_seed(0)
    net, x, wanted = RESIDUAL[name]()
    last = FORMATS[x.dim()]
    if fmt == "rows":
        net, x = net.to(memory_format=last), x.contiguous(memory_format=last)
    options = {} if fmt == "planes" else {"memory_format": last}
    compiled(net, **options)(x).square().mean().backward()
    backward = [graph for graph in emitted if is_backward(graph)]
    norms_of = [node.target for graph in backward for node in graph.nodes if isinstance(node.target, Backward)]
    assert sum(norm.of_residual for norm in norms_of) == wanted
    large = x.numel() // 8
    gradients = following(backward[0])
    sums = [node for node in gradients if node.target is torch.ops.aten.add.Tensor]
    assert not [node for node in sums if node.meta["val"].numel() >= large]
