"""The entry point, the options, and who generates code."""

import copy
import importlib
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import fusedseg
from fusedseg import _torch
from fusedseg.compiler import backend
from fusedseg.compiler.codegen import inductor
from fusedseg.compiler.settings import Settings, parse, say_once
from fusedseg.progress import Progress
from tests.compiler.networks import compiled, kept, make, needs_inductor, results, same

OPTIONS = "codegen, budget, extra_flops, bits, seed, cudagraphs, memory_format, fused_convolutions, inductor"


def net():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Conv2d(2, 1, 1))


def test_the_entry_point_names_the_backend():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert "[project.entry-points.torch_dynamo_backends]" in text
    assert f'fusedseg = "{backend.__module__.rpartition(".")[0]}:{backend.__name__}"' in text


def test_a_long_compilation_shows_what_it_does(monkeypatch):
    """The first step took up to a minute without a sign of life."""
    shown = []
    monkeypatch.setattr(Progress, "update", lambda self, text: shown.append(text))
    compiled(net())(torch.randn(1, 1, 5, 5)).sum().backward()
    assert shown == [
        "tracing forward and backward", "choosing what forward keeps", "code of forward", "code of backward"
    ]  # fmt: skip


def streams(of):
    """A graph whose sum runs on another stream: as Dynamo notes it, or by an op that waits for the stream."""
    module = importlib.import_module("torch._dynamo.variables.streams")
    if not hasattr(module, "wait_event"):
        pytest.skip("this PyTorch traces no streams")
    graph = torch.fx.Graph()
    y = graph.call_function(torch.add, (graph.placeholder("x"), 1))
    if of == "note":
        y.meta["custom"] = {"stream": 1}
    else:
        graph.call_function(torch.ops.streams.wait_event, (0, 1))
    graph.output((y,))
    return torch.fx.GraphModule(nn.Module(), graph)


@pytest.mark.parametrize("of", ["note", "op"])
def test_a_graph_with_streams_is_left_to_pytorch(of, monkeypatch):
    """Nodes that this package writes have no note of a stream, and would run on the current one, unordered."""
    say_once.cache_clear()
    with pytest.warns(UserWarning, match="a graph with streams of its own is left to PyTorch"):
        run = backend(streams(of), [torch.ones(2)], options={"codegen": "aten"})
    if of == "note":
        assert torch.equal(run(torch.ones(2))[0], torch.full((2,), 2.0))
    given = {}
    parts = _torch.compiler_parts()
    parts.compile_fx = lambda module, inputs, config_patches: given.update(config_patches)
    monkeypatch.setattr(_torch, "compiler_parts", lambda: parts)
    monkeypatch.setattr(_torch, "inductor_problem", lambda: "")
    backend(streams(of), [torch.ones(2)], options={"inductor": {"max_autotune": True}})
    assert given == {"max_autotune": True}


def test_caches_know_what_is_left_out(monkeypatch):
    """Inductor's cache would hand out code that was compiled with what is left out now."""
    found = set()
    for without in ("", "channels_last", "channels_last,one_channel"):
        monkeypatch.setenv("FUSEDSEG_WITHOUT", without)
        found |= {Settings().identity, inductor.BeforeOthers(Settings()).uuid()}
    assert len(found) == 6


def test_the_package_in_place_of_its_name():
    # Lightning copies the arguments of torch.compile.
    assert copy.deepcopy({"backend": fusedseg}) == {"backend": fusedseg}
    run = torch.compile(net(), backend=fusedseg)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r'write its name.*backend="fusedseg"'):
        run(torch.randn(1, 1, 5, 5))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"budgets": 1}, f"options must be among {OPTIONS}, got 'budgets'"),
        ({"codegen": "triton"}, r"codegen must be one of inductor, aten, got 'triton'"),
        ({"inductor": 3}, r"inductor must be a dict"),
        ({"codegen": "aten", "inductor": {"max_autotune": True}}, r"has no effect with codegen='aten'"),
        ({"bits": 3}, "option bits must be 8, 4 or None, got 3"),
        ({"cudagraphs": 1}, "option cudagraphs must be True or False, got 1"),
        ({"fused_convolutions": None}, "option fused_convolutions must be True or False, got None"),
        ({"bits": True}, "option bits must be 8, 4 or None, got True"),
        ({"bits": 8.0}, "option bits must be 8, 4 or None, got 8.0"),
        ({"seed": 1.0}, "option seed must be an integer, got float"),
        ({"seed": 1 << 64}, "option seed must fit into 64 bits, got 18446744073709551616"),
        ({"memory_format": "rows"}, r"option memory_format must be torch.channels_last, .*, got 'rows'"),
        ({"extra_flops": -1}, "extra_flops must be finite and at least 0"),
        ({"extra_flops": "all"}, "extra_flops must be a number such as 0.02"),
    ],
)
def test_wrong_options_raise(options, text):
    with pytest.raises((ValueError, TypeError), match=text):
        parse(options)


