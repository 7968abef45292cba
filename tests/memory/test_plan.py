"""``plan`` and its strategies."""

from functools import partial

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import fusedseg
from fusedseg._sizes import parse_bytes
from fusedseg.compiler import partitions
from fusedseg.memory import checkpoint_blocks, plan, profile
from fusedseg.memory.plan import Option, Plan
from fusedseg.memory.search import largest
from fusedseg.memory.strategy import NotOneGraph, Partition, Strategy
from fusedseg.unet import UNet
from tests.resnet import ResNet18

MIB = 2**20
SHAPE = (3, 64, 64)
UNETS = {"plain": partial(UNet, 3, 4, widths=(8, 16, 32), plain=True), "ours": partial(UNet, 3, 4, widths=(8, 16, 32))}


def chain(norm_act):
    """Makes two blocks of two convolutions."""
    pairs = [(3, 16), (16, 16), (16, 16), (16, 4)]
    layers = [nn.Sequential(nn.Conv2d(*channels, 3, padding=1), norm_act(channels[1])) for channels in pairs]
    return nn.Sequential(*(nn.Sequential(*layers[i : i + 2]) for i in (0, 2)))


PLAIN = partial(chain, lambda channels: nn.Sequential(nn.BatchNorm2d(channels), nn.LeakyReLU(0.01, inplace=True)))


def convert(model):
    return chain(fusedseg.InPlaceABN)


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


def test_the_largest_batch_is_the_largest():
    """The search finds the largest batch on curves that are straight, convex, stepped or flat."""
    for total in (lambda n: 100 + 7 * n, lambda n: 50 + n * n, lambda n: 10 * n + (500 if n > 40 else 0)):
        found = largest(total, 1000)
        assert total(found) <= 1000 < total(found + 1)
    assert largest(lambda n: 1001, 1000) == 0
    assert largest(lambda n: 500 * n + 400, 1000) == 1
    assert largest(lambda n: 7, 1000) == 2**20

    # The search once walked along a bent curve one batch at a time, for hours.
    asked = []

    def bent(n, total):
        asked.append(n)
        return total(n)

    lines = {
        10_600: lambda n: max(70 * n, 100 * n - 60_000),
        31_333: lambda n: min(70 * n, 30 * n + 60_000),
        3_333: lambda n: max(60_000 + n, 300 * n + 100),
    }
    for expected, total in lines.items():
        asked.clear()
        assert largest(partial(bent, total=total), 1_000_000) == expected
        assert len(asked) < 25

    # The search once tried two more batches after the result, and each step takes seconds.
    asked.clear()
    assert largest(partial(bent, total=lambda n: 100 + 7 * n), 1000) == 128
    assert asked == [2, 4, 128]

    def not_alone(n):
        if n == 1:
            raise ValueError("Expected more than 1 value per channel when training")
        return 10 * n

    assert largest(not_alone, 1000) == 100
    assert largest(not_alone, 15) == 0


# A step of AdamW takes half of the time, and only adds two tensors for each parameter.
step_alone = partial(plan, optimizer=None)


@pytest.fixture(scope="module")
def found():
    """The largest batches; finding them takes a dozen steps for each combination."""
    return step_alone(PLAIN, SHAPE, "64MiB", convert=convert, reserve=0.25)


def test_largest_batches_fit_and_one_more_does_not(found):
    assert [option.label for option in found.options] == [
        "eager", "checkpoint", "amp", "amp+checkpoint",
        "fusedseg", "fusedseg+checkpoint", "fusedseg+amp", "fusedseg+amp+checkpoint",
    ]  # fmt: skip
    assert found.usable == 48 * 2**20
    by_label = {option.label: option for option in found.options}
    assert by_label["fusedseg"].batch > by_label["eager"].batch
    assert by_label["eager"].total <= found.usable
    assert by_label["eager"].repeated == 0 < by_label["checkpoint"].repeated
    batch = by_label["eager"].batch
    options = step_alone(PLAIN, SHAPE, found.usable, batch=batch + 1, reserve=0.0).options
    assert options[0].total > found.usable
    assert not options[0].fits


