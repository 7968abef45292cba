"""The picture of the MNI152 bench: what was trained on, truth, both predictions, their scores and their memory."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from .mni152 import CLASSES, HELD_OUT_ABOVE, TRAINED_BELOW, X_RANGE, Slices

COLORS = ListedColormap(["#1b1b1f", "#4cc9f0", "#9a9a9a", "#f5f1e3"])
NAMES = {"eager": "BatchNorm\n+ LeakyReLU", "ours": "InPlaceABN"}
BAR_COLORS = {"eager": "#b8b8b8", "ours": "#2a6fdb"}
TRAINED, HELD_OUT = "#2a6fdb", "#f08a24"


def draw(
    path: Path,
    whole: Slices,
    held_out: Slices,
    predicted: Mapping[str, np.ndarray],
    scores: Mapping[str, Mapping[str, float]],
    mebibytes: Mapping[str, Mapping[str, float]],
    headline: str,
) -> None:
    """Writes a PNG.

    Args:
        path: of the PNG.
        whole, held_out: all rows of the slices, and those held out.
        predicted: classes (N, Y, X) of the held-out rows, by contender.
        scores: intersection over union of each class, by contender.
        mebibytes: "kept" and "peak", by contender.
        headline: one sentence.
    """
    figure = Figure(figsize=(16, 7.4), layout="constrained")
    figure.suptitle(headline, fontsize=14)
    left, middle, right = figure.subfigures(1, 3, width_ratios=(1.0, 1.7, 1.0), squeeze=False)[0]
    # a slice through the ventricles, where all classes are met, and one well above them
    count = len(held_out.images)
    chosen = [int(0.46 * count), int(0.68 * count)]
    draw_split(left, whole, chosen[0])
    draw_slices(middle, held_out, predicted, chosen)
    draw_bars(right, scores, mebibytes)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def extent(slices: Slices) -> tuple[float, float, float, float]:
    """Of the image in mm, for imshow."""
    return (*X_RANGE, float(slices.y[0]), float(slices.y[-1]))


def draw_split(figure, whole: Slices, index: int) -> None:
    ax = figure.subplots()
    ax.imshow(whole.images[index, 0].cpu().numpy(), cmap="gray", origin="lower", extent=extent(whole))
    low, high = float(whole.y[0]), float(whole.y[-1])
    for bottom, top, color, text in (
        (low, TRAINED_BELOW, TRAINED, "trained on"),
        (HELD_OUT_ABOVE, high, HELD_OUT, "held out"),
    ):
        box = (X_RANGE[0] + 1, bottom + 1), X_RANGE[1] - X_RANGE[0] - 2, top - bottom - 2
        ax.add_patch(Rectangle(*box, fill=False, edgecolor=color, linewidth=2.5))
        label = {"facecolor": color, "edgecolor": "none", "pad": 4}
        ax.text(X_RANGE[0] + 4, top - 4, text, color="white", fontsize=12, fontweight="bold", va="top", bbox=label)
    ax.set_title("input: T1 image, axial slice (nose up)")
    ax.set_xlabel("left to right, mm")
    ax.set_ylabel("back to front, mm")


def draw_slices(figure, held_out: Slices, predicted: Mapping[str, np.ndarray], chosen: list[int]) -> None:
    labels = {"truth": held_out.labels.cpu().numpy(), **predicted}
    grid = figure.subplots(1 + len(labels), len(chosen), squeeze=False)
    for column, index in enumerate(chosen):
        grid[0, column].imshow(
            held_out.images[index, 0].cpu().numpy(), cmap="gray", origin="lower", extent=extent(held_out)
        )
        for row, values in enumerate(labels.values(), start=1):
            grid[row, column].imshow(
                values[index],
                cmap=COLORS,
                vmin=0,
                vmax=len(CLASSES) - 1,
                origin="lower",
                extent=extent(held_out),
                interpolation="nearest",
            )
    for ax in grid.flat:
        ax.set_xticks([])
        ax.set_yticks([])
    for ax, name in zip(grid[:, 0], ("input", "truth", *(NAMES[name] for name in predicted)), strict=True):
        ax.set_ylabel(name, fontsize=10)
    for column in range(len(chosen)):
        grid[0, column].set_title("held-out part of that slice" if column == 0 else "held-out part of another slice")
    patches = [Patch(facecolor=COLORS(i), edgecolor="black", label=name) for i, name in enumerate(CLASSES)]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(CLASSES))


def draw_bars(figure, scores: Mapping[str, Mapping[str, float]], mebibytes: Mapping[str, Mapping[str, float]]) -> None:
    top, bottom = figure.subplots(2, 1)
    for ax, groups, values, form in (
        (top, CLASSES, scores, "{:.2f}"),
        (bottom, ("kept for backward", "peak of a step"), {n: dict(v) for n, v in mebibytes.items()}, "{:.0f}"),
    ):
        for offset, (name, of) in zip((-0.2, 0.2), values.items(), strict=True):
            at = np.arange(len(groups)) + offset
            bars = ax.bar(at, list(of.values()), width=0.38, color=BAR_COLORS[name])
            ax.bar_label(bars, fmt=form, fontsize=9)
        ax.set_xticks(range(len(groups)), groups)
        ax.spines[["top", "right"]].set_visible(False)
    top.set_title("overlap with the truth (IoU), held-out part", fontsize=11)
    top.set_ylim(0, 1.1)
    top.tick_params(axis="x", labelsize=9)
    bottom.set_title("memory of one training step, MiB", fontsize=11)
    bottom.margins(y=0.1)
    handles = [Patch(facecolor=BAR_COLORS[name], label=NAMES[name].replace("\n", " ")) for name in scores]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=9)
