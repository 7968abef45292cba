"""Numbers that are symbols in a graph: a float ``scale_factor``, and channels."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.compiler.networks import compiled


def check(net, run, given, leaves, tolerance=1e-9):
    """The gradients of a step with a compiled model are those of eager mode."""
    found, wanted = (torch.autograd.grad(call(*given).square().mean(), leaves) for call in (run, net))
    most = max(g.abs().max() for g in wanted)
    assert all((a - b).abs().max() <= tolerance * most for a, b in zip(found, wanted, strict=True))


class Scaled(nn.Module):
    """The bug: with another factor at the second call the factor is a symbol, which is no float."""

    def __init__(self, dims, **how):
        super().__init__()
        conv, norm = ((nn.Conv2d, nn.BatchNorm2d), (nn.Conv3d, nn.InstanceNorm3d))[dims - 2]
        self.a, self.b = nn.Sequential(conv(2, 4, 3), norm(4), nn.SiLU()), conv(4, 2, 1)
        self.how = how

    def forward(self, x, factor):
        return self.b(F.interpolate(self.a(x), scale_factor=factor, **self.how))


FACTORS = (2.0, 1.5, 0.75)
HOW = {
    "nearest": (2, {}, {"budget": 0.5}, FACTORS),
    "recomputed": (2, {"mode": "bilinear", "recompute_scale_factor": True}, {}, FACTORS),
    "3D": (3, {"mode": "trilinear"}, {}, FACTORS),
    "of each dimension": (2, {"mode": "bilinear"}, {}, [(factor, 2.0) for factor in FACTORS]),
}


@pytest.mark.parametrize("how", HOW)
def test_a_scale_factor_that_changes(how):
    torch.manual_seed(0)
    dims, given, options, factors = HOW[how]
    net = Scaled(dims, **given).double()
    x = torch.randn(2, 2, *[8] * dims, dtype=torch.float64)
    run = compiled(net, **options)
    for factor in factors:
        check(net, run, (x, factor), [*net.parameters()])


class Convolved(nn.Module):
    """A convolution of a concatenation in a function that is compiled for any channels."""

    def forward(self, a, b, weight):
        y = F.relu(F.conv2d(torch.cat([F.silu(a), F.interpolate(b, scale_factor=2.0)], 1), weight))
        return F.conv2d(y, weight.new_ones(3, weight.shape[0], 1, 1))


OPTIONS = [(True, {"bits": 8}), (None, {"budget": 0.3})]


@pytest.mark.parametrize(("dynamic", "options"), OPTIONS, ids=str)
@pytest.mark.filterwarnings("ignore:.*cannot be met:UserWarning")
def test_channels_that_change(dynamic, options):
    """The bug: the places of slices of a gradient are nodes then, and were compared with numbers."""
    run = compiled(Convolved(), dynamic=dynamic, **options)
    # By itself the compiler makes the second graph for all sizes, which the third call runs.
    sizes = ((3, 4, 5, 8), (6, 5, 7, 10), (8, 9, 4, 12))
    for i, j, o, size in sizes[: 2 if dynamic else 3]:
        torch.manual_seed(i)
        shapes = (2, i, 2 * size, 2 * size), (2, j, size, size), (o, i + j, 3, 3)
        given = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
        # Tensors of 4096 values and more are packed.
        check(Convolved(), run, given, given, tolerance=0.05 if "bits" in options else 1e-9)


@pytest.mark.filterwarnings("ignore:.*cannot be met:UserWarning")
def test_blocks_of_other_channels_after_a_graph_break():
    class Block(nn.Module):
        def __init__(self, i, o):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(2 * i, o, 3, padding=1), nn.GroupNorm(1, o)

        def forward(self, a, b):
            torch._dynamo.graph_break()
            return F.elu(self.norm(self.conv(torch.cat([a, b], 1))))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block(i, o) for i, o in ((2, 6), (6, 10), (10, 4), (4, 2)))

        def forward(self, x):
            for block in self.blocks:
                x = block(x, x.sigmoid())
            return x

    torch.manual_seed(0)
    net = Net().double()
    x = torch.randn(2, 2, 8, 8, dtype=torch.float64)
    check(net, compiled(net, budget=0.3), (x,), [*net.parameters()])


def pooled(rows):
    return F.max_pool2d(F.gelu(F.group_norm(rows, 2)), 2)


def others(rows):
    rows = F.interpolate(F.instance_norm(rows).relu(), scale_factor=2.0, mode="bilinear")
    return F.max_pool3d(F.dropout(F.silu(rows), 0.0).unflatten(2, (2, 32)), 2)


# Each reads rows of an image, whose number depends on a mask.
OF_ROWS = {"pooled": pooled, "others": others}
WAYS = {"exact": {}, "budget": {"budget": 0.5}, "bits": {"bits": 8}, "layout": {"memory_format": torch.channels_last}}


@pytest.mark.usefixtures("packed")
@pytest.mark.filterwarnings("ignore:.*cannot be met:UserWarning")
# Pools and norms have every way; the rest of an op has the same code in each.
@pytest.mark.parametrize(("name", "way"), [("others", "exact"), *(("pooled", way) for way in WAYS)])
def test_sizes_that_depend_on_data(name, way):
    """The bug: pools and norms of ``x[mask]``, and with bits all packed tensors, raised an error about such a size."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.SiLU()).double()
    image, mask = torch.randn(4, 2, 32, 32, dtype=torch.float64), torch.tensor([True, False, True, True])

    def program(x, mask):
        return OF_ROWS[name](net(x)[mask])

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run = torch.compile(program, backend="fusedseg", options={"codegen": "aten", **WAYS[way]})
        found, wanted = (
            torch.autograd.grad(call(image, mask).square().mean(), [*net.parameters()]) for call in (run, program)
        )
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).norm() <= (0.05 if way == "bits" else 1e-9) * other.norm()