def test_the_plan_names_the_useful_choices(found):
    """The plan once named only the largest batch, with checkpoints and their cost.

    A batch that was nearly as large needed no checkpoints.
    """
    by_label = {option.label: option for option in found.options}
    first, *more = found.choices
    assert found.cheapest is first
    assert first.batch == max(option.batch for option in found.options if not option.repeated)
    assert [option.batch for option in found.choices] == sorted({option.batch for option in found.choices})
    assert f"Largest batch without repeated arithmetic: {first.batch}, with {first.label}." in str(found)
    assert f"Without autocast, which rounds to half precision: {by_label['fusedseg'].batch}, with fusedseg." in str(
        found
    )
    for option in more:
        assert option.repeated > first.repeated
        assert f"arithmetic buys {option.batch} (+" in str(found)
    assert found.to_dict()["choices"] == [option.label for option in found.choices]


def option(label, batch, repeated=0.0, total=1):
    return option_of(Strategy.parse(label), batch, repeated, total)


def option_of(strategy, batch, repeated=0.0, total=1):
    return Option(strategy, batch, total, batch, True, total, repeated)


def test_what_gains_nothing_is_marked():
    """The plan did not say that ``fusedseg+checkpoint`` gained nothing over ``fusedseg``, but repeated arithmetic."""
    options = (option("eager", 100), option("fusedseg", 200), option("fusedseg+checkpoint", 200, 0.95))
    found = Plan("Net", options, 10, 10, None)
    lines = {line.split()[0]: line for line in found.table().splitlines()[2:]}
    assert lines["fusedseg+checkpoint"].endswith("95.0%  no gain over fusedseg")
    assert not any("no gain" in lines[label] for label in ("eager", "fusedseg"))
    assert found.choices == [options[1]]
    assert "More arithmetic buys no larger batch." in str(found)
    # If the batch is given, less memory is the gain.
    needs = tuple(option(label, 8, r, total) for label, r, total in (("eager", 0.0, 5), ("checkpoint", 0.9, 5)))
    assert "no gain over eager" in Plan("Net", needs, 10, 10, 8).table()


def test_noisy_ways_come_last():
    """8 and 4 bits are named after all exact ways, and never marked as better than one."""
    noisy = [option_of(Strategy(compiled=True, bits=bits), batch) for bits, batch in ((8, 300), (4, 500))]
    options = (option("fusedseg", 100), option("checkpoint", 150, 0.1), *noisy)
    found = Plan("Net", options, 10, 10, None)
    assert found.cheapest is found.exact is options[0]
    assert found.choices == list(options[:2])
    text = str(found)
    assert text.index("buys 150") < text.index("With noise in the gradient: 300, with fusedseg-compile+bits=8.")
    assert text.index("fusedseg-compile+bits=8.") < text.index(
        "With noise in the gradient: 500, with fusedseg-compile+bits=4."
    )
    lines = {line.split()[0]: line for line in found.table().splitlines()[2:]}
    assert lines["fusedseg-compile+bits=8"].endswith(" noise")
    assert not any("no gain" in line for line in lines.values())
    # A wanted batch: an exact way comes first, however much arithmetic it repeats.
    found = Plan("Net", options[1:], 10, 10, 8)
    assert found.cheapest is options[1]
    assert "With noise in the gradient: fusedseg-compile+bits=8, " in str(found)
    assert Plan("Net", options[2:], 10, 10, 8).cheapest is options[2]


