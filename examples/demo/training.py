"""Trains networks of a problem from the same weights on the same batches, and measures each.

All networks have stock modules.  One trains in eager mode, with Dice and cross-entropy in stock functions.  The other
one is compiled by the backend, and has the loss ``DiceCELoss``.
"""

import copy
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from fusedseg.compiler import backend
from fusedseg.losses import DiceCELoss
from fusedseg.memory import SavedBytes, allocator_peak

from .problem import Batch, Problem

# For each network, whether its loss is of stock functions.
NETWORKS = {"eager": True, "fusedseg": False}
# This is far above the rounding errors of a gradient that should be zero, such as the gradient of a bias before a norm.
# With Adam's 1e-8 such errors alone would move the parameter by the full learning rate.
ADAM_EPS = 1e-5
# The first steps allocate memory and choose algorithms, so their times do not count.
WARMUP_STEPS = 5
# Running statistics are averaged over this many batches at the end.
SETTLED_BATCHES = 40
# The number of samples in a batch of a prediction.
PREDICTED_AT_ONCE = 8


@dataclass
class Training:
    """One network in training, with its losses and the seconds of its steps.  ``plain``: its loss is PyTorch's."""

    net: nn.Module
    optimizer: torch.optim.Optimizer
    plain: bool
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def step_seconds(self) -> float:
        return median(self.seconds[WARMUP_STEPS:] or self.seconds)


def build(problem: Problem, device: torch.device, seed: int, bits: int | None = None) -> dict[str, nn.Module]:
    """Both networks with the same weights; the backend compiles ours, and keeps ``bits`` bits a value."""
    torch.manual_seed(seed)
    eager = problem.network().to(device)
    ours = copy.deepcopy(eager)
    ours.compile(backend=backend, options={} if bits is None else {"bits": bits, "seed": seed})
    return {"eager": eager, "fusedseg": ours}


