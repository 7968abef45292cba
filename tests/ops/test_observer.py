"""What ops tell the recompute scopes: one question when no scope is open, and only this thread's scope hears them."""

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fusedseg
from fusedseg.memory import SavedBytes
from fusedseg.ops import observer
from fusedseg.ops.max_pool import op as max_pool
from fusedseg.ops.norm import eager

OPS = {
    "in place": (fusedseg.InPlaceABN, eager),
    "input kept": (fusedseg.BatchNormAct, eager),
    "pool": (lambda channels: fusedseg.MaxPool2d(2), max_pool),
    "convolution": (lambda channels: fusedseg.ConvABN2d(channels, channels, 3), eager),
}


def step(module):
    x = torch.rand(2, 4, 8, 8, requires_grad=True)
    with SavedBytes(list(module.parameters())) as saved:
        out = F.conv2d(module(x * 1), torch.ones(1, 4, 1, 1))
        nbytes = saved.nbytes
    out.sum().backward()
    return nbytes


@pytest.mark.parametrize("op", OPS)
def test_without_a_scope_an_op_describes_nothing(monkeypatch, op):
    make, place = OPS[op]
    monkeypatch.setattr(place, "observed", lambda call: pytest.fail(f"{call} was described"))
    assert not observer.OPEN
    step(make(4))


def test_the_scope_of_another_thread_sees_nothing():
    """The list of open scopes holds those of all threads."""
    opened, done = threading.Event(), threading.Event()

    def open_scope():
        with fusedseg.recompute():
            opened.set()
            done.wait(60)

    module = nn.Sequential(fusedseg.BatchNormAct(4), fusedseg.MaxPool2d(2))
    expected = step(module)
    thread = threading.Thread(target=open_scope)
    thread.start()
    try:
        assert opened.wait(60)
        assert len(observer.OPEN) == 1
        assert step(module) == expected
        assert observer.active() is None
    finally:
        done.set()
        thread.join()
    assert not observer.OPEN


def test_a_scope_that_raises_is_open_no_more():
    @fusedseg.recompute()
    def fails():
        with fusedseg.recompute():
            # The inner scope changes nothing.
            assert len(observer.OPEN) == 1
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert not observer.OPEN
