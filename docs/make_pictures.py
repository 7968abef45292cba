"""Draws the pictures of the README and of these pages, from the repository's root:

    python -m docs.make_pictures            # memory: counted on tensors without values, about a minute
    python -m docs.make_pictures --demos    # the three demos too: they train networks and take minutes

Every picture is written to docs/pictures, and each must stay below 150 KB.
"""

import argparse
import contextlib
import io
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import nn

from examples.demo import __main__ as demo
from fusedseg import __main__ as commands
from fusedseg import memory, unet
from fusedseg.memory.fake import fake_inputs, fake_mode, fake_model
from fusedseg.planning.picture import PHASES, points

FOLDER = Path(__file__).parent / "pictures"
LARGEST_FILE = 150_000
GIBIBYTE = 2**30
FUSED = "fusedseg"
NAMES = {"eager": "eager PyTorch", "checkpoint": "checkpoints", FUSED: "blocks of fusedseg"}
# Checkpoints run each convolution of forward again, beside the two of its gradients.
AGAIN = {"eager": "", "checkpoint": "\n+33% arithmetic", FUSED: ""}


class Drawn(NamedTuple):
    """A training step: the bytes that are there before it, and what the meter has counted."""

    before: int
    step: memory.Footprint

    @property
    def total(self) -> int:
        return self.before + self.step.peak


class Theme(NamedTuple):
    """Colours of the ground, of the text and of each way."""

    ground: str
    text: str
    ways: dict[str, str]


THEMES = {
    "light": Theme("#ffffff", "#1f2328", {"eager": "#8b8b8b", "checkpoint": "#d97706", FUSED: "#2a6fdb"}),
    "dark": Theme("#0d1117", "#e6edf3", {"eager": "#a0a7b0", "checkpoint": "#f0a24a", FUSED: "#6aa5ff"}),
}


class Network(NamedTuple):
    """A network of this package and its inputs; with ``plain=True`` it is made of stock modules."""

    title: str
    make: Callable[..., nn.Module]
    shapes: list[tuple[int, ...]]

    def report(self, way: str) -> Drawn:
        """One training step in fp16, on tensors without values."""
        with fake_mode() as mode:
            model = fake_model(partial(self.make, plain=way != FUSED), mode, torch.float16)
            if way == "checkpoint":
                memory.checkpoint_blocks(model)
            inputs = fake_inputs(self.shapes, torch.float16)
            before = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers(), *inputs))
            return Drawn(before, memory.measure(model, *inputs))


NETWORKS = [
    Network("3D U-Net, 40 M parameters\n2×1×320×150×26", unet.unet3d_large, [(2, 1, 320, 150, 26)]),
    Network("3D U-Net, 14 M parameters\n2×1×320×150×26", unet.unet3d_small, [(2, 1, 320, 150, 26)]),
    Network(
        "2D U-Net, two encoders\n8×(5+3)×256×256",
        unet.lidar_optical_unet,
        [(8, 5, 256, 256), (8, 3, 256, 256)],
    ),
]


def draw_step(theme: Theme, reports: dict[str, Drawn]) -> Figure:
    """The README's picture: a line for each way."""
    figure, ax = new_figure(theme, (8, 4.2))
    for way, report in reports.items():
        xs, ys = points(report.step.course)
        total = [(report.before + nbytes) / GIBIBYTE for nbytes in ys]
        color = theme.ways[way]
        ax.fill_between(xs, total, step="post", color=color, alpha=0.10, linewidth=0)
        ax.plot(xs, total, color=color, linewidth=1.8, drawstyle="steps-post")
        peak = max(total)
        at = xs[total.index(peak)]
        ax.plot(at, peak, "o", color=color, markersize=6)
        text = f"{NAMES[way]}: peak {peak:.1f} GiB{AGAIN[way]}"
        style = {"color": color, "fontsize": 12.5, "fontweight": "bold", "va": "bottom"}
        ax.annotate(text, (at, peak), (14, 1), textcoords="offset points", **style).set_in_layout(False)
    for number, phase in enumerate(PHASES):
        ax.text(number + 0.5, -0.16, phase, ha="center", va="top", color=theme.text, fontsize=12)
    ax.axvline(1, color=theme.text, linewidth=0.8, linestyle=":", alpha=0.6)
    ax.set_xlim(0, len(PHASES))
    ax.set_ylim(0, 5.1)
    ax.set_xticks([])
    ax.set_ylabel("memory in use, GiB", fontsize=12)
    ax.set_title("One training step of a 3D U-Net (40 M parameters, fp16, 2×1×320×150×26)", fontsize=13, pad=10)
    return figure


