"""Norms whose output has two readers, in the code of "aten": their gradient reads both gradients of the output."""

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

import fusedseg
from fusedseg.compiler.codegen import gradient_sums, replays
from fusedseg.memory import allocator_peak
from fusedseg.ops.layout import FORMATS
from fusedseg.ops.norm.graph import Backward
from tests.compiler.networks import compiled, is_backward, loss_of
from tests.compiler.programs import PROGRAMS, Net, conv
from tests.nnunet import PlainConvUNet
from tests.resnet import LEAST_WIDTH_IN_ROWS, ResNet18


def returned_twice(x, first, norm):
    y = norm(first(x))
    return y, y.clone()


# The network, its input, and the norms that read two gradients.
NETWORKS = {
    "ResNet-18": (lambda: ResNet18(10, width=LEAST_WIDTH_IN_ROWS), (2, 3, 32, 32), 6),
    "PlainConvUNet": (lambda: PlainConvUNet(widths=(4, 8, 16)), (2, 1, 16, 16, 16), 2),
    "residual blocks": (*PROGRAMS["residual blocks"], 2),
    "skip first": (*PROGRAMS["pooled skip"], 1),
    "skip last, 3D": (*PROGRAMS["pooled skip last, 3D"], 1),
    "three gradients": (*PROGRAMS["three gradients"], 1),
    # Nothing is written over the first gradient here, so the kernel allocates beside both of them.
    "norm of the input": (*PROGRAMS["norm of the input"], 0),
    # Both gradients are the caller's.
    "returned twice": (lambda: Net(returned_twice, first=conv(2, 8), norm=nn.BatchNorm2d(8)), (2, 2, 16, 16), 0),
}


@pytest.fixture(autouse=True)
def on_triton(monkeypatch):
    monkeypatch.setattr(fusedseg, "backend", "triton")
    # Replays hide the ops of a graph.
    monkeypatch.setattr(replays, "replay_launches", lambda graph: 0)


def made(name, rows):
    torch.manual_seed(0)
    make, shape, _ = NETWORKS[name]
    net, x = make(), torch.randn(shape)
    if rows:
        net, x = (of.to(memory_format=FORMATS[len(shape)]) for of in (net, x))
    return net, x


def joined(graph):
    return [node for node in graph.nodes if isinstance(node.target, Backward) and len(node.args) == 8]


# Nothing is joined in the planes of the last two.  The published networks take seconds in the interpreter.
@pytest.mark.parametrize(
    ("name", "rows"),
    [
        *(pytest.param(name, True, marks=[pytest.mark.slow] * ("Net" in name)) for name in NETWORKS),
        *((name, False) for name in ("residual blocks", "skip first", "three gradients")),
    ],
)
def test_no_sum_is_left_and_the_peak_does_not_rise(name, rows, emitted, monkeypatch):
    """Counted by PyTorch's allocator, with kernels in Triton's interpreter."""
    net, x = made(name, rows)
    options = {"memory_format": torch.channels_last_3d} if rows and x.dim() == 5 else {}
    peaks = []
    for rewrite in (gradient_sums.fuse_sums, lambda graph, liveness: 0):
        torch._dynamo.reset()
        monkeypatch.setattr(gradient_sums, "fuse_sums", rewrite)
        run = compiled(net, **options)
        loss_of(run(x)).backward()
        peaks.append(allocator_peak(lambda run=run: loss_of(run(x)).backward()))
    assert peaks[0] <= 1.001 * peaks[1]
    # In planes the slices of a concatenation have gaps that no kernel reads.
    wanted = NETWORKS[name][2] if rows or name in ("residual blocks", "three gradients") else 0
    if rows and name == "ResNet-18":
        # In channels_last another op stands between one more sum and its norm, and there is memory for both gradients.
        wanted += 1
    assert [len(joined(graph)) for graph in emitted if is_backward(graph)] == [wanted, 0]
