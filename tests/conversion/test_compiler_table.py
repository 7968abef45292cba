"""The compiler's own memory budgets for five networks at full size, beside ours at the same repeated arithmetic.

``pytest -s -n 0 -m slow tests/conversion/test_compiler_table.py`` prints the rows of the table in ``docs/recompute.md``.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fusedseg
from fusedseg.conversion import Ladder
from fusedseg.memory.compiled import partitions
from fusedseg.memory.curve import COMPILER_BUDGETS
from fusedseg.ops.recompute.knapsack import SAME
from tests.conversion.test_budget_table import NETWORKS

SHOWN = (1.0, 0.4, 0.3, 0.2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:fusedseg.convert")
@pytest.mark.parametrize("name", NETWORKS)
def test_beside_the_compiler(name):
    """For what the compiler keeps and repeats with a budget, ``convert`` finds a choice that keeps and repeats no more.

    Compiled code keeps what eager mode keeps.
    """
    make, shapes = NETWORKS[name]
    with FakeTensorMode():
        images = [torch.empty(shape) for shape in shapes]
        theirs = partitions(make(), images, COMPILER_BUDGETS)
        ladder = Ladder(make(), images)
        eager, rungs = ladder.before, list(ladder)
        worst = []
        for budget, found in theirs.items():
            # Copies of biases are not in the prediction.
            room = SAME * eager.saved
            limits = {"budget": int(found.kept + room), "extra_flops": found.repeated + 1e-9}
            report = fusedseg.convert(make(), example_inputs=images, **limits)
            choice = report.twice.choice
            worst.append(((choice.kept - found.kept) / eager.saved, choice.repeated - found.repeated, budget))
            rung = min((r for r in rungs if r.repeated <= limits["extra_flops"]), key=lambda rung: rung.kept)
            line = f"  {budget}: {_cell(eager, found)}; ours {_cell(eager, rung)}; both limits {_cell(eager, choice)}"
            if budget in SHOWN:
                ladder.follow(rung)
                (compiled,) = partitions(ladder.model, images).values()
                line += f"; compiled {_cell(eager, compiled)}"
                assert compiled.kept <= 1.02 * rung.kept
                assert compiled.peak <= found.peak
            print(name, line, flush=True)
        for kept, repeated, budget in worst:
            assert kept <= SAME, budget
            assert repeated <= 1e-6, budget


def _cell(eager, found):
    return f"{found.kept / eager.saved:.3f}, {found.peak / eager.peak:.3f}, {found.repeated:.1%}"
