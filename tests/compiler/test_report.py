"""The report: what eager mode and the backend keep of each graph, and where the graphs end."""

import json

import pytest
import torch
from torch import nn

from fusedseg.compiler import estimate, report
from tests.compiler.networks import compiled, kept, make, peak_of
from tests.compiler.test_training import Net


@pytest.mark.parametrize("name", ["attention", "mixed"])
def test_kept_bytes_are_those_of_a_step(name):
    net, inputs = make(name)
    run = compiled(net)
    ours = kept(net, run, inputs)
    (graph,) = report(run).graphs
    assert (graph.ours.kept, graph.eager.kept) == (ours, kept(net, net, inputs))
    assert graph.ours.peak <= graph.eager.peak
    assert report(net).graphs == [graph]


class Perceptrons(nn.Module):
    """Residual blocks; a product of matrices allocates its result only."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3)
        )

    def forward(self, x):
        for block in self.blocks:
            x = torch.relu(block(x) + x)
        return x


class Pools(nn.Module):
    """Norms, pools and concatenations without a product."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(4 << i) for i in range(3))

    def forward(self, x):
        for norm in self.norms:
            y = nn.functional.leaky_relu(norm(x))
            x = torch.cat([y, nn.functional.interpolate(nn.functional.avg_pool2d(y, 2), scale_factor=2)], 1)
        return x.sigmoid()


def wide():
    """Weights that are far larger than activations."""
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))


@pytest.mark.parametrize(
    ("make", "shape"),
    [(Perceptrons, (4096, 16)), (Pools, (4, 4, 32, 32)), (wide, (4, 512))],
    ids=["perceptrons", "pools", "wide"],
)
def test_peak_is_the_allocators(make, shape):
    """It counted a sum that is written over its second term as new memory, and no gradient of the output.

    Gradients of weights are in the peak of both ways, with large weights too.
    """
    net, x = make(), torch.randn(shape)
    run = compiled(net)
    peak = peak_of(net, run, x)
    (graph,) = report(run).graphs
    assert graph.ours.peak == pytest.approx(peak, rel=0.01)
    assert min(graph.eager.peak, graph.ours.peak) >= sum(parameter.nbytes for parameter in net.parameters())


def test_a_second_network_runs_the_graphs_of_the_first_one():
    """PyTorch keeps graphs by the code of forward; the report knew the first network alone, and raised."""
    reports = []
    for width in (8, 8, 16):
        net = nn.Sequential(nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 4, 3))
        run = compiled(net)
        run(torch.randn(2, 3, 16, 16)).mean().backward()
        reports.append(report(run))
    assert reports[0].graphs == reports[1].graphs != reports[2].graphs


def test_a_break_is_named_with_its_cost():
    net = Net(broken=True)
    run = compiled(net)
    run(torch.randn(2, 3, 14, 14))
    found = report(run)
    first, second = found.graphs
    assert "test_training.py:" in first.ends
    assert first.returned == 2 * 8 * 10 * 10 * 4
    assert not second.ends
    text = str(found)
    assert "Net: 2 graphs" in text
    assert "graph_break()" in text
    assert "recomputed         " in text
    eager, ours = found.kept
    assert f"All graphs keep {eager / 1024:.1f} KiB -> {ours / 1024:.1f} KiB" in text
    assert [graph["calls"] for graph in json.loads(found.to_json())["graphs"]] == [first.calls, second.calls]


def test_a_part_of_a_model_and_a_function_have_reports():
    net = nn.Sequential(nn.Conv2d(3, 3, 1), Net())
    net[1].compile(backend="fusedseg", options={"codegen": "aten"})
    net(torch.randn(2, 3, 14, 14))
    assert len(report(net).graphs) == 1

    @torch.compile(backend="fusedseg", options={"codegen": "aten"})
    def square(x):
        return (x * x).sum()

    square(torch.ones(3, requires_grad=True))
    assert report(square).name == "square"
    assert "runs without a backward" not in str(report(square))
    with torch.no_grad():
        square(torch.ones(3))
    assert "runs without a backward" in str(report(square))


def test_anomaly_mode():
    """Counting eager mode looked for NaN in tensors without values, and raised DataDependentOutputException."""
    net = Net()
    run = compiled(net)
    with torch.autograd.set_detect_anomaly(True):
        run(torch.randn(2, 3, 14, 14)).mean().backward()
        (graph,) = report(run).graphs
        assert torch.is_anomaly_check_nan_enabled()
    assert graph.ours.kept < graph.eager.kept


def test_symbolic_sizes_are_counted_at_those_of_the_capture():
    """The report said "its bytes are not counted", and not what such a graph does without."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    run = compiled(net, dynamic=True)
    # Equal sizes would be one symbol.
    x = torch.randn(2, 3, 16, 24)
    ours = kept(net, run, [x])
    (graph,) = report(run).graphs
    assert graph.symbolic
    assert (graph.ours.kept, graph.eager.kept) == (ours, kept(net, net, [x]))
    assert "several sizes      counted at those of the capture" in str(report(run))
    # Counting has asked nothing that became a guard.
    run(torch.randn(4, 3, 32, 40)).mean().backward()
    assert report(run).graphs == [graph]
    torch._dynamo.reset()
    compiled(net)(x).mean().backward()
    of_one_size = report(net).graphs[-1]
    assert (of_one_size.eager, of_one_size.ours.kept) == (graph.eager, graph.ours.kept)


def test_what_the_peak_consists_of():
    """A network with large weights and a small image peaked at 0.98 of eager mode, and nothing said why."""
    net = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 256, 3), nn.ReLU(), nn.Conv2d(256, 64, 3))
    run = compiled(net, dynamic=False)
    run(torch.randn(1, 3, 8, 8)).mean().backward()
    (graph,) = report(run).graphs
    assert sum(graph.at_peak.values()) == graph.ours.peak
    assert graph.at_peak["gradients of parameters"] > 0.8 * graph.ours.peak
    run(torch.randn(8, 3, 64, 64)).mean().backward()
    large = report(run).graphs[-1]
    assert large.at_peak["gradients of parameters"] < 0.2 * large.ours.peak
    assert f"the peak is        {large.at_peak['kept'] / 2**20:.1f} MiB kept, " in str(report(run))


def test_what_is_packed_and_what_needs_more_bits():
    """Tensors with 8 bits where 4 were asked for had no reason in the report."""
    layers = [nn.Conv2d(3, 16, 3)]
    for act in (nn.ReLU(), nn.ReLU(), nn.ReLU(), nn.GELU(), nn.GELU()):
        layers += [nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16), act]
    net = nn.Sequential(*layers, nn.Conv2d(16, 8, 3))
    found = estimate(net, (4, 3, 64, 64), options={"codegen": "aten", "bits": 4})
    assert found.graphs[0].packed == {"4 bits": 4, "8 bits (gelu reads them)": 2}
    assert "packed tensors     4 in 4 bits, 2 in 8 bits (gelu reads them)\n" in str(found)


def test_a_model_that_was_not_compiled_raises():
    with pytest.raises(ValueError, match=r"fusedseg.compiler.report: the backend has compiled no graph of Net; call"):
        report(Net())
