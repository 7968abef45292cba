"""The command that counts which of nnU-Net's presets fits which card."""

from pathlib import Path

import pytest

from tests.integrations.real import framework

framework("nnunetv2.training.nnUNetTrainer.nnUNetTrainer")

from fusedseg.integrations.nnunet.plans import read  # noqa: E402
from tests.integrations.nnunet_plans import NAME, dataset_json, planned  # noqa: E402
from tests.integrations.nnunet_presets import CONTEXT, GIB, RESERVED, Way, count, rows  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "nnunet.md"


def test_a_small_plan_is_counted(tmp_path, monkeypatch):
    planned(tmp_path, monkeypatch, dataset_json(3), (24, 24, 24), (1.0, 1.0, 1.0))
    step = count(read(tmp_path / "preprocessed" / NAME / "nnUNetPlans.json"))
    assert step.eager.kept > step.exact.kept > step.four.kept > 0
    assert step.eager.peak > max(step.exact.peak, step.four.peak)
    # parameters and momentum in fp32, and the batch
    network = read(tmp_path / "preprocessed" / NAME / "nnUNetPlans.json").build()
    batch = 4
    for size in step.size:
        batch *= size
    assert step.before == batch + 8 * sum(parameter.numel() for parameter in network.parameters())
    assert step.row("small").startswith(f"| small | {'×'.join(map(str, step.size))} | ")


@pytest.mark.parametrize(("short", "card"), [(0, "12 GB"), (1, "16 GB")])
def test_the_smallest_card(short, card):
    """A card holds what was there before the step, what PyTorch reserves for its peak, and the context."""
    before = 12 * GIB - CONTEXT - int(RESERVED * GIB) - 1 + short
    assert Way(0, GIB).card(before) == card


def test_no_card_is_large_enough():
    assert Way(0, GIB).card(80 * GIB) == "none"


# Four networks of full size take minutes.
@pytest.mark.slow
def test_the_page_has_the_rows():
    text = PAGE.read_text()
    for row in rows():
        assert row in text
