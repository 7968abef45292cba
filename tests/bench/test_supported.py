"""The page "Supported models" has the figures of the file, and the file those of the code."""

import json

import pytest

from bench import supported
from bench.report import lines_between
from tests.tools.threads import threads

ROWS = json.loads(supported.FILE.read_text())


def test_the_page_has_the_figures():
    assert lines_between(supported.PAGE, supported.MARKS) == supported.table()


def test_exact():
    check("ResNet-18", ["exact"])


# ``test_exact`` checks a column of one row.
@pytest.mark.slow
@pytest.mark.parametrize(("place", "name"), [pytest.param(*of, id=of[1]) for of in enumerate(ROWS)])
def test_row(place, name):
    """The exact column, and one of the others in turn, which one function counts."""
    exact, *others = supported.WAYS
    check(name, [exact, others[place % len(others)]])
    # With more threads than one, eager mode itself may add in another order from run to run.
    with threads(1):
        found = supported.loss_errors(name, 5)
    # Rounding errors grow from step to step.  Measured in 20 steps: 0.4 to 2.3 times those of eager mode.
    assert found["ours"] <= 3 * found["eager"] + 1e-6


def check(name, ways):
    network, have = supported.MODELS[name], ROWS[name]
    if not network.is_here():
        pytest.skip(f"{network.package} is not installed")
    found = supported.row(name, ways)
    for way in ways:
        # Versions of PyTorch trace some ops otherwise.  If another version of the package has another network, measure
        # the row again.
        assert found[way] == pytest.approx(have[way], abs=0.01), (way, have["package"], supported.package(network))
    assert (found["graphs"], found["exports"]) == (have["graphs"], have["exports"])