class StockDiceCE(nn.Module):
    """What ``fusedseg.DiceCELoss`` computes, in stock functions: logits (N, K, *spatial), labels (N, 1, *spatial)."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        p, axes = x.softmax(1), tuple(range(2, x.dim()))
        y = torch.zeros_like(p).scatter_(1, labels, 1)
        overlap, both = (p * y).sum(axes), p.sum(axes) + y.sum(axes)
        dice = 1 - (2 * overlap + 1e-5) / (both + 1e-5)
        return (dice * self.weight).mean() + F.cross_entropy(x, labels[:, 0], self.weight)


def loss_of(plain: bool, problem: Problem) -> nn.Module:
    """Dice and cross-entropy: of stock functions (``plain``), or ``DiceCELoss``."""
    labels = problem.split.trained(problem.whole).labels
    # The weight of a class is 1 / sqrt(voxels), a compromise between rare and frequent classes.
    weight = torch.bincount(labels.flatten(), minlength=len(problem.classes)).clamp_min(1).float().rsqrt()
    # Only the ratios of the weights count in the cross-entropy.  In the Dice part, their mean is 1.
    weight = weight / weight.mean()
    if plain:
        return StockDiceCE(weight)
    return DiceCELoss(to_onehot_y=True, softmax=True, weight=weight).to(weight.device)


def forward(net: nn.Module, images: tuple[Tensor, ...], autocast: bool) -> Tensor:
    with torch.autocast(images[0].device.type, torch.bfloat16, enabled=autocast):
        return net(*images)


def train(
    problem: Problem,
    networks: Mapping[str, nn.Module],
    steps: int,
    seed: int = 0,
    plain: Mapping[str, bool] = NETWORKS,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Training]:
    """Trains all networks on the same batches, drawn with the seed, taking turns step by step.

    ``plain`` says for each name whether the loss is of stock functions.  ``say`` is called with a text after each step
    and before each batch of ``settle``.
    """
    from tqdm import tqdm

    device = problem.whole.labels.device
    losses = {name: loss_of(plain[name], problem) for name in networks}
    trainings = {}
    for name, net in networks.items():
        optimizer = torch.optim.Adam(net.parameters(), lr=problem.size.learning_rate, eps=ADAM_EPS)
        trainings[name] = Training(net.train(), optimizer, plain[name])
    generator = torch.Generator().manual_seed(seed)
    # `disable=None` shows no bar if stderr is no terminal.
    bar = tqdm(range(steps), desc=f"{problem.title} on {device}", unit="step", disable=None)
    for step in bar:
        batch = problem.batch(generator)
        # The learning rate falls to zero along a cosine.
        rate = problem.size.learning_rate / 2 * (1 + math.cos(math.pi * step / steps))
        for name, training in trainings.items():
            training.optimizer.param_groups[0]["lr"] = rate
            start = time.perf_counter()
            logits = forward(training.net, batch.images, problem.size.autocast)
            # Stock functions outside of autocast would compute in half precision.
            loss = losses[name](logits.float() if plain[name] else logits, batch.labels[:, None])
            training.optimizer.zero_grad()
            loss.backward()
            training.optimizer.step()
            # item() waits for the device.
            training.losses.append(loss.item())
            training.seconds.append(time.perf_counter() - start)
        now = ", ".join(f"{name} loss {t.losses[-1]:.3f}" for name, t in trainings.items())
        bar.set_postfix_str(now)
        say(f"{problem.title} on {device}, step {step + 1} of {steps}: {now}")
    settle(problem, networks, generator, say)
    return trainings


# The compiler would compile the networks again for forwards without a gradient, which keep nothing.
@torch.compiler.set_stance("force_eager")
@torch.no_grad()
def settle(
    problem: Problem,
    networks: Mapping[str, nn.Module],
    generator: torch.Generator,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Computes running statistics again, averaged over many batches with the final weights.

    The running statistics of training cover about ten batches.  These are too few patches for the prediction of a whole
    volume: the held-out scores of one network would vary by more than the two networks differ.

    Source: Wu and Johnson, "Rethinking 'Batch' in BatchNorm", 2021 (precise BatchNorm).
    """
    norms: list[Any] = [
        norm for net in networks.values() for norm in net.modules() if isinstance(norm, (_BatchNorm, _InstanceNorm))
    ]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        # None stands for a cumulative average.
        norm.momentum = None
    for number in range(1, SETTLED_BATCHES + 1):
        say(f"running statistics, batch {number} of {SETTLED_BATCHES}")
        batch = problem.batch(generator)
        for net in networks.values():
            forward(net, batch.images, problem.size.autocast)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum


@torch.compiler.set_stance("force_eager")
@torch.no_grad()
def predict(net: nn.Module, images: tuple[Tensor, ...]) -> Tensor:
    """The most probable class of every voxel, (N, *spatial), with running statistics."""
    net.eval()
    parts = zip(*(image.split(PREDICTED_AT_ONCE) for image in images), strict=True)
    return torch.cat([net(*part).argmax(dim=1) for part in parts])


def intersection_over_union(predicted: Tensor, truth: Tensor, classes: tuple[str, ...]) -> dict[str, float]:
    """The intersection over union of each class, over all voxels."""
    one_hot = [F.one_hot(labels, len(classes)).flatten(0, -2).bool() for labels in (predicted, truth)]
    both = (one_hot[0] & one_hot[1]).sum(0)
    either = (one_hot[0] | one_hot[1]).sum(0)
    return dict(zip(classes, (both / either).tolist(), strict=True))


def count_bytes(net: nn.Module, plain: bool, problem: Problem, batch: Batch) -> tuple[int, int]:
    """The bytes that a step keeps for backward, logits included, and the allocator's peak; without the optimizer."""
    autocast, loss_of_step = problem.size.autocast, loss_of(plain, problem)
    params = list(net.parameters())
    with SavedBytes([*params, *net.buffers()]) as saved:
        out = forward(net.train(), batch.images, autocast)
    saved.add(out)
    saved.add_attributes(out)
    kept = saved.nbytes
    del out, saved

    def step() -> None:
        out = forward(net, batch.images, autocast)
        loss = loss_of_step(out.float() if plain else out, batch.labels[:, None])
        del out
        torch.autograd.grad(loss, params)

    return kept, allocator_peak(step, batch.labels.device)
