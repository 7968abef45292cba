"""Draws the picture of a demo: the split of the image, losses, truth, both predictions, scores and memory.

Only this module of the demo imports matplotlib, so other modules import it only when they draw.
"""

from typing import BinaryIO

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from fusedseg.memory.tables import MEBIBYTE

from .mni152 import X_RANGE
from .problem import Problem
from .report import Outcome, headline

COLORS = {"eager": "#9b9b9b", "fusedseg": "#2a6fdb"}
SIGNED = ("activation map",)
TRAINED, HELD_OUT = "#2a6fdb", "#f08a24"
# The loss is averaged over this many steps, because the losses of single batches hide the curve.
SMOOTH = 10


def names(outcome: Outcome) -> dict[str, str]:
    return {"eager": "eager PyTorch", "fusedseg": outcome.ours}


def draw(file: BinaryIO, problem: Problem, outcome: Outcome) -> None:
    """Writes a PNG."""
    rows = len(problem.inputs) + 3
    figure = Figure(figsize=(16, 2.0 * rows + 1.2), layout="constrained")
    figure.suptitle(headline(problem, outcome), fontsize=14)
    left, middle, right = figure.subfigures(1, 3, width_ratios=(1.0, 1.6, 1.05), squeeze=False)[0]
    top, bottom = left.subplots(2, 1, height_ratios=(1.6, 1.0))
    draw_split(top, problem)
    draw_losses(bottom, outcome)
    draw_views(middle, problem, outcome)
    draw_bars(right, problem, outcome)
    figure.savefig(file, format="png", dpi=100)


def draw_split(ax, problem: Problem) -> None:
    image, y = problem.whole.images[0], problem.whole.y
    low, high = float(y[0]), float(y[-1])
    z = int(next(iter(problem.views.values()))[-1])  # type: ignore[arg-type]
    ax.imshow(image[z].cpu().numpy(), cmap="gray", origin="lower", extent=(*X_RANGE, low, high))
    for bottom, top, color, text in (
        (low, problem.split.trained_below, TRAINED, "trained on"),
        (problem.split.held_out_above, high, HELD_OUT, "held out"),
    ):
        box = (X_RANGE[0] + 1, bottom + 1), X_RANGE[1] - X_RANGE[0] - 2, top - bottom - 2
        ax.add_patch(Rectangle(*box, fill=False, edgecolor=color, linewidth=2.5))
        label = {"facecolor": color, "edgecolor": "none", "pad": 4}
        ax.text(X_RANGE[0] + 4, top - 4, text, color="white", fontsize=11, fontweight="bold", va="top", bbox=label)
    ax.set_title("the brain from above, T1 image (nose up)", fontsize=11)
    ax.set_xlabel("left to right, mm")
    ax.set_ylabel("back to front, mm")


def draw_losses(ax, outcome: Outcome) -> None:
    # The wider curve is drawn first, so that both are visible where they agree.
    for (name, of), width in zip(outcome.figures.items(), (4.0, 1.6), strict=True):
        span = min(SMOOTH, len(of.losses))
        smooth = np.convolve(of.losses, np.ones(span) / span, mode="valid")
        steps = np.arange(span, len(of.losses) + 1)
        ax.plot(steps, smooth, color=COLORS[name], linewidth=width, label=names(outcome)[name])
    ax.set_ylim(bottom=0)
    ax.set_title(f"training loss, mean of {min(SMOOTH, len(of.losses))} steps", fontsize=11)
    ax.set_xlabel("step")
    ax.grid(which="both", color="#e4e4e4", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=9)


def draw_views(figure, problem: Problem, outcome: Outcome) -> None:
    labels = {"truth": problem.held_out.labels}
    labels |= {names(outcome)[name]: of for name, of in outcome.predicted.items()}
    colors = ListedColormap(list(problem.colors))
    rows = [*problem.inputs, *labels]
    grid = figure.subplots(len(rows), len(problem.views), squeeze=False)
    for column, (title, at) in enumerate(problem.views.items()):
        grid[0, column].set_title(title, fontsize=11)
        for ax, name, image in zip(grid[:, column], problem.inputs, problem.held_out.images, strict=False):
            # An image of the batch, without its channel.
            values = image[:, 0][at].cpu().numpy()
            # A signed map has its zero in the middle of the colours.
            signed = {"cmap": "RdBu_r", "vmin": -abs(values).max(), "vmax": abs(values).max()}
            ax.imshow(values, origin="lower", **(signed if name in SIGNED else {"cmap": "gray"}))
        for ax, classes in zip(grid[len(problem.inputs) :, column], labels.values(), strict=True):
            values = classes[at].cpu().numpy()
            options = {"cmap": colors, "vmin": 0, "vmax": colors.N - 1}
            ax.imshow(values, origin="lower", interpolation="nearest", **options)
    for ax in grid.flat:
        ax.set_xticks([])
        ax.set_yticks([])
    for ax, name in zip(grid[:, 0], rows, strict=True):
        ax.set_ylabel(name, fontsize=10)
    patches = [
        Patch(facecolor=color, edgecolor="black", label=name)
        for color, name in zip(problem.colors, problem.classes, strict=True)
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=9)


def draw_bars(figure, problem: Problem, outcome: Outcome) -> None:
    top, bottom = figure.subplots(2, 1)
    scores = {name: list(of.iou.values()) for name, of in outcome.figures.items()}
    memory = {name: [of.kept_bytes / MEBIBYTE, of.peak_bytes / MEBIBYTE] for name, of in outcome.figures.items()}
    classes = [name.replace(" ", "\n", 1) for name in problem.classes]
    for ax, groups, values, form in (
        (top, classes, scores, "{:.2f}"),
        (bottom, ["kept for backward", "peak of a step"], memory, "{:.0f}"),
    ):
        for offset, (name, of) in zip((-0.2, 0.2), values.items(), strict=True):
            bars = ax.bar(np.arange(len(groups)) + offset, of, width=0.38, color=COLORS[name])
            ax.bar_label(bars, fmt=form, fontsize=9)
        ax.set_xticks(range(len(groups)), groups)
        ax.spines[["top", "right"]].set_visible(False)
    top.set_title("overlap with the truth (IoU), held-out part", fontsize=11)
    top.set_ylim(0, 1.1)
    top.tick_params(axis="x", labelsize=9)
    bottom.set_title("memory of one training step, MiB", fontsize=11)
    bottom.margins(y=0.1)
    handles = [Patch(facecolor=COLORS[name], label=names(outcome)[name]) for name in outcome.figures]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=9)
