"""Fixtures that the tests of several ops share."""

import pytest
import torch


@pytest.fixture
def twin(monkeypatch):
    """Imitates a second process that has the same values; returns the list of the shapes that were gathered."""
    # The import stands here, because triton must not be imported before tests/conftest.py has configured it.
    from fusedseg.ops.norm import sync

    calls = []

    def gather(t, group):
        calls.append(t.shape)
        return torch.stack([t, t])

    monkeypatch.setattr(sync, "gather", gather)
    return calls


@pytest.fixture
def triton(monkeypatch, needs_interpreter):
    """Runs a test on Triton alone."""
    import fusedseg

    monkeypatch.setattr(fusedseg, "backend", "triton")


@pytest.fixture
def dtype(backend):
    """The dtype of a test of a convolution: Triton's does not take float64."""
    return torch.float64 if backend == "aten" else torch.float32


@pytest.fixture(params=[torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
def memory_format(request):
    return request.param
