"""``fusedseg.plan``: batches that fit, the ways that it tries, and its answer."""

import sys
from functools import partial

import pytest
import torch
from torch import nn

import fusedseg
from fusedseg import _torch, plan
from fusedseg._sizes import parse_bytes
from fusedseg.compiler import NotCompiled
from fusedseg.compiler.capture import prepare
from fusedseg.memory.step_bytes import StepBytes
from fusedseg.planning.answer import Option, Plan
from fusedseg.planning.ways import BACKEND, CONVERT, EAGER, Way
from tests.nnunet import PlainConvUNet

MIB = 2**20
SHAPE = (3, 64, 64)
# A step of AdamW takes half of the time, and only adds two tensors for each parameter.
step_alone = partial(plan, optimizer=None, reserve=0.0)


def chain(norm_act):
    """Makes two blocks."""
    blocks = (nn.Sequential(nn.Conv2d(i, o, 3, padding=1), norm_act(o)) for i, o in ((3, 16), (16, 4)))
    return nn.Sequential(*blocks)


PLAIN = partial(chain, lambda channels: nn.Sequential(nn.BatchNorm2d(channels), nn.LeakyReLU(0.01, inplace=True)))


def convert(model):
    return chain(fusedseg.InPlaceABN)


@pytest.fixture
def backend(monkeypatch):
    """Replaces what counts the backend: compiling takes seconds.  The test says what a batch needs."""

    def replaced(needs):
        asked = []

        def of_backend(model, inputs, ways):
            asked.append((len(inputs[0]), [way.label for way in ways]))
            return [needs(len(inputs[0]), way) for way in ways], None

        # The package has a function of the module's name.
        monkeypatch.setattr(sys.modules["fusedseg.planning.plan"], "of_backend", of_backend)
        return asked

    return replaced


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("16GiB", 16 * 2**30), ("24 GB", 24 * 10**9), ("1.5MiB", 3 * 2**19), ("800mib", 800 * 2**20), (123, 123)],
)
def test_budgets(text, nbytes):
    assert parse_bytes("plan", text) == nbytes


@pytest.mark.parametrize("text", ["16", "16 G", "16 Gi", "lots", "-1GiB", "0GiB", 0, -5])
def test_budgets_that_are_none(text):
    with pytest.raises(ValueError, match="budget must be"):
        parse_bytes("plan", text)


def test_the_largest_batches_fit_and_one_more_does_not():
    """A plan without stubs, in the terms of ``profile``."""
    net, half = partial(PlainConvUNet, widths=(8, 16)), torch.float16
    # Autocast would double the number of ways.
    found = step_alone(net, (1, 16, 16, 16), "8MiB", codegen="aten", dtype=half)
    options = {option.label: option for option in found.options}
    assert options["fusedseg"].batch > options["eager"].batch > 0
    for label in ("eager", "fusedseg"):
        batch = options[label].batch
        for n, fits in ((batch, True), (batch + 1, False)):
            of = fusedseg.profile(net, (n, 1, 16, 16, 16), options={"codegen": "aten"}, convert=None, dtype=half)
            total = sum(of.before.values()) + of.ways[label].with_workspaces
            assert (total <= 8 * MIB * (1.01 if fits else 0.99)) == fits, label
    for label in ("convert", "fusedseg+bits=4"):
        assert label in options


def test_the_cheapest_way_to_a_batch(backend):
    backend(lambda n, way: StepBytes(MIB, 2 * MIB, 2 * MIB))
    ample = step_alone(PLAIN, SHAPE, "1GiB", batch=8, convert=convert)
    needs = {option.label: option.total for option in ample.options}
    # Everything fits, so nothing has to change.
    assert ample.cheapest.label == "eager"
    tight = step_alone(PLAIN, SHAPE, needs["convert"], batch=8, convert=convert)
    assert tight.cheapest.label in ("convert", "fusedseg")
    assert not {option.label: option.fits for option in tight.options}["eager"]
    least = min(needs.values())
    with pytest.raises(ValueError, match=r"with batch 8 does not fit in .*: the leanest way, .*, and 1 B are missing"):
        step_alone(PLAIN, SHAPE, least - 1, batch=8, convert=convert)


