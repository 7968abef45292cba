"""The profiler names a loss that keeps copies of the logits, and no other loss."""

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fusedseg
from fusedseg.memory import profile


def summary(loss) -> str:
    with FakeTensorMode():
        net, x = nn.Conv2d(1, 20, 1), torch.empty(2, 1, 64, 64)
        labels = torch.empty(2, 64, 64, dtype=torch.int64)
        return str(profile(net, x, loss=loss, targets=labels).summary())


def test_the_profiler_names_a_loss_that_keeps_copies():
    # Cross-entropy keeps log(softmax) of 2 x 20 x 64 x 64 logits in fp32.
    text = "The loss keeps 0.6 MiB for backward, beside the outputs; the losses of fusedseg.losses keep nothing"
    assert text in summary(nn.functional.cross_entropy)
    assert "The loss keeps" not in summary(fusedseg.CrossEntropyLoss())
