"""``curve``: the bytes that a training step keeps, against the arithmetic that it repeats, for each way to train."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from .compiled import partitions
from .fake import Model, fake_inputs, fake_mode, fake_model, profile_fake
from .meter import measure
from .plan import gib
from .plot import plot_curve
from .search import EXAMPLE, batched
from .strategy import Budgets, Ladder, NoBlocks, Rung, checkpoint_blocks
from .tables import table, wrapped

OP = "fusedseg.memory.curve"
EAGER, CHECKPOINT, OURS, OURS_COMPILED, COMPILER = (
    "eager", "checkpoint", "fusedseg", "fusedseg, compiled", "torch.compile",
)  # fmt: skip
# The compiler's own budgets that are tried.
COMPILER_BUDGETS = (1.0, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
# Budgets that repeat a larger share of the forward's arithmetic are left out.
MOST = 0.5
# The number of our budgets that are compiled, and that a table shows.
SHOWN = 8
ALMOST = 0.99


class Point(NamedTuple):
    """One budget of one way.

    Attributes:
        budget: the budget; "" for none.
        kept: the bytes kept for backward.
        peak: the most bytes at once in a step, without parameters and inputs.
        repeated: the share of the forward's arithmetic that backward repeats.
    """

    budget: str
    kept: int
    peak: int
    repeated: float


@dataclass(frozen=True)
class Curve:
    """The result of ``curve``; printing it shows a table.

    Attributes:
        model: the class of the model.
        shapes: the shapes of its inputs.
        ways: for each way to train its points, by falling bytes.
        left_out: the ways that cannot run, and the reason.
    """

    model: str
    shapes: tuple[tuple[int, ...], ...]
    ways: dict[str, tuple[Point, ...]]
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def eager(self) -> int:
        """The bytes that the stock model keeps in eager mode."""
        return self.ways[EAGER][0].kept

    def plot(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Draws the ways as lines: bytes, as a share of ``eager``, over repeated arithmetic; needs matplotlib.

        Raises:
            FileExistsError: the file exists, and ``overwrite`` is False.
            ImportError: matplotlib is not installed.
            ValueError: the suffix of the path is no known format.
        """
        plot_curve(self.title(), self.ways, self.eager, path, overwrite)

    def title(self) -> str:
        shapes = " and ".join("×".join(map(str, shape)) for shape in self.shapes)
        return f"{self.model}, {shapes}"

    def table(self) -> str:
        """A line for each point, of the ways with many budgets for some of them."""
        lines = []
        for way, points in self.ways.items():
            for point in spread(points, lambda point: point.kept):
                eager = self.ways[EAGER][0]
                share, peak = f"{point.kept / eager.kept:.3f}", f"{point.peak / eager.peak:.3f}"
                repeated = f"{point.repeated:.1%}"
                lines.append((way, point.budget, gib(point.kept), share, gib(point.peak), peak, repeated))
        return table(("", "budget", "kept", "of eager", "peak", "of eager", "repeated"), lines)

    def to_dict(self) -> dict[str, Any]:
        """All points as plain values, for JSON."""
        names = ("budget", "kept_bytes", "peak_bytes", "repeated")
        ways = {way: [dict(zip(names, point, strict=True)) for point in points] for way, points in self.ways.items()}
        return {"model": self.model, "shapes": self.shapes, "ways": ways, "left_out": self.left_out}

    def __str__(self) -> str:
        title = f"{self.title()}: bytes kept against arithmetic repeated"
        note = (
            "Kept: for backward, at the end of forward, counted on tensors without values. Repeated: the arithmetic "
            "that backward runs again, as a share of the forward's. The budget of torch.compile is its own "
            "activation_memory_budget. The peak of a compiled model is that of its graphs if elementwise functions are "
            "fused."
        )
        lines = [f"Left out: {way}: {reason}." for way, reason in self.left_out.items()]
        return "\n".join([title, "═" * len(title), self.table(), "", wrapped("\n".join([note, *lines]))])


