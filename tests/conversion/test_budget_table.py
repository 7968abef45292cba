"""Twenty budgets for each of five networks at full size: bytes, peak and repeated arithmetic, as the documentation has.

``pytest -s -n 0 -m slow tests/conversion/test_budget_table.py`` prints the rows of the table in ``docs/recompute.md``.
"""

from functools import partial

import pytest
import torch

from fusedseg.conversion import Ladder
from fusedseg.memory import measure
from fusedseg.memory.fake import fake_mode
from fusedseg.ops.recompute.knapsack import SAME
from fusedseg.unet import lidar_optical_unet, unet3d_small
from tests.conversion.packages import nnunet
from tests.nnunet import WIDTHS, PlainConvUNet
from tests.resnet import ResNet50

# The blocks of nnU-Net's preset M for a patch of 64.
residual = partial(
    nnunet, "ResidualEncoderUNet", 3, WIDTHS, n_blocks_per_stage=(1, 3, 4, 6, 6), n_conv_per_stage_decoder=1
)
NETWORKS = {
    "nnU-Net's `PlainConvUNet`, 2×1×64³": (PlainConvUNet, [(2, 1, 64, 64, 64)]),
    "nnU-Net's `ResidualEncoderUNet`, 2×1×64³": (residual, [(2, 1, 64, 64, 64)]),
    "`unet3d_small(plain=True)`, 2×1×320×150×26": (partial(unet3d_small, plain=True), [(2, 1, 320, 150, 26)]),
    "`lidar_optical_unet(plain=True)`, 8×(5+3)×256×256": (
        partial(lidar_optical_unet, plain=True), [(8, 5, 256, 256), (8, 3, 256, 256)],
    ),
    "ResNet-50, 128×3×224×224": (ResNet50, [(128, 3, 224, 224)]),
}  # fmt: skip
BUDGETS = [k / 100 for k in range(48, 8, -2)]
SHOWN = (0.4, 0.3, 0.2)


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_twenty_budgets(name):
    """Each budget keeps what it promises, and no smaller one has a higher peak than a larger one."""
    make, shapes = NETWORKS[name]
    with fake_mode():
        ladder = Ladder(make(), images := [torch.empty(shape) for shape in shapes])
        eager, rungs = ladder.before, list(ladder)
        found, cells, least, rise = {}, [], ladder.after.peak, 0.0
        for budget in BUDGETS:
            rung = next((rung for rung in rungs if rung.kept <= budget * eager.saved), rungs[-1])
            if rung.budget not in found:
                ladder.follow(rung)
                # Gradients of the step before would have their memory already.
                ladder.model.zero_grad()
                found[rung.budget] = measure(ladder.model, *images)
            got = found[rung.budget]
            # Copies of biases are not in the prediction.
            assert abs(got.saved - rung.kept) <= SAME * eager.saved
            assert abs(got.peak - rung.peak) <= 0.02 * eager.peak
            rise, least = max(rise, got.peak / least - 1), min(least, got.peak)
            cells.append((budget, got.saved / eager.saved, got.peak / eager.peak, rung.repeated))
    for budget, kept, peak, repeated in cells:
        print(f"  {budget:.2f}: kept {kept:.3f}, peak {peak:.3f}, repeated {repeated:.1%}")
    shown = [f"{kept:.2f}, {peak:.2f}, {repeated:.1%}" for budget, kept, peak, repeated in cells if budget in SHOWN]
    print(f"| {name} | {' | '.join(shown)} |  (peak rises by {rise:.2%} at most)", flush=True)
    assert rise <= SAME
    assert cells[-1][2] < cells[0][2]
