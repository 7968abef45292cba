"""Draws the pictures of the README and of these pages, from the repository's root:

    python -m docs.make_pictures            # whole steps as a GPU measured them, from bench/results, and counted bytes
    python -m docs.make_pictures --demo     # the demo "slices" too: it trains two networks

Every picture is written to docs/pictures, and each must stay below 150 KB.
"""

import argparse
import contextlib
import io
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import nn

from bench.front import GIBIBYTE, NETWORKS
from bench.results import CaseResults, figure
from examples.demo import __main__ as demo
from fusedseg import __main__ as commands
from fusedseg import memory, unet
from fusedseg.memory.fake import fake_inputs, fake_mode, fake_model
from fusedseg.memory.meter import Course
from fusedseg.planning.picture import points

FOLDER = Path(__file__).parent / "pictures"
LARGEST_FILE = 150_000
FUSED = "fusedseg"
NAMES = {"eager": "eager PyTorch", FUSED: "blocks of fusedseg"}
# The run that the README shows, and the networks of its pictures: all ways of both have been measured.
MEASURED = Path(__file__).parents[1] / "bench" / "results" / "nvidia-h100-80gb-hbm3" / "steps.json"
SHOWN = "PlainConvUNet, 2x1x128x128x128 fp16 nhwc", "U-Net, 8x3x512x512 bf16 nhwc"
WAYS = {
    "eager": "eager mode",
    "checkpoint": "checkpoints",
    "compiled": "torch.compile",
    "budget 0.5": "torch.compile, budget 0.5",
    "ours": 'fusedseg, codegen "inductor"',
    "aten": "fusedseg",
}
OURS = "ours", "aten"
# The ways in the picture of bytes over a step, in the order of the colours of ``Theme.kinds``.
DRAWN = "compiled", "ours", "checkpoint", "aten", "eager"
# The kinds of ``bench/gpu/kinds.py``; every other one belongs to the rest.
KINDS = {
    "convolutions": ("convolution or product", "layout of convolutions"),
    "norms and activations": ("norm and activation",),
    "concatenations and copies": ("concatenation", "copy or cast"),
    "upsampling": ("upsampling",),
}
REST = "rest"


class Theme(NamedTuple):
    """Colours of the ground, of the text, of others' bars and ours, and of the kinds of kernels, the rest last."""

    ground: str
    text: str
    others: str
    ours: str
    kinds: tuple[str, ...]


THEMES = {
    "light": Theme("#ffffff", "#1f2328", "#a3a3a3", "#2a6fdb", ("#4a5568", "#2a6fdb", "#d97706", "#7c3aed", "#8c8c8c")),
    "dark": Theme("#0d1117", "#e6edf3", "#767d86", "#6aa5ff", ("#9aa4b2", "#5b9bff", "#f0a24a", "#b794f6", "#858d97")),
}


class Network(NamedTuple):
    """A network of this package and its inputs; with ``plain=True`` it is made of stock modules."""

    title: str
    make: Callable[..., nn.Module]
    shapes: list[tuple[int, ...]]

    def report(self, way: str) -> memory.Footprint:
        """One training step in fp16, on tensors without values."""
        with fake_mode():
            model = fake_model(partial(self.make, plain=way != FUSED), torch.float16)
            return memory.measure(model, *fake_inputs(self.shapes, torch.float16))


COUNTED = [
    Network("3D U-Net, 40 M parameters\n2×1×320×150×26", unet.unet3d_large, [(2, 1, 320, 150, 26)]),
    Network("3D U-Net, 14 M parameters\n2×1×320×150×26", unet.unet3d_small, [(2, 1, 320, 150, 26)]),
    Network(
        "2D U-Net, two encoders\n8×(5+3)×256×256",
        unet.lidar_optical_unet,
        [(8, 5, 256, 256), (8, 3, 256, 256)],
    ),
]


def draw_front(theme: Theme, cases: Mapping[str, CaseResults]) -> Figure:
    """The README's picture: peak and time of a step of each way, as a GPU measured them."""
    drawn = Figure(figsize=(9.2, 5.4), layout="constrained", facecolor=theme.ground)
    axes = drawn.subplots(len(SHOWN), 2, sharey=True)
    for row, name in zip(axes, SHOWN, strict=True):
        peaks = [figure(cases[name], way, "peak_bytes") for way in WAYS]
        steps = [figure(cases[name], way, "step") for way in WAYS]
        row[0].set_title(NETWORKS[name], fontsize=11.5, loc="left", color=theme.text, fontweight="bold")
        bars(row[0], theme, [peak and peak / GIBIBYTE for peak in peaks], "{:.1f} GiB")
        bars(row[1], theme, steps, "{:.0f} ms")
    axes[-1][0].set_xlabel("peak of a training step", fontsize=11, color=theme.text)
    axes[-1][1].set_xlabel("time of a training step", fontsize=11, color=theme.text)
    return drawn