def draw_kept(theme: Theme, reports: dict[str, dict[str, Drawn]]) -> Figure:
    """Bytes kept for backward, and the peak, of several networks, of stock modules and of fused blocks."""
    figure, ax = new_figure(theme, (8, 4.8))
    for row, ways in enumerate(reports.values()):
        for offset, way in zip((-0.2, 0.2), ways, strict=True):
            kept, peak = ways[way].step.saved / GIBIBYTE, ways[way].step.peak / GIBIBYTE
            y, color = row + offset, theme.ways[way]
            ax.barh(y, kept, 0.36, color=color, label=NAMES[way] if row == 0 else None)
            ax.plot([peak, peak], [y - 0.18, y + 0.18], color=theme.text, linewidth=2, solid_capstyle="butt")
            ax.text(max(kept, peak) + 0.06, y, f"{kept:.2f}", va="center", color=theme.text, fontsize=11)
    ax.set_yticks(range(len(reports)), list(reports), fontsize=11)
    ax.invert_yaxis()
    ax.margins(x=0.1)
    ax.set_xlabel("GiB, fp16; bar: kept for backward; mark: peak of the step", fontsize=11)
    figure.legend(loc="outside upper right", ncols=2, frameon=False, fontsize=11, labelcolor=theme.text)
    return figure


def new_figure(theme: Theme, size: tuple[float, float]) -> tuple[Figure, Axes]:
    figure = Figure(figsize=size, layout="constrained", facecolor=theme.ground)
    ax = figure.subplots()
    ax.set_facecolor(theme.ground)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(theme.text)
    ax.tick_params(colors=theme.text)
    for label in (ax.title, ax.xaxis.label, ax.yaxis.label):
        label.set_color(theme.text)
    return figure, ax


def save(figure: Figure, name: str) -> None:
    figure.savefig(FOLDER / name, dpi=200)


def draw_memory() -> None:
    large = NETWORKS[0]
    step = {way: large.report(way) for way in NAMES}
    for name, theme in THEMES.items():
        save(draw_step(theme, step), f"step-{name}.png")
    light = THEMES["light"]
    kept = {network.title: {way: network.report(way) for way in ("eager", FUSED)} for network in NETWORKS}
    save(draw_kept(light, kept), "kept.png")
    shape = ["--input", "2,1,320,150,26", "--dtype", "fp16", "--codegen", "aten", "--overwrite", "--plot"]
    run("profile", "unet3d_small", *shape, str(FOLDER / "profile.png"))


def draw_demos() -> None:
    for name in demo.DEMOS:
        with tempfile.TemporaryDirectory() as folder:
            demo.main([name, "--out", folder])
            shrink(Path(folder) / f"{name}.png", FOLDER / f"demo-{name}.png")


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
    parser.add_argument("--demos", action="store_true", help="run the three demos too, and draw their results")
    options = parser.parse_args(arguments)
    FOLDER.mkdir(exist_ok=True)
    draw_memory()
    if options.demos:
        draw_demos()
    if too_large():
        raise SystemExit(f"larger than {LARGEST_FILE} bytes: {', '.join(too_large())}")


if __name__ == "__main__":
    main()
