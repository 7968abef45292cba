"""Which tensors the recompute scope tells apart by their memory, and which saved tensors it finds in one storage."""

import weakref

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from fusedseg.scope.memory import Memory
from fusedseg.scope.plain import Place, plain
from fusedseg.scope.saved import Data


class Doubled(torch.Tensor):
    """A subclass whose values are not those of its memory."""


def made_in_inference_mode() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(4)


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(4)


PLAIN = {
    "tensor": (lambda: torch.ones(4), True),
    "parameter": (lambda: nn.Parameter(torch.ones(4)), True),
    "buffer": (lambda: nn.Buffer(torch.ones(4)), True),
    "fake": (fake, True),
    "subclass": (lambda: torch.ones(4).as_subclass(Doubled), False),
    "inference": (made_in_inference_mode, False),
    "conjugate": (lambda: torch.ones(4, dtype=torch.complex64).conj(), False),
    "sparse": (lambda: torch.ones(4).to_sparse(), False),
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_tensors(name):
    make, expected = PLAIN[name]
    assert plain(make()) is expected


@pytest.fixture
def whole():
    return torch.arange(12.0).view(3, 4)


@pytest.fixture
def memory(whole):
    return Memory(whole.untyped_storage())


def saved(memory, t):
    """Saves ``t`` as the registry does.  The caller keeps the result, which the memory refers to weakly."""
    data = Data(t, None, Place.of(t))
    memory.kept = (*memory.kept, weakref.ref(data))
    return data


def test_a_saved_part_is_not_taken_for_the_whole(memory, whole):
    data = saved(memory, whole[1])
    assert memory.kept_at(Place.of(whole), whole._version) is None
    assert memory.kept_at(Place.of(whole[1]), whole._version) is data


def test_a_saved_tensor_that_was_changed_is_not_found(memory, whole):
    data, version = saved(memory, whole), whole._version
    whole.add_(1)
    assert memory.kept_at(data.at, version) is None
    assert memory.kept_at(data.at, whole._version) is None
    assert list(memory.keepers()) == []


def test_a_saved_tensor_that_was_copied_is_not_found(memory, whole):
    data = saved(memory, whole)
    assert list(memory.keepers()) == [data]
    data.copy_before_change(whole.untyped_storage())
    # The copy has the version of the saved tensor, but other memory.
    assert data.version == whole._version
    assert memory.kept_at(data.at, whole._version) is None
    assert list(memory.keepers()) == []
