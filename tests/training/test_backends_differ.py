"""Ranks of one job may choose different backends: one GPU fails its self-test, or measures another convolution."""

import functools

import pytest
import torch

from tests.tools.ranks import on_ranks
from tests.training import backend_jobs, jobs

pytest.importorskip("triton")

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}


# Both modules gather the same statistics in each dtype.
NORMS = [*(("InPlaceABN", dtype, True) for dtype in TOLERANCE), ("BatchNormAct", torch.float32, False)]


@functools.cache
def steps():
    """What both processes return for each choice of backends and each norm."""
    calls = [(choices, *norm) for choices in (backend_jobs.MIXED, backend_jobs.SAME) for norm in NORMS]
    return dict(zip(calls, zip(*on_ranks(2, jobs.each, backend_jobs.sync_step, calls), strict=True), strict=True))


@pytest.mark.parametrize(("name", "dtype", "affine"), NORMS, ids=str)
def test_synchronised_norms(name, dtype, affine):
    """Both backends gather the same tensors, and compute the same step."""
    mixed, same = (steps()[choices, name, dtype, affine] for choices in (backend_jobs.MIXED, backend_jobs.SAME))
    (_, of_triton), (_, of_aten) = mixed
    assert of_triton == of_aten
    assert len(of_aten) == 2
    for (mine, _), (theirs, _) in zip(mixed, same, strict=True):
        close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
        torch.testing.assert_close(mine, theirs, **close)


def test_convolutions():
    """The parameters stay the same on all ranks, and follow those of a job whose ranks choose alike."""
    mixed, same = (
        on_ranks(2, backend_jobs.train_convolutions, choices) for choices in (backend_jobs.MIXED, backend_jobs.SAME)
    )
    (first, of_first), (second, of_second) = mixed
    torch.testing.assert_close(of_first, of_second, rtol=0, atol=0)
    torch.testing.assert_close(of_first, same[0][1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close([first, second], [losses for losses, _ in same], rtol=1e-4, atol=1e-5)
