"""``curve``: the bytes that a training step keeps, against the arithmetic that it repeats, for each way to train."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from .fake import Model, fake_inputs, fake_mode, fake_model, profile_fake
from .plot import plot_curve
from .search import STARTS, batched
from .strategy import Backend, Convert, NoBlocks, NotOneGraph, Strategy
from .tables import gib, table, wrapped

OP = "fusedseg.memory.curve"
EAGER, CHECKPOINT, OURS, COMPILER = (
    "eager", "checkpoint", "fusedseg", "torch.compile",
)  # fmt: skip
BACKEND = 'torch.compile, backend "fusedseg"'
# The compiler's own budgets that are tried, beside its default.
COMPILER_BUDGETS = (0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
# The backend's budgets that are tried, and the largest share of the forward's arithmetic that they may repeat.
BACKEND_BUDGETS, MOST = (0.5, 0.4, 0.3, 0.2, 0.1), 0.5


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
        """Draws the ways as lines: bytes, as a share of ``eager``, over repeated arithmetic; raises as ``plot``."""
        plot_curve(path, self.title(), self.ways, self.eager, overwrite)

    def title(self) -> str:
        shapes = " and ".join("×".join(map(str, shape)) for shape in self.shapes)
        return f"{self.model}, {shapes}"

    def table(self) -> str:
        """A line for each point."""
        eager = self.ways[EAGER][0]
        lines = [
            (
                way,
                point.budget,
                gib(point.kept),
                f"{point.kept / eager.kept:.3f}",
                gib(point.peak),
                f"{point.peak / eager.peak:.3f}",
                f"{point.repeated:.1%}",
            )
            for way, points in self.ways.items()
            for point in points
        ]
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
    batch: int = STARTS[0],
    dtype: torch.dtype = torch.float32,
    backend: Backend | None = None,
    progress: Callable[[str], None] | None = None,
) -> Curve:
    """Counts what each way to train keeps for backward, and the arithmetic that it repeats for this.

    The ways are eager mode, checkpoints of each block, the converted model, and with ``backend`` the budgets of
    ``torch.compile`` itself and those of the backend.  All bytes are those of tensors without values.

    Args:
        model: a function that builds the model, or a module, which is copied without its values.
        input_shape: the shape of one sample without the batch, or a sequence of such shapes, one for each input.
        convert: a function that is called with a copy of the model and returns the converted model; None leaves the
            converted model out.
        batch: the batch.
        dtype: the dtype of the model.
        backend: a function that says what compiled models keep: ``fusedseg.compiler.partitions``.  None leaves them
            out; each of their compilations takes seconds.
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
        inputs, nets = fake_inputs(shapes, dtype), dict[str, nn.Module]()
        steps = {EAGER: Strategy(), CHECKPOINT: Strategy(checkpoint=True)}
        steps |= {OURS: Strategy(converted=True)} if convert is not None else {}
        for way, strategy in steps.items():
            say(way)
            try:
                nets[way] = strategy.prepare(fake_model(model, mode, dtype), convert)
            except NoBlocks as error:
                left_out[way] = str(error).partition(": ")[2]
                continue
            found = profile_fake(nets[way], inputs)
            ways[way] = (Point("", found.saved, found.peak, found.repeated),)
            if not found.saved:
                name = type(nets[way]).__name__
                raise ValueError(f"{OP}: {name} keeps nothing for backward, so there is nothing to save; is it frozen?")
        if backend is not None:
            own = {f"{budget:g}": budget for budget in COMPILER_BUDGETS}
            ours = {f"{budget:g}": {"budget": budget, "extra_flops": MOST} for budget in BACKEND_BUDGETS}
            # What the backend is asked for each budget.
            compiled: dict[str, dict[str, Any]] = {COMPILER: {"": 1.0, **own}, BACKEND: {"": {}, **ours}}
            for way, options in compiled.items():
                say(way)
                try:
                    counted = backend(nets[EAGER], inputs, list(options.values()), None)
                except NotOneGraph as error:
                    left_out[way] = str(error).partition(": ")[2]
                    continue
                points = (Point(budget, *found) for budget, found in zip(options, counted, strict=True))
                # A budget that cannot be met keeps what a larger one keeps.
                first = {point.kept: point for point in reversed(list(points))}
                ways[way] = tuple(sorted(first.values(), key=lambda point: -point.kept))
    return Curve(type(nets[EAGER]).__name__, tuple(shapes), ways, left_out)