@pytest.mark.parametrize(
    "budget",
    [0, 3, 1000, -1, True, 0.0, -0.5, 1.5, float("nan"), float("inf"), [0.3], "0.3", "0%", "200%", "-3%", "30 %", "%",
     "3", "3G", "6 apples", "0GiB", "-3GiB", "", "peak", "peak much", "peak 0B", "peak 30%", "peak 3"],
)  # fmt: skip
def test_what_is_no_budget_raises(budget):
    """``budget=3`` was taken for three bytes, and no error for a text or a number of bytes showed a share."""
    with pytest.raises((ValueError, TypeError), match=r"budget must be .*0\.3 .*'3GiB'.*") as raised:
        parse({"budget": budget})
    assert str(raised.value).endswith(f"got {budget!r}")


def test_a_share_in_percent():
    """The text "30%" was refused."""
    assert parse({"budget": "30%"}).limits == parse({"budget": 0.3}).limits
    assert parse({"budget": " 100%"}).limits == parse({"budget": 1.0}).limits
    assert parse({"budget": "2.5%"}).limits.bytes_of(1000) == 25


def test_wrong_options_raise_through_torch_compile():
    run = torch.compile(net(), backend="fusedseg", options={"speed": "high"})
    with pytest.raises(Exception, match=f"options must be among {OPTIONS}, got 'speed'"):
        run(torch.randn(2, 1, 6, 6))


def test_modes_are_those_of_inductor():
    with pytest.raises(ValueError, match="codegen='aten' takes 'default' and 'reduce-overhead'"):
        backend(torch.fx.symbolic_trace(net()), [], options={"codegen": "aten"}, mode="max-autotune")


@needs_inductor
@pytest.mark.parametrize("name", [pytest.param("ResNet", marks=pytest.mark.slow), "plain"])
def test_inductor(name):
    """Values of eager mode up to rounding, which is small in float64, and fewer bytes; the default codegen."""
    model, inputs = (net(), [torch.randn(2, 1, 6, 6)]) if name == "plain" else make(name)
    model, inputs = model.double(), [x.double() for x in inputs]
    twin = copy.deepcopy(model)
    run = torch.compile(model, backend="fusedseg", options={"inductor": {"layout_optimization": False}})
    for found, wanted in zip(results(model, run, inputs, 1), results(twin, twin, inputs, 1), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-9)
    assert kept(model, run, inputs) < 0.7 * kept(twin, twin, inputs)


@pytest.mark.slow
@needs_inductor
def test_inductor_copies_no_weights_and_no_maps():
    """Forward gave backward copies of the weights in channels_last, and backward interpolated again."""
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(2))
    model = nn.Sequential(nn.Conv2d(3, 16, 3), *blocks, nn.Upsample(scale_factor=2), nn.Conv2d(16, 4, 1)).double()
    twin, x = copy.deepcopy(model), torch.randn(2, 3, 12, 12, dtype=torch.float64)
    run = compiled(model, "inductor")
    for found, wanted in zip(results(model, run, [x], 1), results(twin, twin, [x], 1), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-9)
    assert kept(model, run, [x]) <= kept(twin, compiled(twin, "aten"), [x])


@pytest.mark.slow
@needs_inductor
@pytest.mark.parametrize("kernels", ["auto", "triton"])
def test_caches_cold_and_warm(kernels, needs_interpreter, monkeypatch):
    """A second compilation finds the first one's code; AOTAutograd's cache does not bypass the partitioner's name.

    With Triton's kernels norms are ops of this package in the captured graph.  The cache takes ops, and no functions.
    """
    monkeypatch.setattr(fusedseg, "backend", kernels)
    from torch._dynamo.utils import counters
    from torch._inductor.utils import fresh_cache

    def found():
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        model = net()
        values = results(model, compiled(model, "inductor"), [torch.randn(2, 1, 6, 6)], 1)
        return values, dict(counters["aot_autograd"])

    with fresh_cache():
        cold, first = found()
        warm, second = found()
    assert (first["autograd_cache_miss"], second["autograd_cache_hit"]) == (1, 1)
    assert not {"autograd_cache_bypass"} & {*first, *second}
    assert same(cold, warm)


def test_caches_know_each_file_that_decides():
    """A new table of cheap ops, or another form of packed bits, left code in the caches that the old one had made."""
    deciding = ("fusedseg.compiler.", "fusedseg.ops.")
    used = {module.__file__ for name, module in [*sys.modules.items()] if name.startswith(deciding)}
    assert len(used) > 20
    assert used <= set(inductor.FILES)
