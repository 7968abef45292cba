"""``plan`` finds the batch that fits in a budget, or the cheapest way to make a wanted batch fit."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from .._sizes import parse_bytes, text_of
from ..convert import convert as convert_blocks
from ..memory.fake import Model, OptimizerFactory, bytes_before, eager_step, fake_inputs, fake_mode, fake_model
from ..memory.step_bytes import StepBytes
from .answer import Option, Plan
from .ways import BACKEND, CONVERT, EAGER, STARTS, Convert, Line, Way, of_backend

OP = "fusedseg.plan"
# The budgets of the backend that a plan tries if it looks for the largest batch, and its numbers of bits.
BUDGETS, BITS = (0.4, 0.3, 0.2), (8, 4)


def plan(
    model: Model,
    input_shape: Sequence[Any],
    budget: int | str,
    *,
    batch: int | None = None,
    convert: Convert | None = convert_blocks,
    code: str = "fusedseg.convert(model)",
    codegen: str | None = None,
    dtype: torch.dtype = torch.float32,
    optimizer: OptimizerFactory | None = torch.optim.AdamW,
    reserve: float = 0.1,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """Finds the largest batch that fits in a budget, or the cheapest way to fit a wanted ``batch``.

    It tries the model as it is, converted, and compiled by the backend ``fusedseg``, each with and without autocast.
    The backend is tried without options, with 8 and 4 bits, and with budgets, whose backward repeats a part of the
    forward's arithmetic: for a wanted batch with ``"peak ..."`` that fits, and for the largest batch with the shares
    ``BUDGETS``.  Bits add noise to the gradient, so they come after all other ways.

    The bytes are those of ``fusedseg.profile``, with the estimated workspaces of convolutions; no GPU is needed.  They
    grow with the batch on a straight line, so that two batches tell the largest one.

    Args:
        model: a function that builds the model, or a module, which is copied without its values.
        input_shape: the shape of one sample without the batch, or a sequence of such shapes, one for each input.
        budget: bytes of the whole step, or a text such as "16GiB".
        batch: the wanted batch; None looks for the largest batch.
        convert: a function that is called with a copy of the model and returns the converted model; None leaves out the
            converted model.
        code: the line of Python that makes the converted model.
        codegen: the backend's option of this name.
        dtype: the dtype of the model.
        optimizer: as in ``profile``; its state is part of the memory.
        reserve: the share of the budget that is kept free for fragmentation, and for workspaces that no estimate knows.
        progress: a function that is called with a short text before each estimated step.

    Returns:
        A ``Plan``.

    Raises:
        ValueError: the budget cannot be read, or nothing fits in it; the batch is below 1; the reserve is outside
            [0, 1).

    ``profile`` lists further errors.
    """
    nbytes = parse_bytes(OP, budget)
    if not 0.0 <= reserve < 1.0:
        raise ValueError(f"{OP}: reserve must be at least 0 and below 1, got {reserve}")
    if batch is not None and batch < 1:
        raise ValueError(f"{OP}: batch must be at least 1, got {batch}")
    usable = int(nbytes * (1 - reserve))
    say = progress or (lambda text: None)
    with fake_mode():
        nets = {EAGER: fake_model(model, dtype)}
        if convert is not None:
            nets[CONVERT] = convert(fake_model(model, dtype))
        search = _Search(nets, input_shape, dtype, optimizer, codegen, usable, batch, code=code, say=say)
        for amp in (False, True) if dtype.itemsize > 2 else (False,):
            search.run(amp)
    name = type(nets[EAGER]).__name__
    options = tuple(search.options)
    if not any(option.fits for option in options):
        least = min(options, key=lambda option: option.total)
        back = f", of which {reserve:.0%} are kept back" if reserve else ""
        raise ValueError(
            f"{OP}: {name} with batch {least.smallest} does not fit in {text_of(nbytes)}{back}: the "
            f"leanest way, {least.label}, needs {text_of(least.total)}, and {text_of(least.total - usable)} are "
            "missing; take a smaller batch or input"
        )
    return Plan(name, options, nbytes, usable, batch, search.left_out)


@dataclass
class _Search:
    """Counts all ways, and collects their options.

    Attributes:
        nets: the model without values for each kind of way in eager mode.
        input_shape, dtype, optimizer, codegen, batch, code: the arguments of ``plan``.
        usable: the bytes that a step may need.
        say: is called with a short text before each step.
        before: the bytes that are there before a step of the stock model whatever the batch is, by kind.
        chosen: the codegen that the backend has chosen, without autocast and with it.
        options: what each way needs.
        left_out: the label of each way that cannot be counted, and the reason.
    """

    nets: Mapping[str, nn.Module]
    input_shape: Sequence[Any]
    dtype: torch.dtype
    optimizer: OptimizerFactory | None
    codegen: str | None
    usable: int
    batch: int | None
    code: str
    say: Callable[[str], None]
    before: dict[str, int] = field(default_factory=dict)
    chosen: dict[bool, str | None] = field(default_factory=dict)
    options: list[Option] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def run(self, amp: bool) -> None:
        """Counts all ways with autocast, or all without it."""
        from ..compiler.estimate import NotCompiled

        for kind in self.nets:
            self._try([Way(kind, amp)], self._eager)
        exact = Way(BACKEND, amp)
        noisy = [replace(exact, options={"bits": bits}) for bits in BITS]
        try:
            if self.batch is None:
                shares = [replace(exact, options={"budget": share}) for share in BUDGETS]
                self._try([exact, *shares, *noisy], self._backend)
            else:
                self._try([exact, *noisy], self._backend)
                self._try(self._peak(exact), self._backend)
        except NotCompiled as error:
            self.left_out[exact.label] = str(error).partition(": ")[2]

    def _asks_for_less(self, way: Way, exact: StepBytes) -> bool:
        """Whether a way keeps less than the backend does by itself, which is ``exact`` for the first batch."""
        share = way.options.get("budget")
        if share is None:
            return True
        eager = next(option for option in self.options if option.way == replace(way, kind=EAGER, options={}))
        return exact.kept / STARTS[0] > share * eager.kept / eager.smallest

    def _peak(self, exact: Way) -> list[Way]:
        """The way with a budget that leaves room for the state of the optimizer, if the wanted batch does not fit."""
        option = next(option for option in self.options if option.way == exact)
        if option.fits:
            return []
        # The backend's peak has the arguments of the graph, and neither the optimizer's state nor workspaces.
        room = self.usable - self.before["optimizer state"] - option.workspaces
        return [replace(exact, options={"budget": peak_text(room)})]

    def _try(self, ways: Sequence[Way], needs: Callable[[Sequence[Way], int], Sequence[StepBytes]]) -> None:
        """Adds an option for each way: for the wanted batch, or for the largest one that fits."""
        if not ways:
            return
        if self.batch is not None:
            for way, of in zip(ways, needs(ways, self.batch), strict=True):
                self._add(way, self.batch, self.batch, of)
            return
        low, high = STARTS
        first = needs(ways, low)
        tried = [pair for pair in zip(ways, first, strict=True) if self._asks_for_less(pair[0], first[0])]
        # The bytes of parameters, their gradients and the optimizer do not grow with the batch.
        before = self.before
        fixed = sum(before.values()) + before["parameters"]
        guess = Line.through({0: fixed, low: max(first[0].with_workspaces, fixed + 1)}).reach(self.usable)
        high = max(guess, high)
        for (way, small), large in zip(tried, needs([way for way, _ in tried], high), strict=True):
            line = Line.through({low: small.with_workspaces, high: large.with_workspaces})
            found = max(line.reach(self.usable), 0)
            at = found or 1
            kept = Line.through({low: small.kept, high: large.kept}).at(at)
            peak = Line.through({low: small.peak, high: large.peak}).at(at)
            self._add(way, found, at, StepBytes(kept, peak, line.at(at), large.repeated))

    def _eager(self, ways: Sequence[Way], batch: int) -> list[StepBytes]:
        """What a step in eager mode needs in all; ``peak`` and ``with_workspaces`` have what was there before."""
        (way,) = ways
        self.say(f"{way.label}, batch {batch}")
        inputs, net = self._inputs(batch), self.nets[way.kind]
        before = bytes_before(net, inputs, optimizer=self.optimizer)
        if not self.before:
            self.before = {kind: nbytes for kind, nbytes in before.items() if kind != "inputs"}
        return [eager_step(net, inputs, autocast=way.autocast).needs.beside(sum(before.values()))]

    def _backend(self, ways: Sequence[Way], batch: int) -> list[StepBytes]:
        """What the backend needs in all, in ways with the same autocast.

        The codegen is chosen once: a choice traces the model twice, and a line needs the same codegen at both batches.
        """
        self.say(f"{ways[0].label}, batch {batch}")
        inputs = self._inputs(batch)
        there = sum(self.before.values()) + sum(tensor.nbytes for tensor in inputs)
        amp = ways[0].amp
        chosen = self.codegen or self.chosen.get(amp)
        asked = [replace(way, options=_options(way, chosen)) for way in ways]
        found, self.chosen[amp] = of_backend(self.nets[EAGER], inputs, asked)
        return [needs.beside(there) for needs in found]

    def _inputs(self, batch: int) -> list[Tensor]:
        return fake_inputs(batched(self.input_shape, batch), self.dtype)

    def _add(self, way: Way, found: int, at: int, needs: StepBytes) -> None:
        """Adds an option: the largest batch that was found, or the wanted one, and what the batch ``at`` needs."""
        total = needs.with_workspaces
        self.options.append(
            Option(
                way, batch=found, total=total, smallest=at, fits=total <= self.usable, kept=needs.kept,
                workspaces=total - needs.peak, repeated=needs.repeated, code=self._line(way),
            )
        )  # fmt: skip

    def _line(self, way: Way) -> str:
        """The line of Python that makes a model run in this way."""
        options = _options(way, self.codegen)
        text = f", options={options}".replace("'", '"') if options else ""
        return {EAGER: "", CONVERT: self.code}.get(way.kind, f'model = torch.compile(model, backend="fusedseg"{text})')


def _options(way: Way, codegen: str | None) -> dict[str, Any]:
    """The options of the backend for a way and a codegen; None is left out."""
    return {**({} if codegen is None else {"codegen": codegen}), **way.options}


def peak_text(nbytes: int) -> str:
    """The backend's budget of a peak, rounded down, but at least 0.01 MiB, because the backend refuses 0."""
    unit, size = ("GiB", 2**30) if nbytes >= 2**30 else ("MiB", 2**20)
    return f"peak {max(math.floor(nbytes / size * 100), 1) / 100:g}{unit}"


def batched(input_shape: Sequence[Any], batch: int) -> list[tuple[int, ...]]:
    """The shapes of all inputs with their batch."""
    if isinstance(input_shape, Tensor) or not isinstance(input_shape, Sequence) or not input_shape:
        raise TypeError(f"{OP}: input_shape must be the shape of a sample, or a sequence of such, got {input_shape!r}")
    shapes = [input_shape] if all(isinstance(size, int) for size in input_shape) else input_shape
    return [(batch, *shape) for shape in shapes]
