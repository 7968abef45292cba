"""The results of a demo: figures, the lines on the terminal and the JSON file."""

import platform
from dataclasses import asdict, dataclass
from typing import Any

import torch

from fusedseg.memory.tables import MEBIBYTE

from .problem import Problem
from .training import Training, count_bytes, intersection_over_union, predict


@dataclass(frozen=True)
class Figures:
    """The figures of one network: held-out scores by class, bytes and seconds of a step, losses of all steps."""

    iou: dict[str, float]
    kept_bytes: int
    peak_bytes: int
    step_seconds: float
    losses: list[float]


@dataclass(frozen=True)
class Outcome:
    """The figures of both networks.  ``predicted`` has their predictions for the held-out part.

    ``bits``: those in which our network keeps a value of its activations, or None.
    """

    figures: dict[str, Figures]
    predicted: dict[str, torch.Tensor]
    bits: int | None = None

    @property
    def ours(self) -> str:
        """The name of our network in headlines and pictures."""
        return "fusedseg" if self.bits is None else f"fusedseg with {self.bits} bits"

    @property
    def worst(self) -> tuple[float, str]:
        """The largest difference in IoU between the networks, and its class."""
        eager, ours = (of.iou for of in self.figures.values())
        return max((abs(ours[name] - eager[name]), name) for name in eager)

    @property
    def ratios(self) -> dict[str, float]:
        """The figures of our network, divided by those of eager mode."""
        eager, ours = self.figures.values()
        return {
            "kept": ours.kept_bytes / eager.kept_bytes,
            "peak": ours.peak_bytes / eager.peak_bytes,
            "step": ours.step_seconds / eager.step_seconds,
        }


def evaluate(problem: Problem, trainings: dict[str, Training], seed: int, bits: int | None = None) -> Outcome:
    # Both networks are measured on the same batch.
    batch = problem.batch(torch.Generator().manual_seed(seed))
    figures, predicted = {}, {}
    for name, training in trainings.items():
        predicted[name] = predict(training.net, problem.held_out.images)
        iou = intersection_over_union(predicted[name], problem.held_out.labels, problem.classes)
        # Bytes are counted after the prediction, because this forward moves the running statistics.
        kept, peak = count_bytes(training.net, training.plain, problem, batch)
        figures[name] = Figures(iou, kept, peak, training.step_seconds, training.losses)
    return Outcome(figures, predicted, bits)


def lines(problem: Problem, outcome: Outcome) -> list[str]:
    """A table with a row for each figure and a column for each network."""
    eager, ours = outcome.figures.values()
    difference, worst = outcome.worst
    rows = [(f"IoU, {name}", f"{eager.iou[name]:.3f}", f"{ours.iou[name]:.3f}", "") for name in problem.classes]
    for title, of_eager, of_ours, unit, ratio in (
        ("kept for backward", eager.kept_bytes / MEBIBYTE, ours.kept_bytes / MEBIBYTE, "MiB", outcome.ratios["kept"]),
        ("peak of a step", eager.peak_bytes / MEBIBYTE, ours.peak_bytes / MEBIBYTE, "MiB", outcome.ratios["peak"]),
        ("time of a step", eager.step_seconds * 1e3, ours.step_seconds * 1e3, "ms", outcome.ratios["step"]),
    ):
        rows.append((title, f"{of_eager:.1f} {unit}", f"{of_ours:.1f} {unit}", f"{ratio:.2f}"))
    rows.append(("loss, last step", f"{eager.losses[-1]:.3f}", f"{ours.losses[-1]:.3f}", ""))
    width = max(len(row[0]) for row in rows)
    table = [("held-out part", *outcome.figures, "ratio"), *rows]
    return [
        *(f"{title:<{width}}{first:>12}{second:>12}{ratio:>8}".rstrip() for title, first, second, ratio in table),
        f"largest difference in IoU: {difference:.3f} ({worst})",
        "loss: Dice and cross-entropy, in stock functions for eager, and as fusedseg.DiceCELoss for fusedseg",
    ]


def headline(problem: Problem, outcome: Outcome) -> str:
    """A headline with the measured figures."""
    steps = len(outcome.figures["eager"].losses)
    kept, peak = outcome.ratios["kept"], outcome.ratios["peak"]
    return (
        f"{problem.title} trained for {steps} steps on the back of the MNI152 brain segments its front.\n"
        f"{outcome.ours} keeps {kept:.2f} of eager PyTorch's bytes and peaks at {peak:.2f}; "
        f"IoU differs by {outcome.worst[0]:.3f} at most"
    )


def to_json(demo: str, problem: Problem, outcome: Outcome, device: torch.device, seed: int) -> dict[str, Any]:
    gpu = {"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}
    return {
        "demo": demo,
        "device": str(device),
        **gpu,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "seed": seed,
        "size": asdict(problem.size),
        "bits": outcome.bits,
        "steps": len(outcome.figures["eager"].losses),
        "networks": {name: asdict(of) for name, of in outcome.figures.items()},
        "fusedseg / eager": outcome.ratios,
        "largest_iou_difference": outcome.worst[0],
    }