def test_a_model_without_blocks_is_planned_without_checkpoints():
    """``checkpoint_blocks`` raised an error, so no strategy was planned."""
    layers = [nn.Conv2d(3, 8, 3, padding=1), *(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4))]
    found = plan(nn.Sequential(*layers), SHAPE, "64MiB", convert=lambda model: model)
    assert [option.label for option in found.options] == ["eager", "amp", "fusedseg", "fusedseg+amp"]
    labels = ["checkpoint", "amp+checkpoint", "fusedseg+checkpoint", "fusedseg+amp+checkpoint"]
    assert list(found.left_out) == labels == list(found.to_dict()["left_out"])
    reason = "Sequential has no module with 1 to 4 convolutions or linear layers among its children"
    assert f"Left out: {', '.join(labels)}: {reason}." in " ".join(str(found).split())
    assert "buys" not in str(found)


def test_progress_names_what_is_estimated():
    said = []
    plan(PLAIN, SHAPE, "1GiB", batch=4, progress=said.append)
    labels = ["eager", "checkpoint", "amp", "amp+checkpoint"]
    assert said == [f"{label} ({i} of 4), batch 4" for i, label in enumerate(labels, 1)]


def test_the_cheapest_way_to_a_batch():
    ample = step_alone(PLAIN, SHAPE, "1GiB", batch=8, convert=convert)
    needs = {option.label: option.total for option in ample.options}
    # Everything fits, so nothing has to change.
    assert ample.cheapest.label == "eager"
    # Eager mode does not fit.  Checkpoints would fit too, but a strategy without repeated convolutions is cheaper.
    tight = step_alone(PLAIN, SHAPE, max(needs["fusedseg"], needs["checkpoint"]), batch=8, convert=convert, reserve=0.0)
    assert tight.cheapest.label in ("amp", "fusedseg")
    assert {o.label: o.fits for o in tight.options}["checkpoint"]
    least = min(needs.values())
    message = r"with batch 8 does not fit in .*: the leanest way, .*amp\+checkpoint, needs .*, and 1 B are missing"
    with pytest.raises(ValueError, match=message):
        step_alone(PLAIN, SHAPE, least - 1, batch=8, convert=convert, reserve=0.0)


def test_budgets_buy_larger_batches():
    """Those of the backend, if no batch is wanted."""

    def backend(model, inputs, ways, autocast):
        n = len(inputs[0])
        asked.append((n, len(ways)))
        return [Partition(n * MIB, n * MIB if "budget" in way else 2 * n * MIB, 0.1) for way in ways]

    asked = []
    found = plan(nn.Conv2d(3, 8, 3), (3, 8, 8), 64 * MIB, backend=backend, optimizer=None, reserve=0.0)
    options = {option.label: option for option in found.options}
    ways = [options[f"fusedseg-compile{more}"] for more in ("", "+budget=0.4", "+budget=0.2")]
    assert [way.batch for way in ways] == [31, 63, 63]
    assert all(way.total <= 64 * MIB < way.total * (way.batch + 1) / way.batch for way in ways)
    # Each compilation takes seconds, so two of them tell the batches of all ways.
    assert asked == [(2, 1), (31, 6)] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"budget": "1KiB"},
            "Sequential with batch 1 does not fit in 1.0 KiB, of which 10% are kept back: .* are missing",
        ),
        ({"reserve": 1.0}, "reserve must be at least 0 and below 1, got 1.0"),
        ({"batch": 0}, "batch must be at least 1, got 0"),
    ],
    ids=["budget", "reserve", "batch"],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        step_alone(PLAIN, (3, 32, 32), **{"budget": "1GiB", **options})


def test_blocks_are_the_largest_with_few_convolutions():
    assert checkpoint_blocks(ResNet18(10, 4)) == [
        "stem",
        "layers.0",
        *(f"layers.{i}.{j}" for i in (1, 2, 3) for j in (0, 1)),
    ]
    blocks = checkpoint_blocks(UNETS["plain"]())
    assert blocks == ["incs.0", "downs.0.0", "downs.0.1", "ups.0", "ups.1"]
    with pytest.raises(ValueError, match="ReLU has no module with 1 to 4 convolutions"):
        checkpoint_blocks(nn.ReLU())
    with pytest.raises(ValueError, match="limit must be at least 1, got 0"):
        checkpoint_blocks(PLAIN(), 0)


