"""``profile``: what each way to run a training step keeps and needs, and what is kept, module by module."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..convert import convert as convert_blocks
from ..memory.fake import Model, OptimizerFactory, bytes_before, eager_step, fake_inputs, fake_mode, fake_model
from ..memory.meter import Course
from ..memory.step_bytes import StepBytes
from ..memory.tables import mib, table, wrapped
from .picture import draw
from .ways import BACKEND, CONVERT, EAGER, Convert

if TYPE_CHECKING:
    from ..compiler.report import KeptByModule

COMPILER = "torch.compile"


@dataclass(frozen=True)
class Profile:
    """The memory of one training step; ``print`` shows it.  All numbers are bytes unless they say MiB.

    Attributes:
        model: the class of the model.
        parameters: the number of parameters.
        before: the bytes that are there before the step, by kind: parameters, buffers, optimizer state, inputs.
        ways: for each way to run the step what it needs.  "eager" is the model as it is, "convert" what
            ``fusedseg.convert`` makes of it, "torch.compile" PyTorch's compiler, and "fusedseg" its backend of this
            package.
        modules: what is kept of what each module makes, the largest in eager mode first.
        bits_unused: whether a graph ignores the option bits (``unpacked`` of a graph of ``compiler.report``).
        left_out: the ways that cannot be counted, and the reason.
        courses: the bytes over the step of "eager" and "fusedseg", for the picture.
    """

    model: str
    parameters: int
    before: Mapping[str, int]
    ways: Mapping[str, StepBytes]
    modules: "Sequence[KeptByModule]" = ()
    bits_unused: bool = False
    left_out: Mapping[str, str] = field(default_factory=dict)
    courses: Mapping[str, Course] = field(default_factory=dict, repr=False)

    def table(self) -> str:
        """A line for each way: what it keeps, and its peak, beside eager mode's."""
        eager, before = self.ways[EAGER], sum(self.before.values())
        lines = [
            (
                way,
                mib(needs.kept),
                f"{needs.kept / max(eager.kept, 1):.2f}",
                mib(needs.peak),
                mib(needs.with_workspaces),
                f"{needs.with_workspaces / max(eager.with_workspaces, 1):.2f}",
                mib(before + needs.with_workspaces),
                f"{needs.repeated:.1%}" if needs.repeated else "",
            )
            for way, needs in self.ways.items()
        ]
        head = ("MiB", "kept", "of eager", "peak", "with workspaces", "of eager", "in all", "repeated")
        return table(head, lines)

    def module_table(self, count: int | None = 20) -> str:
        """A line for each of the ``count`` modules that keep the most in eager mode; None shows all modules."""
        shown = list(self.modules)[:count]
        lines = [(row.module, row.kind, mib(row.eager), mib(row.ours)) for row in shown]
        rest = list(self.modules)[len(shown) :]
        if rest:
            sums = mib(sum(row.eager for row in rest)), mib(sum(row.ours for row in rest))
            lines.append((f"{len(rest)} more modules", "", *sums))
        return table(("made by", "class", EAGER, BACKEND), lines, left=2)

    def plot(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Draws the memory over the step, in eager mode and with the backend.

        Raises:
            FileExistsError: the file exists, and ``overwrite`` is False.
            ImportError: matplotlib is not installed.
            ValueError: the suffix of the path is no known format.
        """
        draw(path, f"{self.model}: memory over one training step", self.courses, sum(self.before.values()), overwrite)

    def to_dict(self) -> dict[str, Any]:
        """The profile as plain values, for JSON."""
        return {
            "model": self.model,
            "parameters": self.parameters,
            "before_bytes": dict(self.before),
            "ways": {way: needs._asdict() for way, needs in self.ways.items()},
            "modules": [row._asdict() for row in self.modules],
            "left_out": dict(self.left_out),
        }

    def __str__(self) -> str:
        title = f"{self.model}: the memory of one training step"
        there = ", ".join(f"{kind} {mib(nbytes)}" for kind, nbytes in self.before.items() if nbytes)
        notes = [
            f"{self.parameters:,} parameters. Before the step {mib(sum(self.before.values()))} MiB are there: {there}. "
            "Kept: for backward, at the end of forward. Peak: the most bytes of tensors at once, gradients of weights "
            "included, without what was there before. With workspaces: with an estimate of the images that "
            "convolutions copy into channels_last. In all: that, and what was there before. Repeated: the arithmetic "
            "that backward runs again, as a share of forward's.",
            "Not counted: other workspaces, the loss, what the allocator rounds up and holds in vain.",
        ]
        if self.bits_unused:
            notes.append(
                "Option bits: not used where nothing may be packed, or the step would keep more, or peak higher."
            )
        notes += [f"Left out: {way}: {reason}." for way, reason in self.left_out.items()]
        lines = [title, "═" * len(title), self.table(), "", wrapped("\n".join(notes))]
        if self.modules:
            lines += ["", "Kept for backward, MiB, by the module that has made it", self.module_table()]
        return "\n".join(lines)


def profile(
    model: Model,
    *inputs: Any,
    options: Mapping[str, Any] | None = None,
    autocast: torch.dtype | None = None,
    dtype: torch.dtype = torch.float32,
    optimizer: OptimizerFactory | None = None,
    convert: Convert | None = convert_blocks,
    progress: Callable[[str], None] | None = None,
) -> Profile:
    """Sets the ways to run a training step beside each other: what each keeps for backward, and its peak.

    ::

        print(fusedseg.profile(UNet(3, 4), (8, 3, 512, 512), autocast=torch.float16))

    Nothing runs, and no code is generated.  The model is copied without its values, so that a step may be far larger
    than this machine, and no GPU is needed.  Eager mode and the converted model are steps on tensors without values,
    with the mean of the outputs as loss; compiled models are counted by ``fusedseg.compiler.estimate``, without a loss.
    ``fusedseg.memory.measure`` counts a step with a loss of your own, on real tensors or on tensors without values.

    Args:
        model: a module, or a function that builds one.
        inputs: the arguments of the model: a shape for each, or a tensor, of which only shape, dtype and memory format
            matter.
        options: the options of the backend, such as ``{"codegen": "aten", "bits": 8}``.
        autocast: the dtype of ``torch.autocast`` around forward; None for none.
        dtype: the dtype of parameters, buffers and inputs that are given as shapes.
        optimizer: a function that is called with the parameters and returns an optimizer, such as
            ``torch.optim.AdamW``.  Its state counts as present before the step.
        convert: a function that is called with a copy of the model and returns the converted model; None leaves it out.
        progress: a function that is called with a short text before each way.

    Raises:
        TypeError: the model is no module, and builds none; the optimizer is an instance.
        ValueError: an option does not exist; there is an optimizer, and no parameter requires a gradient.
        RuntimeError: the model asks for the value of a tensor.

    Errors of the model pass through.
    """
    # Importing the compiler takes seconds.
    from ..compiler.estimate import NotCompiled, estimate_ways

    say = progress or (lambda text: None)
    left_out: dict[str, str] = {}
    with fake_mode():
        net, given = fake_model(model, dtype), fake_inputs(inputs, dtype)
        say(EAGER)
        before = bytes_before(net, given, optimizer=optimizer)
        ways = {EAGER: eager_step(net, given, autocast=autocast).needs}
        if convert is not None:
            say(CONVERT)
            converted = convert(fake_model(model, dtype))
            ways[CONVERT] = eager_step(converted, given, autocast=autocast).needs
        say(BACKEND)
        try:
            (report,) = estimate_ways(net, given, [options or {}], autocast, stock=True)
        except NotCompiled as error:
            report = None
            left_out = {f"{COMPILER} and {BACKEND}": str(error).partition(": ")[2]}
    parameters = sum(parameter.numel() for parameter in net.parameters())
    found = Profile(type(net).__name__, parameters, before, ways, left_out=left_out)
    if report is None:
        return found
    stock, (_, ours) = report.stock_step(), report.steps()
    if stock is not None:
        ways[COMPILER] = stock
    ways[BACKEND] = ours
    return replace(
        found,
        modules=report.modules(),
        bits_unused=any(graph.unpacked for graph in report.graphs),
        courses=dict(zip((EAGER, BACKEND), report.courses(), strict=True)),
    )
