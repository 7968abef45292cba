"""CPU tensors that stand for tensors on a GPU: "auto" takes Triton for them, whose kernels run in the interpreter."""

import pytest
import torch

from fusedseg import _backend
from fusedseg.ops.self_test import first_use


@pytest.fixture
def stand_in(monkeypatch):
    """A machine whose CPU stands for a GPU that this process has not tested."""
    monkeypatch.delenv("FUSEDSEG_SELF_TEST", raising=False)
    monkeypatch.setattr(_backend, "_name", "auto")
    explain = _backend.explain

    def as_on_a_gpu(device):
        device = torch.device(device)
        return ("triton", "it stands for a GPU") if device.type == "cpu" else explain(device)

    monkeypatch.setattr(_backend, "explain", as_on_a_gpu)
    monkeypatch.setattr(_backend, "is_tested", lambda device: _backend.self_test_wanted())
    new_process()
    yield
    new_process()


def new_process() -> None:
    """Forgets what this process knows, as if it had just started."""
    _backend.forget()
    first_use._known.clear()
