"""``curve``, what compiled models keep, and the ladder of byte budgets that both ``curve`` and ``plan`` climb down."""

import sys
from functools import partial

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fusedseg
from fusedseg.conversion import Ladder
from fusedseg.memory import curve, measure
from fusedseg.memory.compiled import partitions
from fusedseg.memory.curve import spread
from tests.nnunet import PlainConvUNet
from tests.ops.test_recompute_compiled import Residual, instance

SMALL, SHAPE = partial(PlainConvUNet, widths=(8, 16)), (1, 16, 16, 16)


@pytest.fixture(scope="module")
def ladder():
    with FakeTensorMode():
        found = Ladder(SMALL(), torch.empty(2, *SHAPE))
        assert len(list(found)) > 3
    return found


def test_rungs_fall(ladder):
    rungs = list(ladder)
    assert rungs[0].budget is None
    assert rungs[0].kept == ladder.after.saved
    assert [rung.kept for rung in rungs] == sorted((rung.kept for rung in rungs), reverse=True)
    assert all(rung.repeated > 0 for rung in rungs[1:])


def test_the_budget_of_a_rung_gives_its_choice(ladder):
    """``convert`` with the budget that a plan prints makes the choice that was measured."""
    rungs = list(ladder)
    for rung in (rungs[1], rungs[len(rungs) // 2], rungs[-1]):
        with FakeTensorMode():
            x, net = torch.empty(2, *SHAPE), SMALL()
            report = fusedseg.convert(net, example_inputs=x, budget=rung.budget)
        assert report.twice.choice.again == rung.choice.again
        # Copies of biases are not in the prediction.
        assert abs(report.after.saved - rung.kept) <= 2**12


def test_a_model_follows_a_rung_and_leaves_it():
    with FakeTensorMode():
        x = torch.empty(2, *SHAPE)
        found = Ladder(SMALL(), x)
        for rung in (list(found)[-1], next(iter(found))):
            found.follow(rung)
            assert abs(measure(found.model, x).saved - rung.kept) <= 2**12


def test_a_model_whose_bytes_are_not_known_has_no_ladder():
    class Asks(nn.Module):
        def forward(self, x):
            return x * 2 if x.sum() > 0 else x

    with pytest.raises(ValueError, match="Ladder: Asks has no budgets"):
        Ladder(Asks(), torch.ones(2, 3))


def test_a_model_that_cannot_be_one_graph_is_refused():
    class Breaks(nn.Linear):
        def forward(self, x):
            torch._dynamo.graph_break()
            return super().forward(x)

    with FakeTensorMode(), pytest.raises(RuntimeError, match="partitions: the compiler refuses the model: Unsupported"):
        partitions(Breaks(2, 2), [torch.empty(1, 2)])


@pytest.fixture(scope="module")
def whole():
    """The curve of a small network, with two of our budgets and two of the compiler's, what it said, and its text."""
    # The package has a function of the module's name.
    module = sys.modules["fusedseg.memory.curve"]
    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SHOWN", 2)
        patch.setattr(module, "COMPILER_BUDGETS", (1.0, 0.2))
        found = curve(SMALL, SHAPE, Ladder, progress=said.append)
        return found, said, str(found)


def test_compiled_models_keep_what_eager_mode_keeps(ladder, whole):
    """The compiler repeats no more arithmetic than the ladder says, and keeps its bytes within 2 %."""
    ours, compiled = (whole[0].ways[way] for way in ("fusedseg", "fusedseg, compiled"))
    assert [point.budget for point in compiled] == [ours[0].budget, ours[-1].budget]
    half = list(ladder)[len(list(ladder)) // 2]
    with ladder.model.out.weight.fake_mode:
        ladder.follow(half)
        (middle,) = partitions(ladder.model, [torch.empty(2, *SHAPE)]).values()
    ladder.follow(next(iter(ladder)))
    for rung, found in ((ours[0], compiled[0]), (half, middle), (ours[-1], compiled[-1])):
        assert found.kept <= 1.02 * rung.kept
        # Eager mode may run a call three times where compiled code runs it twice.
        assert 0.8 * rung.repeated <= found.repeated <= rung.repeated + 1e-9


def test_a_residual_stream_follows_its_budget():
    """Products that run again do not count among the calls after which compiled code keeps a sum."""
    with FakeTensorMode():
        net = nn.Sequential(nn.Conv3d(1, 8, 3), *instance(8), *(Residual(8) for _ in range(6)), nn.Conv3d(8, 2, 1))
        ladder = Ladder(net, x := torch.empty(1, 1, 18, 18, 18))
        *_, rung = ladder
        ladder.follow(rung)
        (found,) = partitions(ladder.model, [x]).values()
    assert len(rung.choice.again) > 3
    assert found.kept <= 1.02 * rung.kept


def test_the_compilers_own_budgets(whole):
    eager, found = whole[0].eager, {float(point.budget or 1): point for point in whole[0].ways["torch.compile"]}
    assert found[1.0].repeated == 0.0
    assert 0.9 * eager < found[1.0].kept <= eager
    assert found[0.2].kept < 0.3 * eager
    assert 0.05 < found[0.2].repeated < 0.5


def test_curve(whole):
    found, said, text = whole
    assert list(found.ways) == ["eager", "checkpoint", "fusedseg", "torch.compile", "fusedseg, compiled"]
    assert found.ways["eager"][0].kept == found.eager
    assert 0.9 < found.ways["checkpoint"][0].repeated <= 1.0
    for way, points in found.ways.items():
        assert all(point.kept < point.peak <= found.ways["eager"][0].peak for point in points), way
    lines = text.splitlines()
    assert lines[0] == "PlainConvUNet, 2×1×16×16×16: bytes kept against arithmetic repeated"
    assert sum(line.startswith("fusedseg ") for line in lines) == 2
    assert said[0] == "eager"
    assert said[-1].startswith("fusedseg, compiled, budget 0.")
    assert found.to_dict()["ways"]["torch.compile"][1]["budget"] == "0.2"


def test_ways_that_cannot_run_are_named():
    layers = [nn.Conv2d(3, 8, 3, padding=1), *(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4))]
    found = curve(nn.Sequential(*layers), (3, 8, 8), Ladder, compiled=False)
    assert "checkpoint" not in found.ways
    assert "Left out: checkpoint: Sequential has no module with 1 to 4 convolutions" in " ".join(str(found).split())


def test_spread_points_have_equal_distances():
    kept = [100, 99, 98, 97, 60, 59, 20, 19, 18, 0]
    assert spread(kept[:8], int) == kept[:8]
    shown = spread(kept, int)
    assert len(shown) <= 8
    assert {100, 60, 20, 0} <= set(shown)
    assert 98 not in shown
