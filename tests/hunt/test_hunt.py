"""Random programs run in the scope, random networks go through ``convert``, and the hunt finds a defect."""

import collections
import json
import re
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional

from fusedseg.scope import saved
from tests.hunt import compiled, crew, prelude
from tests.hunt.grow import grown
from tests.hunt.judge import Verdict, judged, quiet, shrunk
from tests.hunt.networks import grown_network
from tests.hunt.prelude import LATER
from tests.hunt.program import Block, Program, Step, nodes


def found_nothing(report: crew.Report, least: int) -> None:
    """Fails with the shrunk programs, or if fewer than ``least`` programs ran to their end."""
    print(report)
    assert not report.failures, f"{report}\n\n{report.programs()}"
    assert report.counts["same"] >= least, report


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("kind", "count", "least"), [("programs", 30, 22), ("networks", 15, 12)])
def test_a_few(kind, count, least, tmp_path):
    """They run in this process, which saves the start of a worker: a crash of PyTorch would end it."""
    crew.work(kind, range(count), tmp_path / "verdicts")
    report = crew.Report(kind)
    for line in map(json.loads, (tmp_path / "verdicts").read_text().splitlines()):
        report.take(line)
    found_nothing(report, least)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", ["compiled", "compiled-networks", "compiled-budgets", "compiled-bits"])
def test_a_few_that_are_compiled(kind, tmp_path):
    crew.work(kind, (5, 8), tmp_path / "verdicts")
    lines = map(json.loads, (tmp_path / "verdicts").read_text().splitlines())
    verdicts = [Verdict(*line["verdict"]) for line in lines if "verdict" in line]
    assert [v.kind for v in verdicts] == ["same", "same"], verdicts


@pytest.mark.parametrize(("ours", "kind"), [(2.0, "as aot_eager"), (4.0, "failure")])
def test_after_a_backward_pass_that_eager_mode_refuses_the_bits_of_interpolation_count(ours, kind):
    """aot_eager has other bits than the backend there, and the same with interpolation as the backend computes it."""

    def log(value, error=None):
        found = prelude.Log()
        found.error = error
        if error is None:
            found.note("gradient", torch.tensor(value))
        return found

    refused = log(0.0, RuntimeError("a tensor has been modified by an inplace operation"))
    runs = iter([refused, log(1.0), log(ours), log(2.0), refused])
    assert prelude.compiled_difference(lambda how: [next(runs)], False)[0] == kind


@pytest.mark.usefixtures("one_thread")
def test_a_defect_of_the_backend_is_found(monkeypatch):
    """A product of the generated code is wrong."""
    from fusedseg.compiler import emit

    monkeypatch.setitem(emit.DIRECT, torch.ops.aten.mul.Tensor, lambda a, b: torch.mul(a, b) * 1.5)
    program = compiled.program(8)
    with quiet():
        assert judged(program).kind == "failure"
        assert exec_fails(str(program))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("shape", "layout", "forward"),
    [
        ((1, 4, 8, 8), "channels_last", lambda x: functional.mish(x.view_as(x) * 1)),
        ((2, 4, 1, 1), "strided", lambda x: x.movedim(1, -1) * 1.5 + x.movedim(1, -1)),
    ],
)
def test_the_stride_along_one_element_is_not_compared(shape, layout, forward):
    """Seeds 401 and 249: eager mode, PyTorch's compiled code and ours each give another one.  Other strides count."""

    def part(run, log):
        leaf = log.leaf("p1", 1, shape, layout=layout)
        prelude.finish(run(lambda: {"loss": forward(leaf).sum(), "t2": forward(leaf)})(), log)

    with quiet():
        assert prelude.compiled_difference(lambda how: prelude.outcome([part], how), False) == ("same", "")
    log = prelude.Log()
    log.note("x", torch.empty(2, 1, 3).transpose(0, 2))
    assert log.results[-1] == ("stride of x", "[1, 'any', 3]")


def test_compiled_code_that_raises_in_inference_mode_says_nothing_about_the_backend():
    """Seed 186: the mode stayed on, and so each later run of the same process raised."""

    def part(run, log):
        if run is not prelude.eager_call:
            torch.inference_mode().__enter__()
        raise RuntimeError("modified by an inplace operation" if run is prelude.eager_call else "no version counter")

    assert prelude.compiled_difference(lambda how: prelude.outcome([part], how), False)[0] == "impossible"
    assert not torch.is_inference_mode_enabled()


def test_what_a_compiled_function_writes_is_compared_without_a_loss():
    setup = Step("leaf", "p1 = log.leaf('p1', 1, (2, 4), torch.float32)")
    (log,) = compiled.Compiled(0, ((setup,), (Step("in place", "t1 = p1.detach().add_(1)"),))).run(prelude.eager_call)
    assert {"p1 after forward", "random numbers after forward"} <= {label for label, _ in log.results}


def exec_fails(text):
    try:
        exec(compile(text, "<wrong>", "exec"), {})
    except AssertionError as error:
        return "differs" in str(error)
    return False


