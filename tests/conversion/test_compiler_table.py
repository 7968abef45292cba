"""The compiler's own memory budgets for five networks at full size, beside ours at the same repeated arithmetic.

``pytest -s -n 0 -m slow tests/conversion/test_compiler_table.py`` prints the table in ``docs/recompute.md``.
"""

import warnings

import pytest
import torch

import fusedseg
from fusedseg.conversion import Ladder
from fusedseg.memory.compiled import partitions
from fusedseg.memory.curve import COMPILER_BUDGETS
from fusedseg.memory.fake import fake_mode
from tests.conversion.test_budget_table import NETWORKS

# Ours keeps the results of pools and the positions of max-pools, where the compiler runs the pools again; and in the
# long residual stream of a ResNet the sum after about every fifth block.
MORE, MORE_OF_RESNET = 0.012, 0.07
SHOWN = (1.0, 0.4, 0.3, 0.2)
# Compiled code keeps the results of four max-pools (96 MiB), where eager mode rebuilds them from convolutions that run
# again.  So it keeps 0.2026 of eager mode's bytes, and 0.1881 are kept in eager mode.
KNOWN = {("`lidar_optical_unet(plain=True)`, 8×(5+3)×256×256", 0.2): 0.203}


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_beside_the_compiler(name):
    """For what the compiler keeps and repeats with a budget, ``convert`` finds a choice that repeats no more.

    It keeps no more but for ``MORE``.  Compiled code keeps what eager mode keeps, but for ``KNOWN``, and its peak is at
    most a hundredth above that of the compiler by itself.
    """
    make, shapes = NETWORKS[name]
    with fake_mode():
        images = [torch.empty(shape) for shape in shapes]
        theirs = partitions(make(), images, COMPILER_BUDGETS)
        ladder = Ladder(make(), images)
        eager, rungs = ladder.before, list(ladder)
        missed, shown = [], []
        more = MORE_OF_RESNET if name.startswith("ResNet") else MORE
        for budget, found in theirs.items():
            most, repeated = int(found.kept + more * eager.saved), found.repeated + 1e-9
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                report = fusedseg.convert(make(), example_inputs=images, budget=most, extra_flops=repeated)
            both = report.twice.choice
            if both.kept > most or both.repeated > repeated:
                missed.append(budget)
            rung = min((rung for rung in rungs if rung.repeated <= repeated), key=lambda rung: rung.kept)
            line = [f"{budget}", *(_cell(eager, of) for of in (found, rung, both))]
            if budget in SHOWN:
                ladder.follow(rung)
                (compiled,) = partitions(ladder.model, images).values()
                line.append(_cell(eager, compiled))
                shown.append((budget, compiled, rung, found))
            print(f"| {name} | {' | '.join(line)} |", flush=True)
        assert not missed
        for budget, compiled, rung, found in shown:
            known = KNOWN.get((name, budget))
            assert compiled.kept <= (1.02 * rung.kept if known is None else known * eager.saved)
            assert compiled.peak <= 1.01 * found.peak


def _cell(eager, found):
    return f"{found.kept / eager.saved:.3f}, {found.peak / eager.peak:.3f}, {found.repeated:.1%}"
