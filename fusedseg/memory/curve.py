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
from .plot import plot_curve
from .search import EXAMPLE, batched
from .strategy import Backend, Convert, NoBlocks, checkpoint_blocks
from .tables import gib, table, wrapped

OP = "fusedseg.memory.curve"
EAGER, CHECKPOINT, OURS, OURS_COMPILED, COMPILER = (
    "eager", "checkpoint", "fusedseg", "fusedseg, compiled", "torch.compile",
)  # fmt: skip
BACKEND = 'torch.compile, backend "fusedseg"'
# The compiler's own budgets that are tried.
COMPILER_BUDGETS = (1.0, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
# The backend's budgets that are tried.
BACKEND_BUDGETS = (0.5, 0.4, 0.3, 0.2, 0.1)
# The largest share of the forward's arithmetic that they may repeat.
MOST = 0.5
# The number of points of a way that a table shows.
SHOWN = 8


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
        """Draws the ways as lines: bytes, as a share of ``eager``, over repeated arithmetic.

        It raises as ``MemoryReport.plot``.
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
            "activation_memory_budget. The peak of a compiled model is read from its graphs, from the life of each "
            "tensor if elementwise functions are fused; the peak of eager mode is that of the step."
        )
        lines = [f"Left out: {way}: {reason}." for way, reason in self.left_out.items()]
        return "\n".join([title, "═" * len(title), self.table(), "", wrapped("\n".join([note, *lines]))])


def curve(
    model: Model,
    input_shape: Sequence[Any],
    *,
    convert: Convert | None = None,
    batch: int = EXAMPLE,
    dtype: torch.dtype = torch.float32,
    compiled: bool = True,
    backend: Backend | None = None,
    progress: Callable[[str], None] | None = None,
) -> Curve:
    """Counts what each way to train keeps for backward, and the arithmetic that it repeats for this.

    The ways are eager mode, checkpoints of each block, the converted model, and with ``compiled`` the budgets of
    ``torch.compile`` itself, those of ``backend``, and the converted model under ``torch.compile``.  All bytes are
    those of tensors without values.

    Args:
        model: a function that builds the model, or a module, which is copied without its values.
        input_shape: the shape of one sample without the batch, or a sequence of such shapes, one for each input.
        convert: a function that is called with a copy of the model and returns the converted model; None leaves the
            converted model out.
        batch: the batch.
        dtype: the dtype of the model.
        compiled: whether models are compiled, which takes seconds for each of about ten compilations.
        backend: a function that says what the compiler backend keeps: ``fusedseg.compiler.partitions``.  None leaves
            out ``torch.compile(backend="fusedseg")``.
        progress: a function that is called with a short text before each step.

    Raises:
        ValueError: the model keeps nothing for backward, because no parameter requires a gradient for example.
        ``profile`` lists further errors.
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
        if convert is not None:
            say(OURS)
            ours = convert(fake_model(model, mode, dtype))
            found = measure(ours, *inputs)
            ways[OURS] = (Point("", found.saved, found.peak, 0.0),)
        if compiled:
            tries: dict[str, Callable[[], list[Point]]] = {COMPILER: lambda: _compiler(net, inputs, COMPILER_BUDGETS)}
            if backend is not None:
                tries[BACKEND] = lambda: _backend(backend, net, inputs)
            if convert is not None:
                tries[OURS_COMPILED] = lambda: _compiler(ours, inputs, (1.0,))
            for way, points in tries.items():
                say(way)
                try:
                    ways[way] = tuple(points())
                except RuntimeError as error:
                    left_out[way] = str(error).partition(": ")[2]
    return Curve(name, tuple(shapes), ways, left_out)


def _compiler(model: nn.Module, inputs: Sequence[torch.Tensor], budgets: Sequence[float]) -> list[Point]:
    found = partitions(model, inputs, budgets)
    names = {budget: "" if budget == 1.0 else f"{budget:g}" for budget in found}
    return [Point(names[budget], of.kept, of.peak, of.repeated) for budget, of in found.items()]


def _backend(backend: Backend, model: nn.Module, inputs: Sequence[torch.Tensor]) -> list[Point]:
    budgets: list[float | None] = [None, *BACKEND_BUDGETS]
    ways = [{} if budget is None else {"budget": budget, "extra_flops": MOST} for budget in budgets]
    found: dict[int, Point] = {}
    for budget, of in zip(budgets, backend(model, inputs, ways, None), strict=True):
        # A budget that cannot be met keeps what a larger one keeps.
        found.setdefault(of.kept, Point("" if budget is None else f"{budget:g}", of.kept, of.peak, of.repeated))
    return [found[kept] for kept in sorted(found, reverse=True)]


def spread(items: Sequence[Any], kept: Callable[[Any], int]) -> list[Any]:
    """At most ``SHOWN`` of the items, with about equal distances between their bytes; the first and the last stay."""
    if len(items) <= SHOWN:
        return list(items)
    most, least = kept(items[0]), kept(items[-1])
    wanted = [most + (least - most) * i / (SHOWN - 1) for i in range(SHOWN)]
    places = {min(range(len(items)), key=lambda i: abs(kept(items[i]) - nbytes)) for nbytes in wanted}
    return [items[i] for i in sorted(places | {0, len(items) - 1})]
