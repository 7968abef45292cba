"""Ranks of one job may choose different backends: one GPU fails its self-test, or measures another convolution."""

import pytest
import torch

from tests.tools.ranks import on_ranks
from tests.training import backend_jobs

pytest.importorskip("triton")

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}


# Both modules gather the same statistics in each dtype.
@pytest.mark.parametrize(
    ("name", "affine", "dtype"),
    [
        *(("InPlaceABN", True, dtype) for dtype in TOLERANCE),
        ("BatchNormAct", False, torch.float32),
    ],
    ids=str,
)
def test_synchronised_norms(name, affine, dtype):
    """Both backends gather the same tensors, and compute the same step."""
    mixed, same = (
        on_ranks(2, backend_jobs.sync_step, choices, name, dtype, affine)
        for choices in (backend_jobs.MIXED, backend_jobs.SAME)
    )
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
