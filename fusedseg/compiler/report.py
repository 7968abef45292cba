"""What the backend has made of a model, as numbers and as text; ``notes.py`` collects it while graphs are compiled."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .._sizes import change_text, text_of
from ..memory.meter import Course
from ..memory.step_bytes import StepBytes
from .counting import MODEL, Module
from .eager_step import Captured
from .settings import CODEGENS
from .traffic import Moved

# A row shows at most this many classes of modules, and a report this many modules.
MOST_NAMES = 6
MODULES = 8


@dataclass
class Graph:
    """A graph that the compiler has captured.

    Attributes:
        calls: the number of calls in it.
        trained: whether it has a backward.
        eager: what eager mode needs; None for a graph without a backward, and one from the compiler's cache.
        stock: what the compiler's own partitioner needs; None if nobody has asked for it.
        ours: what the backend needs; None if ``eager`` is None.
        eager_by, ours_by: the kept bytes of ``eager`` and ``ours`` by the module that has made them.
        eager_course, ours_course: the bytes alive over forward and over backward.
        recomputed: the classes of modules of which backward recomputes something, and the number of modules.
        returned: the bytes that the graph returns.
        gradients: the bytes of the gradients that its backward returns.
        at_peak: what the peak of ``ours`` consists of, in bytes.
        symbolic: whether it serves several sizes; its bytes are those of the sizes at which it was captured.
        ends: why the graph ends where it does, and where that is; "" if it is the last one.
        codegen: who has generated its code.
        moved: the bytes that kernels of both codegens would move, if they have decided; None if the options have.
        packed: the number of tensors that forward packs, by the bits of a value, and the op that needs more than asked.
        unpacked: whether the option bits changes nothing, because nothing may be packed, or because the step would keep
            more, or peak higher, with it.
    """

    calls: int
    trained: bool
    eager: StepBytes | None = None
    stock: StepBytes | None = None
    ours: StepBytes | None = None
    eager_by: Mapping[Module, int] = field(default_factory=dict)
    ours_by: Mapping[Module, int] = field(default_factory=dict)
    eager_course: Course = field(default=((), ()), repr=False)
    ours_course: Course = field(default=((), ()), repr=False)
    recomputed: dict[str, int] = field(default_factory=dict)
    returned: int = 0
    gradients: int = 0
    at_peak: Mapping[str, int] = field(default_factory=dict)
    symbolic: bool = False
    ends: str = ""
    codegen: str = ""
    moved: Moved | None = None
    packed: Mapping[str, int] = field(default_factory=dict)
    unpacked: bool = False

    @property
    def repeated(self) -> float:
        """The arithmetic of compute-intensive ops that backward recomputes, as a share of forward's."""
        return self.ours.repeated if self.ours is not None else 0.0

    def lines(self) -> Iterator[str]:
        if not self.trained:
            yield "  runs without a backward, and keeps nothing"
        elif self.eager is None or self.ours is None:
            yield "  comes from the compiler's cache, uncounted; TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 compiles it anew"
        else:
            labels = ("kept for backward", "at the peak", "with workspaces")
            stocks = self.stock[:3] if self.stock else (0, 0, 0)
            for label, eager, ours, stock in zip(labels, self.eager[:3], self.ours[:3], stocks, strict=True):
                yield change_text(label, eager, ours) + (f"; torch.compile {text_of(stock)}" if self.stock else "")
            yield "  the peak is        " + ", ".join(f"{text_of(n)} {what}" for what, n in self.at_peak.items() if n)
        if self.recomputed:
            most = sorted(self.recomputed.items(), key=lambda row: -row[1])
            names = ", ".join(name if name == MODEL.name else f"{count} {name}" for name, count in most[:MOST_NAMES])
            more = f" and {len(most) - MOST_NAMES} other classes" if len(most) > MOST_NAMES else ""
            share = f"; {self.repeated:.1%} of forward's arithmetic" if self.repeated else ""
            yield f"  recomputed         in {names}{more}{share}"
        if self.symbolic:
            yield "  several sizes      counted at those of the capture. It computes in the model's memory format, and"
            yield "                     calls each kernel by itself; dynamic=False makes a graph for each size instead."
        if self.packed:
            most = sorted(self.packed.items(), key=lambda row: (-row[1], row[0]))
            yield f"  packed tensors     {', '.join(f'{count} in {bits}' for bits, count in most)}"
        if self.unpacked:
            yield "  bits               not used: nothing may be packed, or the step would keep more, or peak higher"
        if self.ends:
            yield f"  ends               {self.ends}"
            yield f"                     The next graph keeps what it reads of {text_of(self.returned)} as it is."

    def to_dict(self) -> dict[str, Any]:
        plain: dict[str, Any] = {**vars(self), "repeated": self.repeated}
        for name in ("eager", "stock", "ours", "moved"):
            plain[name] = plain[name]._asdict() if plain[name] is not None else None
        for name in ("eager", "stock", "ours"):
            (plain[name] or {}).pop("repeated", None)
        for name in ("eager_by", "ours_by"):
            plain[name] = {module.name: nbytes for module, nbytes in plain[name].items()}
            del plain[name.replace("by", "course")]
        return plain


class KeptByModule(NamedTuple):
    """What is kept of what one module makes: its name, its class, and the bytes in eager mode and in the backend."""

    module: str
    kind: str
    eager: int
    ours: int


