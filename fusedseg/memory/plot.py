"""Draws memory over a step, stacked by kind for one report or as a line for each of several reports, and curves."""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from .export import open_new
from .report import MemoryReport
from .tables import MEBIBYTE

# The colours of the kinds, in the order of stacking.  Tensors that existed before the step are at the bottom.
COLORS = {
    "parameters": "#4d4d4d",
    "buffers": "#6b6b6b",
    "optimizer state": "#8a8a8a",
    "constants": "#9d9d9d",
    "inputs": "#b5b5b5",
    "gradients": "#7b4ea3",
    "weight copies": "#b79ad1",
    "activation": "#2a6fdb",
    "concatenation": "#f08a24",
    "upsampled": "#f5c242",
    "pool indices": "#d6453d",
    "recomputed": "#39a96b",
    "loss": "#7fc8c2",
    "backward temporaries": "#9cc3f5",
    "optimizer step": "#d9bfae",
}
LINES = ("#9b9b9b", "#2a6fdb", "#f08a24", "#39a96b", "#d6453d", "#7b4ea3", "#4d4d4d", "#c2a200")
# The lines of the ways in the picture of a curve.
CURVES: dict[str, dict[str, Any]] = {
    "eager": {"color": "#6b6b6b", "marker": "o", "linestyle": "none", "markersize": 8},
    "checkpoint": {"color": "#d97706", "marker": "D", "linestyle": "none", "markersize": 8},
    "fusedseg": {"color": "#2a6fdb", "marker": ".", "markersize": 5},
    "torch.compile": {"color": "#d6453d", "marker": "^", "markersize": 6},
    'torch.compile, backend "fusedseg"': {"color": "#39a96b", "marker": "v", "markersize": 6},
}
# Shares of arithmetic on the horizontal axis, which is straight up to the second one, and logarithmic after it.
TICKS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
# The width of each phase in the picture.
WIDTHS = {"forward": 1.0, "loss": 0.2, "backward": 1.0, "optimizer": 0.4}
# The number of points along a phase of width 1.
STEPS = 400


def plot(path: str | Path, *reports: MemoryReport, overwrite: bool = False) -> None:
    """Draws memory over the step: stacked by kind for one report, or one line for each of several reports.

    The suffix of the path sets the format: png, svg, pdf, ...

    Raises:
        FileExistsError: the file exists, and ``overwrite`` is False.
        ImportError: matplotlib is not installed.
        ValueError: the suffix is no known format.
    """
    figure, ax = _new_figure(path, "plot")
    if len(reports) == 1:
        _stacked(ax, reports[0])
    else:
        _overlaid(ax, reports)
    _phases(ax, reports[0])
    ax.set_ylabel("memory, MiB")
    _save(figure, path, overwrite)


def plot_curve(path: str | Path, title: str, ways: Mapping[str, Sequence[Any]], eager: int, overwrite: bool) -> None:
    """Draws the points (budget, kept bytes, repeated share) of each way; ``eager`` bytes are 1."""
    figure, ax = _new_figure(path, "curve")
    for way, points in ways.items():
        style = CURVES[way]
        xs, ys = [point.repeated for point in points], [point.kept / eager for point in points]
        ax.plot(xs, ys, label=way, linewidth=1.8, **style)
    ax.set_xscale("symlog", linthresh=TICKS[1], linscale=0.5)
    ax.set_xticks(TICKS, [f"{tick:.0%}" for tick in TICKS])
    ax.minorticks_off()
    ax.set_xlim(-0.1 * TICKS[1], 1.2)
    ax.set_ylim(0, 1.08)
    ax.set_xlabel("arithmetic that backward repeats, as a share of the forward's")
    ax.set_ylabel("kept for backward, relative to eager mode")
    ax.set_title(f"{title}\neager mode keeps {eager / MEBIBYTE:,.0f} MiB", fontsize=12)
    ax.legend(frameon=False)
    _save(figure, path, overwrite)


def _new_figure(path: str | Path, what: str) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f'fusedseg.memory: {what} needs matplotlib: pip install "fusedseg[plot]"') from error
    figure = Figure(figsize=(9, 5), layout="constrained")
    known = figure.canvas.get_supported_filetypes()
    if Path(path).suffix.removeprefix(".") not in known:
        raise ValueError(f"fusedseg.memory: {what} writes {', '.join(sorted(known))}, got the path {str(path)!r}")
    ax = figure.subplots()
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color="#e4e4e4", linewidth=0.6)
    ax.set_axisbelow(True)
    return figure, ax


def _save(figure: Any, path: str | Path, overwrite: bool) -> None:
    with open_new(path, overwrite) as file:
        figure.savefig(file, format=Path(path).suffix.removeprefix("."), dpi=150)