def bars(ax: Axes, theme: Theme, values: Sequence[float | None], text: str) -> None:
    """A bar for each way, from the top, with its value at its end."""
    style(ax, theme)
    for y, (way, value) in enumerate(zip(WAYS, values, strict=True)):
        ours = way in OURS
        ax.barh(y, value or 0.0, 0.72, color=theme.ours if ours else theme.others)
        label, weight = "not measured" if value is None else text.format(value), "bold" if ours else "normal"
        ax.annotate(label, (value or 0.0, y), (4, 0), textcoords="offset points", va="center", color=theme.text,
                    fontsize=10.5, fontweight=weight)  # fmt: skip
    ax.set_yticks(range(len(WAYS)), list(WAYS.values()), fontsize=10.5)
    ax.set_xticks([])
    ax.spines["bottom"].set_visible(False)
    ax.set_ylim(len(WAYS) - 0.5, -0.5)
    ax.margins(x=0.2)


def draw_kinds(theme: Theme, cases: Mapping[str, CaseResults]) -> Figure:
    """The device time of a step by kind of kernel: a stacked bar for each way whose kernels were recorded."""
    drawn = Figure(figsize=(9.2, 4.6), layout="constrained", facecolor=theme.ground)
    axes = drawn.subplots(len(SHOWN), 1)
    for ax, name in zip(axes, SHOWN, strict=True):
        style(ax, theme)
        ways = [way for way in WAYS if "kernels" in cases[name]["contenders"].get(way, {})]
        for y, way in enumerate(ways):
            stacked(ax, theme, y, cases[name]["contenders"][way]["kernels"])
        ax.set_yticks(range(len(ways)), [WAYS[way] for way in ways], fontsize=10.5)
        ax.set_ylim(len(ways) - 0.5, -0.5)
        ax.margins(x=0.08)
        ax.set_title(NETWORKS[name], fontsize=11.5, loc="left", color=theme.text, fontweight="bold")
    axes[-1].set_xlabel("ms of kernels in one training step", fontsize=11, color=theme.text)
    handles, labels = axes[0].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False, fontsize=10,
                 labelcolor=theme.text, handlelength=1.0, columnspacing=1.2)  # fmt: skip
    return drawn


def stacked(ax: Axes, theme: Theme, y: int, kernels: Mapping[str, Any]) -> None:
    """A bar of all kinds, with the sum at its end and the milliseconds in each part that has room for them."""
    parts = {title: sum(kernels["kinds"].get(kind, {"ms": 0.0})["ms"] for kind in of) for title, of in KINDS.items()}
    parts[REST] = kernels["ms"] - sum(parts.values())
    left = 0.0
    for (title, value), color in zip(parts.items(), theme.kinds, strict=True):
        ax.barh(y, value, 0.72, left=left, color=color, label=title if y == 0 else None)
        if value > 2.5:
            ax.text(left + value / 2, y, f"{value:.0f}", ha="center", va="center", color=theme.ground, fontsize=9.5)
        left += value
    ax.text(left + 0.8, y, f"{left:.0f}", va="center", color=theme.text, fontsize=10.5, fontweight="bold")


def draw_courses(theme: Theme, cases: Mapping[str, CaseResults]) -> Figure:
    """The bytes over a step, as the allocator handed them out: a line for each way whose course was recorded."""
    drawn = Figure(figsize=(9.2, 4.2), layout="constrained", facecolor=theme.ground)
    for ax, name in zip(drawn.subplots(1, len(SHOWN)), SHOWN, strict=True):
        style(ax, theme)
        for way, course in courses_of(cases[name]).items():
            places, nbytes = points(course)
            color, line = theme.kinds[DRAWN.index(way)], "--" if way == "eager" else "-"
            ax.plot(places, [n / GIBIBYTE for n in nbytes], line, color=color, linewidth=1.6, label=WAYS[way])
        ax.axvline(1.0, color=theme.text, linewidth=0.8, linestyle=":")
        ax.set_xlim(0, 2)
        ax.set_ylim(bottom=0)
        ax.set_xticks([0.5, 1.5], ["forward", "backward"])
        ax.tick_params(axis="x", length=0)
        title = NETWORKS[name].replace(", ", "\n", 1)
        ax.set_title(title, fontsize=11, loc="left", color=theme.text, fontweight="bold")
    first = drawn.axes[0]
    first.set_ylabel("GiB", color=theme.text)
    handles, labels = first.get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False, fontsize=10,
                 labelcolor=theme.text)  # fmt: skip
    return drawn


