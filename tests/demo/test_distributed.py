"""``python -m examples.demo --distributed`` trains with any number of processes as with one process."""

import pytest
import torch

pytest.importorskip("nilearn")

from examples.demo import mni152
from examples.demo.__main__ import main
from tests.tools.ranks import on_ranks
from tests.training import jobs


def test_any_number_of_processes():
    """A batch has three samples, so a process has two samples, one or none."""
    scan = mni152.load(jobs.DEMO_RESOLUTION, torch.device("cpu"), mni152.SLICES)
    alone, *_ = on_ranks(1, jobs.demo_losses, 3, scan)
    for world in (2, 4):
        for losses in on_ranks(world, jobs.demo_losses, 3, scan):
            torch.testing.assert_close(losses, alone, rtol=1e-9, atol=1e-9)


def test_it_needs_torchrun(tmp_path, capsys, monkeypatch):
    for extra in ("matplotlib", "tqdm"):
        pytest.importorskip(extra)
    monkeypatch.delenv("RANK", raising=False)
    assert main(["--distributed", "--out", str(tmp_path)]) == 2
    assert "torchrun --nproc-per-node=2 -m examples.demo slices --distributed" in capsys.readouterr().err
