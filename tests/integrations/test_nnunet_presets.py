"""The command that counts which of nnU-Net's presets fits which card."""

import math
from pathlib import Path

import pytest

from tests.integrations.real import framework

framework("nnunetv2.training.nnUNetTrainer.nnUNetTrainer")

from fusedseg.integrations.nnunet.plans import read  # noqa: E402
from tests.integrations.nnunet_plans import NAME, dataset_json, planned  # noqa: E402
from tests.integrations.nnunet_presets import CONTEXT, GIB, RESERVED, card, count, rows  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "nnunet.md"


def test_a_small_plan_is_counted(tmp_path, monkeypatch):
    planned(tmp_path, monkeypatch, dataset_json(3), (24, 24, 24), (1.0, 1.0, 1.0))
    planned_step = read(tmp_path / "preprocessed" / NAME / "nnUNetPlans.json")
    step = count(planned_step)
    assert step.eager.kept > step.exact.kept > step.four.kept > 0
    assert step.eager.with_workspaces > max(step.exact.with_workspaces, step.four.with_workspaces)
    # parameters and momentum in fp32, and the batch
    network = planned_step.build()
    assert step.before == 4 * math.prod(step.size) + 8 * sum(parameter.numel() for parameter in network.parameters())
    assert step.row("small").startswith(f"| small | {'×'.join(map(str, step.size))} | ")


@pytest.mark.parametrize(("short", "found"), [(0, "12 GB"), (1, "16 GB")])
def test_the_smallest_card(short, found):
    """A card holds what was there before the step, what PyTorch reserves for its peak, and the context."""
    before = 12 * GIB - CONTEXT - int(RESERVED * GIB) - 1 + short
    assert card(before, GIB) == found


def test_no_card_is_large_enough():
    assert card(80 * GIB, GIB) == "none"


# Four networks of full size take minutes.
@pytest.mark.slow
def test_the_page_has_the_rows():
    text = PAGE.read_text()
    for row in rows():
        assert row in text