@dataclass
class Report:
    """What the backend has made of a model; ``print(report)`` shows it, ``to_json()`` returns it for programs.

    Attributes:
        name: the class of the model.
        graphs: the graphs that were captured, in the order in which they were compiled.
    """

    name: str
    graphs: list[Graph]

    @property
    def kept(self) -> tuple[int, int]:
        """The bytes that all graphs keep in eager mode, and in the backend."""
        eager, ours = self.steps()
        return eager.kept, ours.kept

    @property
    def repeated(self) -> float:
        """The largest share of forward's arithmetic that the backward of a graph repeats."""
        return max((graph.repeated for graph in self.graphs), default=0.0)

    def steps(self) -> tuple[StepBytes, StepBytes]:
        """What a step needs in eager mode, and in the backend, without the inputs of the graphs and the loss.

        While a graph runs, what the graphs before it keep is alive, and the gradients from those after it.
        """
        (eager, _), (ours, _) = self._in_both()
        return eager, ours

    def courses(self) -> tuple[Course, Course]:
        """The bytes alive over the step, in eager mode and in the backend."""
        (_, eager), (_, ours) = self._in_both()
        return eager, ours

    def _in_both(self) -> tuple[tuple[StepBytes, Course], tuple[StepBytes, Course]]:
        """What a step needs, and the bytes alive over it, in eager mode, and in the backend."""
        trained = [graph for graph in self.graphs if graph.eager is not None and graph.ours is not None]
        gradients = [graph.gradients for graph in trained]
        eager = [(graph.eager, graph.eager_course) for graph in trained if graph.eager is not None]
        ours = [(graph.ours, graph.ours_course) for graph in trained if graph.ours is not None]
        return _in_turn(eager, gradients), _in_turn(ours, gradients, self.repeated)

    def stock_step(self) -> StepBytes | None:
        """What a step needs with the compiler's own partitioner; None if it was not counted."""
        counted = [(graph.stock, graph.gradients) for graph in self.graphs if graph.stock is not None]
        return _in_turn([(of, ((), ())) for of, _ in counted], [n for _, n in counted])[0] if counted else None

    def modules(self) -> list[KeptByModule]:
        """What is kept of what each module makes, the largest in eager mode first."""
        eager, ours = Counter[Module](), Counter[Module]()
        for graph in self.graphs:
            eager.update(graph.eager_by)
            ours.update(graph.ours_by)
        rows = [KeptByModule(*module, eager[module], ours[module]) for module in dict.fromkeys((*eager, *ours))]
        return sorted(rows, key=lambda row: (-row.eager, -row.ours))

    def to_json(self) -> str:
        return json.dumps({"model": self.name, "graphs": [graph.to_dict() for graph in self.graphs]})

    def __str__(self) -> str:
        count = len(self.graphs)
        lines = [
            f"{self.name}: {count} graph{'s' if count != 1 else ''}, from eager mode to this backend{self._code()}"
        ]
        for number, graph in enumerate(self.graphs, 1):
            lines += ["", f"Graph {number}, {graph.calls} calls", *graph.lines()]
        eager, ours = self.kept
        if count > 1 and eager:
            lines += ["", f"All graphs keep {text_of(eager)} -> {text_of(ours)} ({ours / eager:.2f})"]
        return "\n".join([*lines, *self._by_module()])

    def _code(self) -> str:
        """Who has generated code, and why."""
        texts = []
        for codegen, other in (CODEGENS, CODEGENS[::-1]):
            of = [graph for graph in self.graphs if graph.codegen == codegen]
            if not of:
                continue
            moved = [graph.moved._asdict() for graph in of if graph.moved is not None]
            own, others = (text_of(sum(one[name] for one in moved)) for name in (codegen, other))
            why = f"whose kernels move {own}, and those of {other} {others}" if moved else "which the options name"
            texts.append(f"codegen {codegen}{'' if len(of) == len(self.graphs) else f' in {len(of)}'}, {why}")
        return "".join(f"; {text}" for text in texts)

    def _by_module(self) -> Iterator[str]:
        """A line for each of the modules that keep the most."""
        rows = self.modules()
        if not rows:
            return
        shown, rest = rows[:MODULES], rows[MODULES:]
        if rest:
            shown.append(
                KeptByModule(f"{len(rest)} more modules", "", sum(r.eager for r in rest), sum(r.ours for r in rest))
            )
        width = max(len(f"{row.module}  {row.kind}") for row in shown)
        yield ""
        yield "Kept for backward, by the module that has made it"
        for row in shown:
            name = f"{row.module}  {row.kind}"
            yield f"  {name:<{width}}{text_of(row.eager):>13} -> {text_of(row.ours)}"


def _in_turn(
    graphs: Sequence[tuple[StepBytes, Course]], gradients: Sequence[int], repeated: float = 0.0
) -> tuple[StepBytes, Course]:
    """What a step of several graphs needs, and its course: backward of the graphs runs in reverse."""
    forward: list[int] = []
    backward: list[int] = []
    kept = peak = most = 0
    for place, (needs, (first, second)) in enumerate(graphs):
        held = kept + sum(gradients[place + 1 :])
        peak, most = max(peak, held + needs.peak), max(most, held + needs.with_workspaces)
        forward += [kept + nbytes for nbytes in first]
        backward = [held + nbytes for nbytes in second] + backward
        kept += needs.kept
    return StepBytes(kept, peak, most, repeated), (forward, backward)


def counted_in_eager_mode(name: str, found: Sequence[tuple[Graph, Captured]]) -> Report:
    for graph, captured in found:
        if graph.ours is not None and graph.eager is None:
            step = captured.step
            graph.eager, graph.eager_by, graph.eager_course = step.needs, step.saved_by, step.course
    return Report(name, [graph for graph, _ in found])
