"""The profiler names a loss that keeps copies of the logits, and no other loss."""

import re

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fusedseg
from fusedseg.memory import advice, profile


def summary(loss) -> str:
    with FakeTensorMode():
        net, x = nn.Conv2d(1, 20, 1), torch.empty(2, 1, 64, 64)
        labels = torch.empty(2, 64, 64, dtype=torch.int64)
        return str(profile(net, x, loss=loss, targets=labels).summary())


def test_the_profiler_names_a_loss_that_keeps_copies():
    # Cross-entropy keeps log(softmax) of 2 x 20 x 64 x 64 logits in fp32.
    text = "The loss keeps 0.6 MiB for backward, beside the outputs; the losses of fusedseg.losses keep nothing"
    assert text in summary(nn.functional.cross_entropy)
    text = (
        "The loss, CrossEntropyLoss, keeps 0.6 MiB for backward, beside the outputs; fusedseg.losses.CrossEntropyLoss"
    )
    assert text in summary(nn.CrossEntropyLoss())
    assert "The loss" not in summary(fusedseg.CrossEntropyLoss())


def test_a_byte_for_each_position_is_no_copy():
    """The sentence of the profiler named a loss of this package, which keeps no copy of the logits."""
    assert "The loss" not in summary(fusedseg.losses.TopKLoss())


def test_the_names_in_the_sentence_exist():
    for text in advice.LOSSES.values():
        for name in re.findall(r"\w*(?:Loss|_loss|Supervision)\b", text):
            assert hasattr(fusedseg.losses, name)