def test_budgets_buy_larger_batches(backend):
    """Those of the backend, if no batch is wanted."""
    asked = backend(
        lambda n, way: StepBytes(n * MIB, 0, n * MIB if "budget" in way.options else 2 * n * MIB, 0.1),
    )
    found = step_alone(nn.Conv2d(3, 8, 3), (3, 8, 8), 64 * MIB, convert=None)
    options = {option.label: option for option in found.options}
    ways = [options[f"fusedseg{more}"] for more in ("", "+budget=0.4", "+budget=0.2")]
    assert [way.batch for way in ways] == [31, 63, 63]
    assert all(way.total <= 64 * MIB < way.total * (way.batch + 1) / way.batch for way in ways)
    # Each compilation takes seconds, so two tell the batches of all ways; a third one told which budgets to ask for.
    assert [n for n, _ in asked] == [2, 31] * 2


def test_a_wanted_batch_gets_a_peak_of_the_backend(backend):
    """The stock model compiled does not fit, and with a budget it does; the state of the optimizer is not in it."""
    backend(lambda n, way: StepBytes(8 * MIB, *[(9 if "budget" in way.options else 19) * MIB] * 2, 0.1))
    net = nn.Sequential(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 3, 3)))
    found = plan(net, (3, 512, 512), 20 * MIB, batch=2, optimizer=torch.optim.AdamW, reserve=0.0)
    (of,) = (option for option in found.options if option.way.kind == BACKEND and option.fits and not option.way.amp)
    owned = sum(p.nbytes for p in net.parameters())
    inputs, state = 2 * 3 * 512 * 512 * 4, 2 * owned + 4 * 4
    assert of.total == 9 * MIB + owned + inputs + state
    assert of.way.options["budget"] == "peak 19.99MiB"
    assert of.code == 'model = torch.compile(model, backend="fusedseg", options={"budget": "peak 19.99MiB"})'
    assert found.exact is of
    assert str(found).endswith(of.code)


def test_a_wanted_batch_that_is_far_from_fitting():
    """The peak that the backend was asked for was rounded to "peak 0MiB", which the backend refuses."""
    with pytest.raises(ValueError, match=r"with batch 8 does not fit in 4.0 KiB: the leanest way, .*are missing"):
        step_alone(nn.Conv2d(3, 8, 3), (3, 16, 16), "4KiB", batch=8, convert=None, codegen="aten")


def test_a_model_that_does_not_compile_has_no_rows_of_the_backend(backend):
    def refused(n, way):
        raise NotCompiled("fusedseg.compiler.estimate: a reason")

    backend(refused)
    found = plan(nn.Conv2d(3, 8, 3), (3, 8, 8), "1GiB")
    assert found.left_out == {"fusedseg": "a reason", "fusedseg+amp": "a reason"}
    assert "Left out: fusedseg, fusedseg+amp: a reason." in str(found)


def test_what_cannot_be_the_answer_is_not_traced(backend):
    """Budgets that are met without one, and autocast of a model in half precision: three minutes for one network."""
    backend(lambda n, way: StepBytes(0, MIB * n, MIB * n))
    found = plan(PLAIN, SHAPE, "64MiB", dtype=torch.float16)
    labels = ["eager", "convert", "fusedseg", "fusedseg+bits=8", "fusedseg+bits=4"]
    assert [option.label for option in found.options] == labels


def test_a_codegen_is_chosen_once(monkeypatch):
    """A choice of Inductor traces a model twice, and each batch chose anew: MONAI's SwinUNETR took many minutes."""

    class Gated(nn.Conv2d):
        def forward(self, x):
            y = super().forward(x)
            return y.sigmoid() * y.tanh() * y.exp() * y.sin()

    traced, rewrite = [], prepare.prepare
    monkeypatch.setattr(
        prepare,
        "prepare",
        lambda module, asked, **more: traced.append(asked.codegen) or rewrite(module, asked, **more),
    )
    monkeypatch.setattr(_torch, "inductor_problem", lambda: "")
    plan(partial(Gated, 3, 8, 3), (3, 16, 16), "1GiB", convert=None)
    assert traced == [None, "inductor", "inductor"] * 2