def curve(
    model: Model,
    input_shape: Sequence[Any],
    budgets: Budgets,
    *,
    batch: int = EXAMPLE,
    dtype: torch.dtype = torch.float32,
    compiled: bool = True,
    progress: Callable[[str], None] | None = None,
) -> Curve:
    """Counts what each way to train keeps for backward, and the arithmetic that it repeats for this.

    The ways are eager mode, checkpoints of each block, this package with all its byte budgets, and with ``compiled``
    the same under ``torch.compile``, and the budgets of ``torch.compile`` itself.  All bytes are those of tensors
    without values.

    Args:
        model: a function that builds the model, or a module, which is copied without its values.
        input_shape: the shape of one sample without the batch, or a sequence of such shapes, one for each input.
        budgets: a function that is called with a copy of the model and its inputs, and returns the ladder of its
            budgets: ``fusedseg.conversion.Ladder``.
        batch: the batch.
        dtype: the dtype of the model.
        compiled: whether models are compiled, which takes seconds for each of about ten compilations.
        progress: a function that is called with a short text before each step.

    Raises:
        ValueError: the model keeps nothing for backward, because no parameter requires a gradient for example.
        ``estimate`` lists further errors.
    """
    say = progress or (lambda text: None)
    shapes = batched(input_shape, batch)
    ways: dict[str, tuple[Point, ...]] = {}
    left_out: dict[str, str] = {}
    with fake_mode() as mode:
        net, inputs = fake_model(model, mode, dtype), fake_inputs(shapes, dtype)
        name = type(net).__name__
        say(EAGER)
        found = measure(net, *inputs)
        if not found.saved:
            raise ValueError(f"{OP}: {name} keeps nothing for backward, so there is nothing to save; is it frozen?")
        ways[EAGER] = (Point("", found.saved, found.peak, 0.0),)
        try:
            say(CHECKPOINT)
            blocks = fake_model(model, mode, dtype)
            checkpoint_blocks(blocks)
            report = profile_fake(blocks, inputs)
            ways[CHECKPOINT] = (Point("", report.saved, report.peak, report.repeated),)
        except NoBlocks as error:
            left_out[CHECKPOINT] = str(error).partition(": ")[2]
        say(OURS)
        try:
            ladder = budgets(fake_model(model, mode, dtype), inputs)
        except ValueError as error:
            left_out[OURS] = str(error).partition(": ")[2]
        else:
            rungs = [rung for rung in ladder if rung.repeated <= MOST]
            ways[OURS] = tuple(Point(_budget(rung), rung.kept, rung.peak, rung.repeated) for rung in rungs)
        if compiled:
            tries: dict[str, Callable[[], list[Point]]] = {COMPILER: lambda: _compiler(net, inputs)}
            if OURS in ways:
                tries[OURS_COMPILED] = lambda: _ours_compiled(net, ladder, rungs, inputs, say)
            for way, points in tries.items():
                say(way)
                try:
                    ways[way] = tuple(points())
                except RuntimeError as error:
                    left_out[way] = str(error).partition(": ")[2]
    return Curve(name, tuple(shapes), ways, left_out)


def _budget(rung: Rung) -> str:
    return "" if rung.budget is None else f"{rung.budget:g}"


def _ours_compiled(
    stock: nn.Module, ladder: Ladder, rungs: Sequence[Rung], inputs: Sequence[torch.Tensor], say: Callable[[str], None]
) -> list[Point]:
    (of_stock,) = partitions(stock, inputs).values()
    points = []
    for rung in spread(rungs, lambda rung: rung.kept):
        ladder.follow(rung)
        say(f"{OURS_COMPILED}, budget {_budget(rung) or 'none'}")
        (found,) = partitions(ladder.model, inputs).values()
        # If an op of this package holds a convolution, PyTorch does not count its arithmetic.  What eager mode repeats
        # is the most that compiled code repeats.
        counted = found.flops >= ALMOST * of_stock.flops
        points.append(Point(_budget(rung), found.kept, found.peak, found.repeated if counted else rung.repeated))
    return points


def _compiler(model: nn.Module, inputs: Sequence[torch.Tensor]) -> list[Point]:
    found = partitions(model, inputs, COMPILER_BUDGETS)
    names = {budget: "" if budget == 1.0 else f"{budget:g}" for budget in found}
    return [Point(names[budget], of.kept, of.peak, of.repeated) for budget, of in found.items()]


def spread(items: Sequence[Any], kept: Callable[[Any], int]) -> list[Any]:
    """At most ``SHOWN`` of the items, with about equal distances between their bytes; the first and the last stay."""
    if len(items) <= SHOWN:
        return list(items)
    most, least = kept(items[0]), kept(items[-1])
    wanted = [most + (least - most) * i / (SHOWN - 1) for i in range(SHOWN)]
    places = {min(range(len(items)), key=lambda i: abs(kept(items[i]) - nbytes)) for nbytes in wanted}
    return [items[i] for i in sorted(places | {0, len(items) - 1})]