def courses_of(case: CaseResults) -> dict[str, Course]:
    of = case["contenders"]
    return {way: of[way]["course"] for way in WAYS if way in DRAWN and "course" in of.get(way, {})}


def draw_kept(theme: Theme, reports: Mapping[str, Mapping[str, memory.Footprint]]) -> Figure:
    """Bytes kept for backward, and the peak, of several networks, of stock modules and of fused blocks."""
    drawn = Figure(figsize=(8, 4.8), layout="constrained", facecolor=theme.ground)
    ax = drawn.subplots()
    style(ax, theme)
    for row, ways in enumerate(reports.values()):
        for offset, way in zip((-0.2, 0.2), ways, strict=True):
            kept, peak = ways[way].saved / GIBIBYTE, ways[way].peak / GIBIBYTE
            y, color = row + offset, theme.ours if way == FUSED else theme.others
            ax.barh(y, kept, 0.36, color=color, label=NAMES[way] if row == 0 else None)
            ax.plot([peak, peak], [y - 0.18, y + 0.18], color=theme.text, linewidth=2, solid_capstyle="butt")
            ax.text(max(kept, peak) + 0.06, y, f"{kept:.2f}", va="center", color=theme.text, fontsize=11)
    ax.set_yticks(range(len(reports)), list(reports), fontsize=11)
    ax.invert_yaxis()
    ax.margins(x=0.1)
    ax.set_xlabel("GiB, fp16; bar: kept for backward; mark: peak of the step", fontsize=11)
    drawn.legend(loc="outside upper right", ncols=2, frameon=False, fontsize=11, labelcolor=theme.text)
    return drawn


def style(ax: Axes, theme: Theme) -> None:
    ax.set_facecolor(theme.ground)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(theme.text)
    ax.tick_params(colors=theme.text)
    ax.xaxis.label.set_color(theme.text)


def save(drawn: Figure, name: str) -> None:
    drawn.savefig(FOLDER / name, dpi=160)


def measured() -> Mapping[str, CaseResults]:
    return json.loads(MEASURED.read_text())["results"]


def draw_measured() -> None:
    for name, theme in THEMES.items():
        save(draw_front(theme, measured()), f"front-{name}.png")
        save(draw_kinds(theme, measured()), f"kinds-{name}.png")
        if all(courses_of(measured()[network]) for network in SHOWN):
            save(draw_courses(theme, measured()), f"courses-{name}.png")


def draw_counted() -> None:
    kept = {network.title: {way: network.report(way) for way in NAMES} for network in COUNTED}
    save(draw_kept(THEMES["light"], kept), "kept.png")
    shape = ["--input", "2,1,320,150,26", "--dtype", "fp16", "--codegen", "aten", "--overwrite", "--plot"]
    run("profile", "unet3d_small", *shape, str(FOLDER / "profile.png"))


def draw_demo() -> None:
    with tempfile.TemporaryDirectory() as folder:
        demo.main(["slices", "--out", folder])
        shrink(Path(folder) / "slices.png", FOLDER / "demo-slices.png")


def shrink(source: Path, target: Path) -> None:
    """Writes a picture anew with 256 colours, which bars, text and labels do not need more of."""
    from PIL import Image  # comes with matplotlib

    Image.open(source).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(target, optimize=True)


def run(*arguments: str) -> None:
    """A command of fusedseg, without its output."""
    with contextlib.redirect_stdout(io.StringIO()):
        code = commands.main(arguments)
    if code:
        raise SystemExit(f"fusedseg {' '.join(arguments)} ended with {code}")


def too_large() -> list[str]:
    return [
        f"{path.name}: {path.stat().st_size} bytes" for path in FOLDER.iterdir() if path.stat().st_size > LARGEST_FILE
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m docs.make_pictures", description=__doc__.partition("\n")[0])
    parser.add_argument("--demo", action="store_true", help="run the demo 'slices' too, and draw its results")
    options = parser.parse_args(arguments)
    FOLDER.mkdir(exist_ok=True)
    draw_measured()
    draw_counted()
    if options.demo:
        draw_demo()
    if too_large():
        raise SystemExit(f"larger than {LARGEST_FILE} bytes: {', '.join(too_large())}")


if __name__ == "__main__":
    main()
