"""Casts and zeros in one call are tested on a device before they are used there."""

import pytest
import torch

from fusedseg import _backend, _torch
from fusedseg.ops import together
from fusedseg.ops.replay import Allocation
from fusedseg.ops.self_test import first_use
from tests.tools.spy import spied
from tests.tools.stand_in import stand_in as stand_in

CPU = torch.device("cpu")
GIVEN = [torch.randn(70000), torch.randn(3)]
CALL = together.Casts(tuple(Allocation(tuple(t.shape), t.stride(), torch.bfloat16) for t in GIVEN), CPU)
ZEROS = together.Zeros((Allocation((70000,), (1,), torch.float32),) * 2, CPU)


def calls(monkeypatch, name, change=lambda made: None):
    """An entry for each call of a function for many tensors, which ends with a ``change`` of the results."""
    return spied(monkeypatch, _torch, name, lambda result, made, *given: change(made))


def right():
    zeros = ZEROS()
    assert all(torch.equal(found, t.bfloat16()) for found, t in zip(CALL(*GIVEN), GIVEN, strict=True))
    assert not any(map(torch.any, zeros))
    assert zeros[0].data_ptr() != zeros[1].data_ptr()


def test_they_are_tested_once_and_used(stand_in, monkeypatch):
    casts, zeros = calls(monkeypatch, "foreach_copy"), calls(monkeypatch, "foreach_zero")
    right()
    right()
    # Two casts there and two back are the test.
    assert (len(casts), len(zeros)) == (4 + 2, 1 + 2)
    assert first_use._known["casts", torch.float32, "cpu"].kind == ""


def forgets_the_end(made):
    """As a kernel would whose blocks of 65536 values are not all launched."""
    for t in made:
        if t.dim() == 1 and len(t) > 65536:
            t[65536:] = 1


def forgets_a_tensor(made):
    made[-1].fill_(1)


@pytest.mark.parametrize(("name", "change"), [("foreach_copy", forgets_the_end), ("foreach_zero", forgets_a_tensor)])
def test_wrong_ones_are_found_and_not_used(stand_in, monkeypatch, name, change):
    seen = calls(monkeypatch, name, change)
    with pytest.warns(RuntimeWarning, match="the calls of 'casts' in float32 failed their self-test on cpu") as warned:
        right()
    (text,) = {str(of.message) for of in warned}
    assert ". Every cast is a call of its own, so results are right, and training is slower. " in text
    count = len(seen)
    right()
    assert len(seen) == count


def test_where_nothing_can_be_tested_each_is_a_call_of_its_own(stand_in, monkeypatch):
    """While a CUDA graph is captured; afterwards they are tested."""
    seen = calls(monkeypatch, "foreach_copy")
    with monkeypatch.context() as patch:
        patch.setattr(first_use, "can_test", lambda device: False)
        right()
    assert not seen
    right()
    assert seen


def test_no_triton_is_needed(stand_in, monkeypatch):
    """PyTorch's own kernels cast.  Without Triton the test would fail with an ImportError."""
    monkeypatch.setattr(first_use, "compile_kernels", lambda *given: pytest.fail("Triton was asked for"))
    first_use.compile_first("casts", torch.float32, CPU)
    assert _backend.proves("casts", CPU)