def test_a_step_that_the_compiler_cannot_do_is_dropped_and_counted(tmp_path, monkeypatch):
    def refusing(graph, inputs):
        if any(node.target is torch.sinh for node in graph.graph.nodes):
            raise ValueError("not here")
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    steps = ("t1 = p1 * 2", "t2 = torch.sinh(t1)", "t3 = t1 + 1", "loss = t3.sum()")
    setup = (Step("leaf", "p1 = log.leaf('p1', 1, (2, 4), torch.float32)"),)
    body = tuple(Step("activation" if "sinh" in code else "loss", code) for code in steps)
    monkeypatch.setattr(prelude, "stock_backend", refusing)
    monkeypatch.setitem(crew.KINDS, "compiled", lambda seed: compiled.Compiled(seed, (setup, body)))
    crew.work("compiled", (0,), tmp_path / "verdicts")
    report = crew.Report("compiled")
    for line in (tmp_path / "verdicts").read_text().splitlines():
        report.take(json.loads(line))
    assert (report.counts, report.dropped) == ({"same": 1}, {"activation": 1})
    assert "PyTorch's compiler raises in 1 steps, which were dropped: {'activation': 1}" in str(report)


@pytest.mark.slow
def test_twenty_thousand_programs():
    found_nothing(crew.hunt("programs", range(20_000), jobs=2), least=15_000)


@pytest.mark.slow
def test_two_thousand_networks():
    found_nothing(crew.hunt("networks", range(2_000), jobs=2), least=1_700)


def size(program):
    return sum(1 for part in program.parts for _ in nodes(part))


@pytest.fixture
def broken(monkeypatch):
    """Makes every rebuilt tensor a little too large."""
    whole = saved.Recipe._rebuilt
    monkeypatch.setattr(saved.Recipe, "_rebuilt", lambda self, *of: whole(self, *of) * 1.5)


@pytest.mark.usefixtures("one_thread")
def test_a_broken_recipe_is_found_and_its_printed_program_shows_it(monkeypatch, request):
    program = next(p for p in map(grown, range(100, 200)) if judged(p).kind == "same" and size(p) > 20)
    exec(compile(str(program), "<right>", "exec"), {})
    request.getfixturevalue("broken")
    with quiet():
        programs = [p for p in map(grown, range(100, 120)) if judged(p).kind == "failure"]
    assert len(programs) > 5
    for program in programs[:2]:
        small = shrunk(program)
        assert size(small) < size(program) / 2
        with quiet(), pytest.raises(AssertionError, match="differs"):
            exec(compile(str(small), "<wrong>", "exec"), {})
    monkeypatch.undo()
    exec(compile(str(small), "<right again>", "exec"), {})


@pytest.mark.usefixtures("one_thread")
def test_a_printed_network_runs_and_shows_a_broken_recipe(request):
    networks = [grown_network(seed) for seed in range(12)]
    exec(compile(str(networks[0]), "<right>", "exec"), {})
    request.getfixturevalue("broken")
    wrong = [network for network in networks if judged(network).kind == "failure"]
    assert wrong
    small = shrunk(wrong[0])
    with pytest.raises(AssertionError, match="differs"):
        exec(compile(str(small), "<wrong>", "exec"), {})


