"""Activation checkpointing does not change gradients or running statistics, and keeps fewer bytes."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fusedseg
from fusedseg.memory.meter import measure


class Checkpointed(nn.Module):
    """Checkpoints each part, and with ``nested`` also all parts together."""

    def __init__(self, parts, nested=False, **options):
        super().__init__()
        self.parts, self.nested, self.options = parts, nested, options

    def each(self, x):
        for part in self.parts:
            x = checkpoint(part, x, **self.options)
        return x

    def forward(self, x):
        return checkpoint(self.each, x, **self.options) if self.nested else self.each(x)


def parts():
    torch.manual_seed(0)
    conv = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), fusedseg.InPlaceABN(8))
    tracked = fusedseg.InstanceNormAct(8, track_running_stats=True, activation="silu")
    inverted = fusedseg.InPlaceInstanceNormAct(8, affine=True, track_running_stats=True)
    convs = (nn.Conv2d(8, 8, 1) for _ in range(2))
    tail = nn.Sequential(
        fusedseg.MaxPool2d(2), fusedseg.BatchNormAct(8, activation="relu"), next(convs), tracked, next(convs), inverted,
        nn.Tanh(),
    )  # fmt: skip
    net = nn.Sequential(fusedseg.ConvABN2d(3, 8, 3, padding=1), conv, tail).double()
    with torch.no_grad():
        # The weight of 0 makes a kept channel.
        net[1][1].weight[2] = 0
    return net


def step(net, x):
    """Returns the gradients of the input and the parameters, and the buffers after the step."""
    x = x.clone().requires_grad_()
    net(x).square().sum().backward()
    return [x.grad, *(p.grad for p in net.parameters())], dict(net.named_buffers())


def saving(op):
    """Contexts of a selective checkpoint that keeps this op's results."""

    def policy(ctx, called, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if called is op else CheckpointPolicy.PREFER_RECOMPUTE

    return partial(create_selective_checkpoint_contexts, policy)


WAYS = {
    "reentrant": {"use_reentrant": True},
    "not reentrant": {"use_reentrant": False},
    "nested": {"use_reentrant": False, "nested": True},
    "nested, reentrant": {"use_reentrant": True, "nested": True},
    "selective": {"use_reentrant": False, "context_fn": saving(torch.ops.aten.tanh.default)},
}


# In the outer checkpoint, no tensor requires a gradient during the first run.
within_a_reentrant_one = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")


@within_a_reentrant_one
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("momentum", [0.1, None], ids=["moving", "cumulative"])
def test_as_without(way, momentum, device):
    plain = parts().to(device)
    for module in plain.modules():
        if isinstance(module, (fusedseg.InPlaceABN, fusedseg.BatchNormAct)):
            module.momentum = momentum
    same = copy.deepcopy(plain)
    net = Checkpointed(same, **WAYS[way])
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64, device=device)
    # The second step starts from the state after the first step.
    for _ in range(2):
        grads, buffers = step(plain, x)
        again, after = step(net, x)
        torch.testing.assert_close(again, grads)
        for name, buffer in buffers.items():
            torch.testing.assert_close(after[f"parts.{name}"], buffer)
        plain.zero_grad(), net.zero_grad()
    assert int(plain[0].norm.num_batches_tracked) == 2


def test_selected_output_overwritten():
    """A selective checkpoint that keeps a tensor overwritten by the norm raises PyTorch's error.

    The gradient must not be wrong in silence.
    """
    net = Checkpointed(parts(), use_reentrant=False, context_fn=saving(torch.ops.aten.convolution.default))
    with pytest.raises(RuntimeError, match="has been mutated"):
        step(net, torch.randn(2, 3, 8, 8, dtype=torch.float64))


@within_a_reentrant_one
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_keeps_less(use_reentrant):
    net = parts()
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64, requires_grad=True)
    held = [measure(module, x).held for module in (net, Checkpointed(net, nested=True, use_reentrant=use_reentrant))]
    assert held[1] < 0.7 * held[0]
