"""Draws the bytes that are alive over a training step, a line for each way."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..memory.meter import Course
from ..memory.tables import MEBIBYTE, open_new

COLORS = ("#8b8b8b", "#2a6fdb", "#d97706", "#39a96b")
PHASES = ("forward", "backward")


def draw(path: str | Path, title: str, courses: Mapping[str, Course], before: int, overwrite: bool = False) -> None:
    """Draws the course of each way: the bytes after each event of forward and of backward, beside those ``before``.

    The suffix of the path sets the format: png, svg, pdf, ...  ``Profile.plot`` lists the errors.
    """
    figure, ax = _new_figure(path)
    for color, (way, course) in zip(COLORS, courses.items(), strict=False):
        xs, ys = points(course)
        total = [(before + nbytes) / MEBIBYTE for nbytes in ys]
        peak = max(total)
        ax.plot(xs, total, color=color, linewidth=1.6, drawstyle="steps-post", label=f"{way}: peak {peak:,.0f} MiB")
        ax.plot([xs[total.index(peak)]], [peak], marker="o", color=color, markersize=6)
    ax.axvline(1.0, color="#555555", linewidth=0.8, linestyle=":")
    ax.set_xlim(0, len(PHASES))
    ax.set_ylim(bottom=0)
    ax.set_xticks([0.5, 1.5], PHASES)
    ax.tick_params(axis="x", length=0)
    ax.set_xlabel("one training step: what is allocated and freed, in order; not to scale in time")
    ax.set_ylabel("memory, MiB")
    ax.set_title(f"{title}\n{before / MEBIBYTE:,.0f} MiB are there before the step", fontsize=12)
    ax.legend(frameon=False)
    with open_new(path, overwrite) as file:
        figure.savefig(file, format=Path(path).suffix.removeprefix("."), dpi=150)


def points(course: Course) -> tuple[list[float], list[int]]:
    """The horizontal position of each event, where forward and backward have the same width, and its bytes."""
    xs: list[float] = []
    ys: list[int] = []
    for start, phase in enumerate(course):
        xs += [start + place / max(len(phase), 1) for place in range(len(phase))]
        ys += phase
    return xs, ys


def _new_figure(path: str | Path) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('fusedseg.profile: a picture needs matplotlib: pip install "fusedseg[plot]"') from error
    figure = Figure(figsize=(9, 5), layout="constrained")
    known = figure.canvas.get_supported_filetypes()
    if Path(path).suffix.removeprefix(".") not in known:
        raise ValueError(
            f"fusedseg.profile: a picture is one of {', '.join(sorted(known))}, got the path {str(path)!r}"
        )
    ax = figure.subplots()
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color="#e4e4e4", linewidth=0.6)
    ax.set_axisbelow(True)
    return figure, ax