class Constants(nn.Module):
    """Norms of constants, which magnify rounding by 1 / sqrt(eps)."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.InstanceNorm2d(4, affine=True)
        self.act, self.last = nn.ELU(), nn.InstanceNorm2d(4, affine=True)

    def forward(self, x):
        return self.last(self.act(self.norm(self.conv(x.sub(x))))).repeat(2, 1, 1, 1).flatten()


@pytest.mark.usefixtures("one_thread")
def test_rounding_that_the_stock_network_magnifies_is_no_failure():
    """A bias has a gradient of rounding alone, and network 325 counted its last bits as a failure once."""

    def constants():
        return prelude.seeded(Constants(), 325)

    prelude.check_network(constants, (2, 4, 8, 8))
    expected, other = (prelude.network_results(constants(), (2, 4, 8, 8), training=True) for _ in range(2))
    other["gradient of conv.bias"] = other["gradient of conv.bias"] + 1e-3
    rounded = prelude.network_results(prelude.rounded(constants()), (2, 4, 8, 8), training=True)
    assert prelude.results_differ(expected, other, rounded).startswith("gradient of conv.bias differs")


def test_a_bias_before_a_norm_has_a_gradient_of_zero_where_all_others_are_nan():
    """Network 1657: the square root of |LeakyReLU(0)| has infinite gradients."""
    nan, zero = torch.full((2,), torch.nan), torch.zeros(2)
    expected = {"output": zero, "gradient of m.weight": nan, "gradient of m.bias": nan}
    assert prelude.results_differ(expected, expected | {"gradient of m.bias": zero}) is None
    for others in ({"gradient of m.bias": zero + 1}, {"gradient of m.bias": zero, "gradient of m.weight": zero}):
        assert prelude.results_differ(expected, expected | others).endswith("it is not a number elsewhere")


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_printed_program_runs_as_a_file(tmp_path):
    """A printed program needs the packages, and nothing of the tests."""
    file = tmp_path / "program.py"
    file.write_text(str(next(p for p in map(grown, range(200)) if judged(p).kind == "same")))
    assert "tests" not in re.findall(r"\w+", file.read_text())
    subprocess.run([sys.executable, "-W", "ignore", str(file)], cwd=tmp_path, check=True)


CRASHING = """
import sys
from tests.hunt import crew, prelude
from tests.hunt.__main__ import main
from tests.hunt.program import Program, Step
abort = "__import__('os').abort()"
codes = {3: abort, 5: f"scope is fusedseg.recompute and {abort}"}
crew.KINDS["programs"] = lambda seed: Program(seed, ((Step("crash", codes.get(seed, "pass")),),))
sys.exit(main())
"""


@pytest.mark.slow
def test_a_crash_does_not_end_the_hunt(monkeypatch):
    """A program that crashes in eager mode counts as PyTorch's fault, and one that crashes in the scope as a failure.

    All other programs still run.
    """
    monkeypatch.setattr(crew, "_command", lambda *words: [sys.executable, "-c", CRASHING, *map(str, words)])
    report = crew.hunt("programs", range(6))
    assert report.crashes == [3]
    assert list(report.failures.values()) == [[5]]
    assert report.counts == {"same": 4, "failure": 1, "crash of PyTorch": 1}


@pytest.mark.usefixtures("one_thread")
def test_what_a_verdict_is():
    def verdict(*codes, **options):
        steps = (Step("leaf", "p1 = log.leaf('p1', 1, (2, 4), torch.float32)"), *(Step("", code) for code in codes))
        return judged(Program(0, (steps,), **options)).kind

    assert verdict("log.note('sum', p1.sum())") == "same"
    assert verdict("torch.nonsense") == "raises"
    assert verdict("t2 = torch.tanh(p1)", "t2.add_(1)", "t2.sum().backward()") == "refused"
    assert verdict("import time", "log.note('time', torch.tensor(time.perf_counter_ns()))") == "unstable"
    assert verdict("log.note('scope', scope.__name__)") == "failure"
    assert verdict("with log.attempt(): p1.add_(1)") == "same"
    after = "with scope(): t2 = p1 * 1; t3 = F.relu(t2.add_(0)); t4 = t3.exp()"
    assert verdict(after, "t2.mul_(2)", "t4.sum().backward()", writes_outside=True) in ("same", "documented")


@pytest.mark.usefixtures("one_thread")
def test_programs_are_of_every_kind():
    """Each kind of step occurs in at least two of the first 120 programs."""
    with quiet():
        programs = [grown(seed) for seed in range(120)]
    kinds = collections.Counter(node.kind for p in programs for part in p.parts for _, node in nodes(part))
    for kind in (
        "activation", "binary", "scalar", "cast", "view", "join", "split", "reduction", "product", "in place", "out",
        "complex", "custom Function", "convolution", "norm", "pool", "interpolate", "pad", "dropout", "embedding",
        "hidden write", "memory", "parameter change", "hook", "early backward", "odd", "inference features", "scope",
        "autocast", "checkpoint", "no_grad", "mode", "attempt", "stale cast",
    ):  # fmt: skip
        assert kinds[kind] >= 2, kind
    text = "\n".join(p.functions() for p in programs)
    for part in ("bfloat16", "float16", "float64", "cache_enabled=False", "use_reentrant=True", "use_reentrant=False",
                 "saved_tensors_hooks", "layout='strided'", "channels_last", "momentum=None",
                 "track_running_stats=False",
                 "inplace=True", "alpha=", "from_numpy", "(0, 4, 8, 8)", "(8, 6)", "(2, 4, 2, 2)", "out="):  # fmt: skip
        assert part in text, part
    assert sum(len(p.parts) == 2 for p in programs) >= 3
    assert (
        sum(len([1 for _, n in nodes(p.parts[0]) if isinstance(n, Block) and n.kind == "scope"]) > 2 for p in programs)
        > 9
    )


@pytest.mark.usefixtures("one_thread")
def test_networks_call_their_modules_and_get_every_habit():
    """The modules of networks were in fp32 once and their input in fp64, so each call raised and was left out."""
    with quiet():
        networks = [grown_network(seed) for seed in range(100)]
    texts = [network.functions().partition("def forward")[2] for network in networks]
    modules = [network.functions().partition("def forward")[0] for network in networks]
    called = sum(
        any(re.search(rf"self\.{name}\(", text) for name in re.findall(r"self\.(m\d+) = nn\.(?:Conv|Batch)", made))
        for text, made in zip(texts, modules, strict=True)
    )
    assert called >= 90
    assert {network.options["later"][0] for network in networks if "later" in network.options} == LATER.keys()


@pytest.mark.usefixtures("one_thread")
def test_a_seed_gives_one_program():
    with quiet():
        assert [str(grown(seed)) for seed in range(8)] == [str(grown(seed)) for seed in range(8)]
    torch.manual_seed(5)
    assert str(grown_network(3)) == str(grown_network(3))
