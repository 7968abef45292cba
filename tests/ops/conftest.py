"""What tests of several ops share."""

import pytest
import torch


@pytest.fixture
def twin(monkeypatch):
    """In place of other processes: what is gathered are one's own values, twice.  Shapes of what was gathered."""
    # here, since triton must not be imported before the tests' own conftest has configured it
    from fusedseg.ops.norm import sync

    calls = []

    def gather(t, group):
        calls.append(t.shape)
        return torch.stack([t, t])

    monkeypatch.setattr(sync, "gather", gather)
    return calls
