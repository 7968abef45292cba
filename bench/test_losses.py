"""Times Dice + cross-entropy, and cross-entropy alone, for 3 to 118 classes: stock functions, the compiler, and ours.

"head" is the last convolution of a network with HEAD_CLASSES classes and Dice + cross-entropy, on its features.

The stock contender computes Dice and cross-entropy as nnU-Net and MONAI do, with a softmax, a one-hot target, and their
sums.  The loss of nnU-Net competes as well where it is installed.
"""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusedseg
from fusedseg.losses import DC_and_CE_loss
from tests.reference import FORWARD_TOLERANCE, GRADIENT_TOLERANCE, segmentation_sums

from .contenders import Treat, as_it_is, compiled
from .data import DTYPES, Source, describe
from .harness import Missing, Timing, compete
from .jobs import ReadingJob, exact_layer

SECONDS = 1.0
# The arguments that nnU-Net's trainer passes.
DICE = {"batch_dice": False, "smooth": 1e-5, "do_bg": False, "ddp": False}


class StockDiceCE(nn.Module):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        p, axes = x.softmax(1), tuple(range(2, x.dim()))
        with torch.no_grad():
            y = torch.zeros_like(p).scatter_(1, labels.long(), 1)[:, 1:]
        overlap, prediction, target = (p[:, 1:] * y).sum(axes), p[:, 1:].sum(axes), y.sum(axes)
        dice = (2 * overlap + 1e-5) / (prediction + target + 1e-5).clamp_min(1e-8)
        return F.cross_entropy(x, labels[:, 0].long()) - dice.mean()


class StockCrossEntropy(nn.Module):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(x, labels[:, 0].long())


def original(module: str, name: str, build: Callable[[Any], nn.Module]) -> nn.Module:
    try:
        return build(getattr(importlib.import_module(module), name))
    except ImportError as error:
        raise Missing(f"{module} is not installed") from error


def nnunet() -> nn.Module:
    dice = "nnunetv2.training.loss.dice", "MemoryEfficientSoftDiceLoss"
    dice_class: list[type] = []
    original(*dice, lambda of: dice_class.append(of) or nn.Identity())
    build = lambda of: of(dict(DICE), {}, dice_class=dice_class[0])  # noqa: E731
    return original("nnunetv2.training.loss.compound_losses", "DC_and_CE_loss", build)


# The loss -> contender -> (a function that makes the module, how the module is treated).
LOSSES: dict[str, dict[str, tuple[Callable[[], nn.Module], Treat]]] = {
    "dice_ce": {
        "eager": (StockDiceCE, as_it_is),
        "compiled": (StockDiceCE, compiled),
        "nnunet": (nnunet, as_it_is),
        "ours": (partial(DC_and_CE_loss, DICE, {}), as_it_is),
    },
    "ce": {
        "eager": (StockCrossEntropy, as_it_is),
        "compiled": (StockCrossEntropy, compiled),
        "ours": (fusedseg.CrossEntropyLoss, as_it_is),
    },
}
LOSSES["head"] = LOSSES["dice_ce"]
HEAD_CLASSES = 118


class Case(NamedTuple):
    loss: str
    shape: tuple[int, ...]
    dtype: str
    channels_last: bool = False

    def __str__(self) -> str:
        return f"{self.loss} {describe(*self[1:])}"


SHAPES = {
    "cpu": [(2, 3, 96, 96, 96), (2, 14, 60, 60, 60), (2, 50, 40, 40, 40), (1, 118, 40, 40, 40)],
    "cuda": [(2, K, 128, 128, 128) for K in (3, 14, 50, 118)],
}
CASES = {
    "cpu": [Case("dice_ce", shape, "fp32") for shape in SHAPES["cpu"]] + [Case("head", (1, 32, 40, 40, 40), "fp32")],
    "cuda": [Case("dice_ce", shape, "fp16") for shape in SHAPES["cuda"]]
    + [Case("head", (2, 32, 128, 128, 128), "fp16")],
}
MORE = {
    "cpu": [Case("ce", shape, "fp32") for shape in SHAPES["cpu"]]
    + [Case("dice_ce", shape, "fp32", channels_last=True) for shape in SHAPES["cpu"]],
    "cuda": [Case("ce", shape, "fp16") for shape in SHAPES["cuda"]]
    + [Case("dice_ce", shape, "fp16", channels_last=True) for shape in SHAPES["cuda"]],
}


class OfLabels(nn.Module):
    """A loss as a function of the logits."""

    def __init__(self, loss: nn.Module, labels: Tensor) -> None:
        super().__init__()
        self.loss, self.labels = loss, labels

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(x, self.labels)


class OfFeatures(OfLabels):
    """The last convolution and a loss as a function of the features."""

    def __init__(self, head: nn.Module, loss: nn.Module, labels: Tensor) -> None:
        super().__init__(loss, labels)
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.head(x), self.labels)


def exact(case: Case, labels: Tensor, x: Tensor, *head: Tensor) -> Tensor:
    overlap, prediction, target, nll, _ = segmentation_sums(F.conv3d(x, *head) if head else x, labels)
    loss = nll.sum() / target.sum()
    if case.loss != "ce":
        loss = loss - ((2 * overlap + 1e-5) / (prediction + target + 1e-5))[:, 1:].mean()
    return loss


def test_step(case, device, report):
    source = Source(device)
    x = source.normal(*case[1:])
    K = HEAD_CLASSES if case.loss == "head" else x.shape[1]
    labels = torch.randint(K, (x.shape[0], 1, *x.shape[2:]), device=device, generator=source.generator).short()
    data = {"x": x.requires_grad_(), "dz": torch.ones((), device=device)}
    gradient = GRADIENT_TOLERANCE[DTYPES[case.dtype]]
    tolerance = {"z": FORWARD_TOLERANCE[torch.float32], "dx": gradient}
    if case.loss == "head":
        weight = source.normal((K, x.shape[1], 1, 1, 1), case.dtype, False)
        data |= {"weight": weight, "bias": source.uniform(K, -1, 1).to(x.dtype)}
        tolerance |= {"dweight": gradient, "dbias": gradient}

    def build(name: str) -> ReadingJob:
        make, treat = LOSSES[case.loss][name]
        if case.loss == "head":
            head = (fusedseg.ConvHead3d if name == "ours" else partial(nn.Conv3d, kernel_size=1))(x.shape[1], K)
            return ReadingJob(OfFeatures(head.to(x), make(), labels), data, treat)
        return ReadingJob(OfLabels(make(), labels), data, treat)

    # Compiling takes longer on a CPU than the rest.
    names = [name for name in LOSSES[case.loss] if device.type == "cuda" or name != "compiled"]
    results = compete(
        names,
        build,
        partial(exact_layer, partial(exact, case, labels), data),
        tolerance,
        Timing(device, SECONDS),
    )
    report.add("losses", "Losses, forward and backward of the loss alone", str(case), results)