def positions(report: MemoryReport) -> list[float]:
    """The horizontal position of each event; phases are as wide as ``WIDTHS`` says.

    Within a phase, the stretches between hooks of modules have equal widths.  So the same layer is at about the same
    position in two reports, although it may run a different number of ops in each.
    """
    starts = [*report.marks.values(), len(report.events)]
    xs: list[float] = []
    left = 0.0
    for phase, start, stop in zip(report.marks, starts, starts[1:], strict=False):
        hooks = {row.event for row in report.rows if start < row.event < stop}
        edges = [start, *sorted(hooks), stop]
        step = WIDTHS[phase] / (len(edges) - 1)
        for i, (begin, end) in enumerate(pairwise(edges)):
            xs += [left + step * (i + (at - begin) / (end - begin)) for at in range(begin, end)]
        left += WIDTHS[phase]
    return xs


def curves(report: MemoryReport) -> tuple[list[float], dict[str, list[float]]]:
    """Positions along the step, and the MiB of each kind at each position.

    If several events have the same position, the event with the most memory counts, so that no peak is lost.
    """
    alive = dict.fromkeys(COLORS, 0)
    for kind, nbytes in report.resident_by_kind().items():
        alive[kind] += nbytes
    total = highest = sum(alive.values())
    best = dict(alive)
    xs: list[float] = []
    ys: dict[str, list[float]] = {kind: [] for kind in COLORS}
    place = 0
    for number, x in zip(report.events, positions(report), strict=True):
        if int(x * STEPS) != place:
            _point(xs, ys, place / STEPS, best)
            place, highest = int(x * STEPS), -1
        storage = report.storages[number if number >= 0 else ~number]
        change = storage.nbytes if number >= 0 else -storage.nbytes
        alive[storage.kind] += change
        total += change
        if total > highest:
            best, highest = dict(alive), total
    _point(xs, ys, place / STEPS, best)
    _point(xs, ys, sum(WIDTHS[phase] for phase in report.marks), alive)
    return xs, ys


def _point(xs: list[float], ys: dict[str, list[float]], x: float, alive: dict[str, int]) -> None:
    xs.append(x)
    for kind, of in ys.items():
        of.append(alive[kind] / MEBIBYTE)


def _stacked(ax, report: MemoryReport) -> None:
    xs, ys = curves(report)
    kinds = [kind for kind in COLORS if any(ys[kind])]
    layers = [ys[kind] for kind in kinds]
    # A kind that is too small to be seen gets no line in the legend.
    top = report.total / MEBIBYTE
    labels = [kind if max(of) > 0.005 * top else "_" for kind, of in zip(kinds, layers, strict=True)]
    ax.stackplot(xs, layers, colors=[COLORS[kind] for kind in kinds], labels=labels, linewidth=0, step="post")
    _peak(ax, xs, [sum(values) for values in zip(*layers, strict=True)], "#000000", f"peak {top:,.0f} MiB")
    ax.set_title(
        f"{report.label}: memory over one training step of {report.model}\n"
        f"{report.saved / MEBIBYTE:,.0f} MiB kept for backward; peak {top:,.0f} MiB, "
        f"{report.resident / MEBIBYTE:,.0f} of which were there before",
        fontsize=12,
    )
    handles, names = ax.get_legend_handles_labels()
    ax.legend(handles[::-1], names[::-1], loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, title="kind")


def _overlaid(ax, reports: Sequence[MemoryReport]) -> None:
    order = sorted(range(len(reports)), key=lambda i: -reports[i].total)
    for i in order:
        report, color = reports[i], LINES[i % len(LINES)]
        xs, ys = curves(report)
        total = [sum(values) for values in zip(*ys.values(), strict=True)]
        peak = report.total / MEBIBYTE
        label = f"{report.label}: peak {peak:,.0f}, kept {report.saved / MEBIBYTE:,.0f}"
        ax.plot(xs, total, color=color, linewidth=1.6, label=label, drawstyle="steps-post")
        _peak(ax, xs, total, color, "")
    models = ", ".join(dict.fromkeys(report.model for report in reports))
    ax.set_title(f"memory over one training step of {models}", fontsize=12)
    # The legend is below the picture, because labels of combinations are long.
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2, frameon=False, title="MiB")


def _peak(ax, xs: Sequence[float], total: Sequence[float], color: str, text: str) -> None:
    at = max(range(len(total)), key=total.__getitem__)
    ax.plot([xs[at]], [total[at]], marker="o", color=color, markersize=6)
    if text:
        ax.annotate(text, (xs[at], total[at]), (8, 4), textcoords="offset points", fontsize=10)


def _phases(ax, report: MemoryReport) -> None:
    """Labels the horizontal axis with the names of the phases, because its numbers mean nothing."""
    edges = [0.0, *accumulate(WIDTHS[name] for name in report.marks)]
    for edge in edges[1:-1]:
        ax.axvline(edge, color="#555555", linewidth=0.8, linestyle=":")
    ax.set_xlim(0, edges[-1])
    ax.margins(y=0.1)
    ax.set_ylim(bottom=0)
    ax.set_xticks([(a + b) / 2 for a, b in pairwise(edges)], list(report.marks))
    ax.tick_params(axis="x", length=0)
    ax.set_xlabel("one training step: what is allocated and freed, in order; not to scale in time")