def test_progress_names_what_is_estimated(backend):
    backend(lambda n, way: StepBytes(MIB, MIB, MIB))
    said = []
    plan(PLAIN, SHAPE, "1GiB", batch=4, progress=said.append)
    labels = ["eager", "convert", "fusedseg"]
    assert said == [f"{label}{amp}, batch 4" for amp in ("", "+amp") for label in labels]


def option(way, batch, repeated=0.0, total=1):
    return Option(way, batch, total, batch, True, total, 0, repeated)


def test_what_gains_nothing_is_marked():
    """The plan did not say that a way gained nothing over a simpler one, but repeated arithmetic."""
    options = (
        option(Way(EAGER), 100),
        option(Way(BACKEND), 200),
        option(Way(BACKEND, options={"budget": 0.4}), 200, 0.95),
    )
    found = Plan("Net", options, 10, 10, None)
    lines = {line.split()[0]: line for line in found.table().splitlines()[2:]}
    assert lines["fusedseg+budget=0.4"].endswith("95.0%  no gain over fusedseg")
    assert not any("no gain" in lines[label] for label in ("eager", "fusedseg"))
    assert found.choices == [options[1]]
    assert "More arithmetic buys no larger batch." in str(found)
    # If the batch is given, less memory is the gain.
    needs = (option(Way(EAGER), 8, 0.0, 5), option(Way(CONVERT), 8, 0.0, 5))
    assert "no gain over eager" in Plan("Net", needs, 10, 10, 8).table()


def test_the_plan_names_the_useful_choices():
    options = (
        option(Way(EAGER), 100),
        option(Way(BACKEND, amp=True), 200),
        option(Way(BACKEND), 150),
        option(Way(BACKEND, amp=True, options={"budget": 0.3}), 220, 0.1),
    )
    found = Plan("Net", options, 10, 10, None)
    assert found.choices == [options[1], options[3]]
    text = str(found)
    assert "Largest batch without repeated arithmetic: 200, with fusedseg+amp." in text
    assert "Without autocast, which rounds to half precision: 150, with fusedseg." in text
    assert "10.0% of repeated arithmetic buys 220 (+10.0%), with fusedseg+amp+budget=0.3." in text
    assert found.to_dict()["choices"] == ["fusedseg+amp", "fusedseg+amp+budget=0.3"]


def test_noisy_ways_come_last():
    """8 and 4 bits are named after all exact ways, and never marked as better than one."""
    noisy = [option(Way(BACKEND, options={"bits": bits}), batch) for bits, batch in ((8, 300), (4, 500))]
    options = (option(Way(CONVERT), 100), option(Way(BACKEND, options={"budget": 0.4}), 150, 0.1), *noisy)
    found = Plan("Net", options, 10, 10, None)
    assert found.cheapest is found.exact is options[0]
    assert found.choices == list(options[:2])
    text = str(found)
    assert text.index("buys 150") < text.index("With noise in the gradient: 300, with fusedseg+bits=8.")
    assert text.index("fusedseg+bits=8.") < text.index("With noise in the gradient: 500, with fusedseg+bits=4.")
    lines = {line.split()[0]: line for line in found.table().splitlines()[2:]}
    assert lines["fusedseg+bits=8"].endswith(" noise")
    # A wanted batch: an exact way comes first, however much arithmetic it repeats.
    found = Plan("Net", options[1:], 10, 10, 8)
    assert found.cheapest is options[1]
    assert "With noise in the gradient: fusedseg+bits=8, " in str(found)
    assert Plan("Net", options[2:], 10, 10, 8).cheapest is options[2]
