"""The codegen where none is named: by the bytes that kernels of both would move, without generating code twice."""

import json
import sys
import warnings

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fusedseg.compiler import estimate, report, traffic
from fusedseg.compiler.codegen import aten as codegen
from tests.tools.spy import spied

from .networks import compiled, needs_inductor

N = 64
FULL = N * N * 4


def graph_of(function, *inputs) -> fx.Graph:
    return make_fx(function, tracing_mode="fake")(*inputs).graph


def two() -> list[torch.Tensor]:
    return [torch.randn(N, N) for _ in range(2)]


@pytest.mark.parametrize(
    ("function", "aten", "inductor"),
    [
        pytest.param(lambda a, b: torch.relu(a) + b, 5, 3, id="chain"),
        pytest.param(lambda a, b: (torch.sigmoid(a) * torch.tanh(b)).exp(), 9, 3, id="two branches of one kernel"),
        pytest.param(lambda a, b: torch.relu(a) @ b, 5, 5, id="a product is a kernel of its own"),
        pytest.param(lambda a, b: torch.relu(torch.relu(a) @ b), 7, 7, id="ops before and behind a product"),
        # The sum waits for the product, which waits for the first function: it cannot join the kernel of that.
        pytest.param(lambda a, b: (c := torch.relu(a)) + c @ b, 8, 8, id="a shortcut around a product"),
        pytest.param(lambda a, b: torch.softmax(a + b, 1) * b, 8, 3, id="a softmax joins"),
        pytest.param(lambda a, b: a.t() + b.view(-1).view(N, N), 3, 3, id="views move nothing"),
    ],
)
def test_bytes(function, aten, inductor):
    found = traffic.moved_by(graph_of(function, *two()))
    assert found == (aten * FULL, inductor * FULL)


def test_a_sum_ends_the_kernel_of_what_it_adds():
    found = traffic.moved_by(graph_of(lambda a, b: torch.relu(a + b).sum(1, keepdim=True) * a, *two()))
    vector = N * 4
    # An op each: 3, 2, 1 and 2 tensors, and a vector written and read.
    assert found.aten == 8 * FULL + 2 * vector
    # Two kernels: the first reads both, and the second reads one and the vector.
    assert found.inductor == 2 * FULL + vector + 2 * FULL + vector


def test_a_slice_is_read_in_part_and_what_is_expanded_once():
    found = traffic.moved_by(graph_of(lambda a, b: a[: N // 2] + b[0].expand(N // 2, N), *two()))
    assert found.aten == FULL // 2 + N * 4 + FULL // 2


class Blocks(nn.Module):
    """ConvNeXt blocks: a norm over channels, two products, and a scaled shortcut."""

    def __init__(self, channels: int = 16, depth: int = 3):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(channels) for _ in range(depth))
        self.inner = nn.ModuleList(nn.Linear(channels, 4 * channels) for _ in range(depth))
        self.outer = nn.ModuleList(nn.Linear(4 * channels, channels) for _ in range(depth))
        self.scale = nn.Parameter(torch.ones(channels))

    def forward(self, x):
        for norm, inner, outer in zip(self.norms, self.inner, self.outer, strict=True):
            x = x + self.scale * outer(nn.functional.gelu(inner(norm(x))))
        return x


def block() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))


@needs_inductor
def test_each_graph_chooses(monkeypatch, kernels_that_do_nothing):
    """Nobody generates code for the codegen that is not chosen."""
    emitted = spied(monkeypatch, codegen, "emit")
    blocks, x = Blocks(), torch.randn(2, 50, 16)
    out = torch.compile(blocks, backend="fusedseg")(x)
    out.square().mean().backward()
    assert not emitted
    text = str(report(blocks)).partition("\n")[0]
    assert "; codegen inductor, whose kernels move " in text
    # An unchanged choice without a gradient.
    with torch.no_grad():
        torch.compile(blocks, backend="fusedseg")(x)
    assert not emitted
    net = block()
    torch.compile(net, backend="fusedseg")(torch.randn(2, 3, 8, 8)).mean().backward()
    assert len(emitted) == 2
    (graph,) = report(net).graphs
    assert graph.codegen == "aten"
    assert json.loads(report(net).to_json())["graphs"][0]["moved"]["aten"] == graph.moved.aten > 0


@needs_inductor
def test_an_estimate_has_the_choice_of_a_run():
    found = estimate(Blocks(), (2, 50, 16))
    (graph,) = found.graphs
    assert graph.codegen == "inductor"
    assert graph.stock is not None
    named = estimate(Blocks(), (2, 50, 16), options={"codegen": "aten"})
    assert str(named).partition("\n")[0].endswith("; codegen aten, which the options name")


def test_without_a_compiler_pytorchs_kernels_run(monkeypatch, compiled_afresh):
    home = sys.modules["fusedseg.compiler.backend"]
    monkeypatch.setattr(home._torch, "inductor_problem", lambda: "there is no C++ compiler (Missing)")
    blocks, x = Blocks(), torch.randn(2, 50, 16)
    # The options of Inductor ask for it, and so does the choice of a graph where none is named.
    for options in ({"inductor": {"epilogue_fusion": True}}, {}):
        torch._dynamo.reset()
        home.say_once.cache_clear()
        with pytest.warns(UserWarning, match=r"codegen='aten'\), because Inductor cannot work here: there is no C\+\+"):
            torch.compile(blocks, backend="fusedseg", options=options)(x).mean().backward()
        torch._dynamo.reset()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.compile(blocks, backend="fusedseg", options=options)(x).mean().backward()
    with pytest.raises(Exception, match="codegen='inductor' cannot work here"):
        compiled(blocks, "inductor")(x)
    with warnings.catch_warnings():
        # A graph whose choice it is anyway says nothing.
        warnings.simplefilter("error")
        torch.compile(block(), backend="fusedseg")(torch.randn(2, 3, 8, 8)).mean().backward()
    home.say_once.cache_clear()