@pytest.mark.parametrize("make", UNETS.values(), ids=UNETS)
def test_checkpoints_change_no_gradient_and_keep_less(make):
    net, other = make().double(), make().double()
    other.load_state_dict(net.state_dict())
    checkpoint_blocks(other)
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    assert profile(other, x).saved < 0.7 * profile(net, x).saved
    for model in (net, other):
        model(x).square().mean().backward()
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad)


def test_labels_are_read_back():
    for label in ("eager", "amp", "fusedseg+amp+checkpoint", "fusedseg-compile+budget=0.3+bits=4"):
        assert Strategy.parse(label).label == label
    for label in ("fast", "amp+amp", "eager+amp", "", "fusedseg+bits=4", "fusedseg-compile+size=3"):
        with pytest.raises(ValueError, match="expected eager, or fusedseg, amp, checkpoint joined by"):
            Strategy.parse(label)


def test_a_wanted_batch_gets_a_peak_of_the_backend():
    """The stock model compiled does not fit, and with a budget it does; the state of the optimizer is not in it."""
    asked = []

    def backend(model, inputs, ways, autocast):
        asked.extend((options, autocast) for options in ways)
        return [
            Partition(8 * MIB, (9 if "budget" in way else 19) * MIB, 0.1 if "budget" in way else 0.0) for way in ways
        ]

    net = nn.Sequential(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 3, 3)))
    found = plan(net, (3, 512, 512), 20 * MIB, batch=2, backend=backend, optimizer=torch.optim.AdamW, reserve=0.0)
    (of,) = (option for option in found.options if option.strategy.compiled and option.fits and not option.strategy.amp)
    owned = sum(p.nbytes for p in net.parameters())
    inputs, state = 2 * 3 * 512 * 512 * 4, 2 * owned + 4 * 4
    assert of.total == 9 * MIB + owned + inputs + state
    assert of.strategy.budget == "peak 19.99MiB"
    assert of.code == 'model = torch.compile(model, backend="fusedseg", options={"budget": "peak 19.99MiB"})'
    assert found.exact is of
    assert str(found).endswith(of.code)
    assert ({}, None) in asked
    assert ({}, torch.float16) in asked


def test_a_model_that_is_no_graph_has_no_rows_of_the_backend():
    def backend(*_):
        raise NotOneGraph("partitions: a graph break")

    found = plan(nn.Conv2d(3, 8, 3), (3, 8, 8), "1GiB", backend=backend)
    assert found.left_out["fusedseg-compile"] == found.left_out["fusedseg-compile+amp"] == "a graph break"


def test_a_model_that_cannot_be_one_graph_is_refused():
    class Breaks(nn.Linear):
        def forward(self, x):
            torch._dynamo.graph_break()
            return super().forward(x)

    with FakeTensorMode(), pytest.raises(NotOneGraph, match="the compiler refuses the model: Unsupported"):
        partitions(Breaks(2, 2), [torch.empty(1, 2)], [{}])


def test_a_model_whose_graph_has_a_constant():
    """MONAI's SwinUNETR was refused: each way gets a copy of the graph, and the constant could not be copied."""

    class Scaled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * torch.tensor([0.5, 2.0])

    with FakeTensorMode():
        found = partitions(Scaled(2, 2), [torch.empty(1, 2)], [{}, 1.0])
    assert [way.kept > 0 for way in found] == [True, True]


def test_what_cannot_be_the_answer_is_not_traced():
    """Budgets that are met without one, and autocast of a model in half precision: three minutes for one network."""

    def backend(model, inputs, ways, autocast):
        assert autocast is None
        assert all("budget" not in way for way in ways)
        return [Partition(0, MIB * len(inputs[0]), 0.0) for _ in ways]

    half = partial(plan, PLAIN, SHAPE, "64MiB", backend=backend, dtype=torch.float16)
    labels = ["eager", "checkpoint", "fusedseg-compile", "fusedseg-compile+bits=8", "fusedseg-compile+bits=4"]
    assert [option.label for option in half().options] == labels
