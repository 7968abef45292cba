"""Draws the results of a run: our time beside each rival's, and the bytes that each contender keeps.

Only this module of the benches imports matplotlib, so ``report.py`` imports it only when it draws.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .files import Files, figure, sections

NAMES = {
    "eager": "eager PyTorch",
    "compiled": "torch.compile",
    "aggressive": "torch.compile, aggressive",
    "ours": "fusedseg",
}
COLORS = {"eager": "#9b9b9b", "compiled": "#e9a23b", "aggressive": "#b5522d", "ours": "#2a6fdb"}
MARKERS = {"eager": "o", "compiled": "s", "aggressive": "D"}
ROW_INCHES = 0.3


class Row(NamedTuple):
    """A case: its name, and the figure of each contender that has one."""

    name: str
    values: Mapping[str, float]


def rows_of(files: Files, key: str) -> dict[str, list[Row]]:
    """The cases in which ours and eager have a figure, by the title of the bench."""
    found: dict[str, list[Row]] = {}
    for _, title, cases in sections(files):
        for name, case in cases.items():
            values = {contender: value for contender in NAMES if (value := figure(case, contender, key))}
            if {"eager", "ours"} <= values.keys():
                found.setdefault(title, []).append(Row(name, values))
    return found


def draw(files: Files, folder: Path) -> list[Path]:
    """Writes two pictures, and returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    gpu = next((of["machine"]["gpu"] for of in files.values() if "gpu" in of["machine"]), "a CPU")
    pictures = {
        "times.png": (rows_of(files, "step"), draw_times, f"Time of a step on {gpu}: fusedseg / rival, medians"),
        "bytes.png": (rows_of(files, "kept_bytes"), draw_bytes, f"Bytes kept for backward on {gpu}, eager is 1"),
    }
    for name, (rows, draw_rows, title) in pictures.items():
        count = max(1, sum(map(len, rows.values())) + 2 * len(rows))
        picture = Figure(figsize=(11, 1.5 + ROW_INCHES * count), layout="constrained")
        picture.suptitle(title, fontsize=13)
        heights = [len(of) + 1 for of in rows.values()] or [1]
        axes = picture.subplots(len(heights), 1, height_ratios=heights, squeeze=False, sharex=True)[:, 0]
        for ax, (bench, of) in zip(axes, rows.items(), strict=False):
            ax.set_title(bench, fontsize=10, loc="left")
            draw_rows(ax, of)
            ax.set_yticks(range(len(of)), [row.name for row in of], fontsize=8)
            ax.set_ylim(len(of) - 0.5, -0.5)
            ax.grid(axis="x", alpha=0.3)
            ax.tick_params(labelbottom=True, labelsize=8)
        shown = {handle.get_label(): handle for ax in axes for handle in ax.get_legend_handles_labels()[0]}
        if shown:
            picture.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=len(shown), fontsize=9)
        picture.savefig(folder / name, dpi=100)
    return [folder / name for name in pictures]


def draw_times(ax: Axes, rows: Sequence[Row]) -> None:
    """Draws ratios of times; a mark left of 1 means that ours is faster."""
    ax.axvline(1.0, color="black", linewidth=1)
    for rival, marker in MARKERS.items():
        points = [(row.values["ours"] / row.values[rival], y) for y, row in enumerate(rows) if rival in row.values]
        if points:
            label = f"/ {NAMES[rival]}"
            ax.scatter(*zip(*points, strict=True), color=COLORS[rival], marker=marker, s=28, label=label, zorder=3)
    ax.set_xscale("log")
    ticks = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0)
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.minorticks_off()


def draw_bytes(ax: Axes, rows: Sequence[Row]) -> None:
    present = [name for name in NAMES if any(name in row.values for row in rows)]
    height = 0.8 / len(present)
    for i, name in enumerate(present):
        bars = [(y, row.values[name] / row.values["eager"]) for y, row in enumerate(rows) if name in row.values]
        places = [y + (i - (len(present) - 1) / 2) * height for y, _ in bars]
        ax.barh(places, [width for _, width in bars], height, color=COLORS[name], label=NAMES[name])
