"""Trains the network of a problem twice from the same weights on the same batches, and measures both."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..memory import SavedBytes, allocator_peak
from .problem import Batch, Problem

# name -> plain
NETWORKS = {"eager": True, "fusedseg": False}
# far above the rounding of a gradient that is zero, such as of a bias in front of a norm: with Adam's 1e-8 that noise
# alone moves such a parameter by the full learning rate
ADAM_EPS = 1e-5
# the first steps allocate and choose algorithms
WARMUP_STEPS = 5
# over which running statistics are averaged in the end
SETTLED_BATCHES = 40
# samples at once where nothing is learned
PREDICTED_AT_ONCE = 8


@dataclass
class Training:
    """One network on its way."""

    net: nn.Module
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def step_seconds(self) -> float:
        return median(self.seconds[WARMUP_STEPS:] or self.seconds)


def build(problem: Problem, device: torch.device, seed: int) -> dict[str, nn.Module]:
    """Both networks with the same weights."""
    torch.manual_seed(seed)
    networks = {name: problem.network(plain) for name, plain in NETWORKS.items()}
    first, *others = networks.values()
    for net in others:
        net.load_state_dict(dict(zip(net.state_dict(), first.state_dict().values(), strict=True)))
    return {name: net.to(device) for name, net in networks.items()}


def weigh(labels: Tensor, classes: int) -> Tensor:
    """Of the classes in the loss: the square root, a compromise between few voxels of one and many of another."""
    return torch.bincount(labels.flatten(), minlength=classes).clamp_min(1).float().rsqrt()


def forward(net: nn.Module, images: tuple[Tensor, ...], autocast: bool) -> Tensor:
    with torch.autocast(images[0].device.type, torch.bfloat16, enabled=autocast):
        return net(*images)


def train(problem: Problem, networks: Mapping[str, nn.Module], steps: int, seed: int = 0) -> dict[str, Training]:
    """Trains all networks on the same batches, drawn with the seed, taking turns step by step."""
    from tqdm import tqdm

    device = problem.whole.labels.device
    class_weight = weigh(problem.split.trained(problem.whole).labels, len(problem.classes))
    trainings = {
        name: Training(net.train(), torch.optim.Adam(net.parameters(), lr=problem.size.learning_rate, eps=ADAM_EPS))
        for name, net in networks.items()
    }
    generator = torch.Generator().manual_seed(seed)
    # None: silent where stderr is not a terminal
    bar = tqdm(range(steps), desc=f"{problem.title} on {device}", unit="step", disable=None)
    for step in bar:
        batch = problem.batch(generator)
        # a cosine from the full learning rate to none
        rate = problem.size.learning_rate / 2 * (1 + math.cos(math.pi * step / steps))
        for training in trainings.values():
            training.optimizer.param_groups[0]["lr"] = rate
            start = time.perf_counter()
            loss = F.cross_entropy(
                forward(training.net, batch.images, problem.size.autocast).float(), batch.labels, class_weight
            )
            training.optimizer.zero_grad()
            loss.backward()
            training.optimizer.step()
            # item() waits for the device
            training.losses.append(loss.item())
            training.seconds.append(time.perf_counter() - start)
        bar.set_postfix_str(", ".join(f"{name} loss {t.losses[-1]:.3f}" for name, t in trainings.items()))
    settle(problem, networks, generator)
    return trainings


@torch.no_grad()
def settle(problem: Problem, networks: Mapping[str, nn.Module], generator: torch.Generator) -> None:
    """Running statistics anew, averaged over many batches of the final weights.

    Those that training leaves are of about ten batches, too few patches to predict a whole volume by: held-out scores
    of one network then move by more than the two networks differ.

    Source: Wu and Johnson, "Rethinking 'Batch' in BatchNorm", 2021 (precise BatchNorm).
    """
    norms: list[Any] = [
        norm for net in networks.values() for norm in net.modules() if hasattr(norm, "reset_running_stats")
    ]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        # cumulative
        norm.momentum = None
    for _ in range(SETTLED_BATCHES):
        batch = problem.batch(generator)
        for net in networks.values():
            forward(net, batch.images, problem.size.autocast)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum


@torch.no_grad()
def predict(net: nn.Module, images: tuple[Tensor, ...]) -> Tensor:
    """The most probable class of every voxel, (N, *spatial), with running statistics."""
    net.eval()
    parts = zip(*(image.split(PREDICTED_AT_ONCE) for image in images), strict=True)
    return torch.cat([net(*part).argmax(dim=1) for part in parts])


def intersection_over_union(predicted: Tensor, truth: Tensor, classes: tuple[str, ...]) -> dict[str, float]:
    """Of each class, over all voxels together."""
    one_hot = [F.one_hot(labels, len(classes)).flatten(0, -2).bool() for labels in (predicted, truth)]
    both = (one_hot[0] & one_hot[1]).sum(0)
    either = (one_hot[0] | one_hot[1]).sum(0)
    return dict(zip(classes, (both / either).tolist(), strict=True))


def count_bytes(net: nn.Module, batch: Batch, autocast: bool) -> tuple[int, int]:
    """(kept, peak) of a step without its optimizer: bytes kept for backward, logits included; the allocator's peak."""
    params = list(net.parameters())
    with SavedBytes([*params, *net.buffers()]) as saved:
        out = forward(net.train(), batch.images, autocast)
    saved.add(out)
    saved.add_attributes(out)
    kept = saved.nbytes
    del out, saved

    def step() -> None:
        out = forward(net, batch.images, autocast)
        torch.autograd.grad(F.cross_entropy(out.float(), batch.labels), params)

    return kept, allocator_peak(step, batch.labels.device)
