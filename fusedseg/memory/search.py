"""``plan`` finds the batch that fits in a budget, or the cheapest way to make a wanted batch fit."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._torch import FakeTensorMode
from .fake import Model, fake_inputs, fake_mode, fake_model, profile_fake
from .plan import OP, Option, Plan, parse_budget
from .report import MemoryReport
from .step import OptimizerFactory
from .strategy import Backend, Convert, NoBlocks, Strategy, combinations
from .tables import gib

# The search ends here, because a model that needs no memory has no largest batch.
LARGEST = 2**20
# The batches with which each search begins.
STARTS = (2, 4)
# The batch on which budgets are chosen if a plan looks for the largest batch.
EXAMPLE = 2
# The budgets of the backend that a plan tries if it looks for the largest batch.
BUDGETS = (0.4, 0.3, 0.2)


class Counted(NamedTuple):
    """What the graphs of a compiled step need, with the names of ``MemoryReport``."""

    total: int
    saved: int
    repeated: float


class Before(NamedTuple):
    """The bytes that are there before a step without the inputs, and those of them that are the optimizer's state."""

    owned: int
    state: int


def plan(
    model: Model,
    input_shape: Sequence[Any],
    budget: int | str,
    *,
    batch: int | None = None,
    convert: Convert | None = None,
    backend: Backend | None = None,
    bits: Sequence[int] = (),
    converted: str = "fusedseg",
    code: str | None = None,
    dtype: torch.dtype = torch.float32,
    autocast: torch.dtype = torch.float16,
    optimizer: OptimizerFactory | None = torch.optim.AdamW,
    loss: Callable[..., Tensor] | None = None,
    reserve: float = 0.1,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """Finds the largest batch that fits in a budget, or the cheapest way to fit a wanted ``batch``.

    It tries the model as it is, converted, under autocast, with checkpoints, and all combinations of these.

    With ``backend`` it also tries ``torch.compile(model, backend="fusedseg")``, without options, with ``bits``, and
    with budgets, whose backward repeats a part of the forward's arithmetic: for a wanted batch with ``"peak ..."`` that
    fits, and for the largest batch with the shares ``BUDGETS``.  The bytes of compiled models are counted on their
    graphs, to which parameters, inputs and the state of the optimizer are added; the loss is not part of these graphs.

    Sizes are those of ``profile`` without values, so that no GPU is needed.  A model without a block to checkpoint (see
    ``checkpoint_blocks``) has no combinations with checkpoints, and the plan says so.

    Args:
        model: a function that builds the model, or a module, which is copied without its values.
        input_shape: the shape of one sample without the batch, or a sequence of such shapes, one for each input.
        budget: bytes of the whole step, or a text such as "16GiB".
        batch: the wanted batch; None looks for the largest batch.
        convert: a function that is called with a copy of the model and returns the converted model; None leaves out the
            combinations with conversion.
        backend: a function that says what the compiler backend keeps: ``fusedseg.compiler.partitions``.  None leaves
            out compiled models.
        bits: the numbers of bits in which compiled models may keep activations, such as (8, 4).  They add noise to the
            gradient, so they come after all other combinations.
        converted: the name of the converted model in labels.
        code: the line of Python that makes the converted model; the default is a call of ``fusedseg.convert``.
        dtype: the dtype of the model.
        autocast: the dtype of autocast, in the combinations that use it.
        optimizer: as in ``profile``; its state is part of the memory.
        loss: as in ``profile``, but called with the output only.
        reserve: the share of the budget that is kept free for workspaces and fragmentation, which an estimate cannot
            know.
        progress: a function that is called with a short text before each estimated step.

    Returns:
        A ``Plan``.

    Raises:
        ValueError: the budget cannot be read, or nothing fits in it; the batch is below 1; the reserve is outside
            [0, 1).
        ``profile`` lists further errors.
    """
    nbytes = parse_budget(budget)
    if not 0.0 <= reserve < 1.0:
        raise ValueError(f"{OP}: reserve must be at least 0 and below 1, got {reserve}")
    if batch is not None and batch < 1:
        raise ValueError(f"{OP}: batch must be at least 1, got {batch}")
    usable = int(nbytes * (1 - reserve))
    with fake_mode() as mode:
        search = _Search(
            model, input_shape, usable, batch, convert,
            backend=backend, bits=bits, converted=converted, code=code, dtype=dtype, autocast=autocast,
            optimizer=optimizer, loss=loss, say=progress or (lambda text: None), mode=mode,
        )  # fmt: skip
        search.run()
    options = tuple(search.options)
    if not any(option.fits for option in options):
        least = min(options, key=lambda option: option.total)
        back = f", of which {reserve:.0%} are kept back" if reserve else ""
        raise ValueError(
            f"{OP}: {search.name} with batch {batch or least.smallest} does not fit in {gib(nbytes)}{back}: the "
            f"leanest way, {least.label}, needs {gib(least.total)}, and {gib(least.total - usable)} are missing; "
            "take a smaller batch or input"
        )
    return Plan(search.name, options, nbytes, usable, batch, search.left_out)


@dataclass
class _Search:
    """Measures all ways to run a step; must be used inside the fake mode.

    ``plan`` describes its arguments.  ``usable`` has the bytes of the budget without the reserve.
    """

    model: Model
    input_shape: Sequence[Any]
    usable: int
    batch: int | None
    convert: Convert | None
    backend: Backend | None
    bits: Sequence[int]
    converted: str
    code: str | None
    dtype: torch.dtype
    autocast: torch.dtype
    optimizer: OptimizerFactory | None
    loss: Callable[..., Tensor] | None
    say: Callable[[str], None]
    mode: FakeTensorMode
    options: list[Option] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    name: str = ""
    # Models are shared by the strategies with and without autocast; the keys are those without.
    _nets: dict[Strategy, nn.Module] = field(default_factory=dict)
    _there: Before | None = None

    def run(self) -> None:
        tries = [(self._try, strategy) for strategy in combinations(self.convert is not None)]
        tries += [(self._try_backend, Strategy(amp=amp)) for amp in (False, True)] if self.backend else []
        for number, (run, strategy) in enumerate(tries, 1):
            run(strategy, f"({number} of {len(tries)})")

    def _try(self, strategy: Strategy, place: str) -> None:
        label = strategy.label(self.converted)
        try:
            net = self._net(strategy)
        except NoBlocks as error:
            self.left_out[label] = str(error).partition(": ")[2]
            return
        self._add(strategy, partial(self._report, net, strategy, f"{label} {place}"))

    def _try_backend(self, strategy: Strategy, place: str) -> None:
        exact = replace(strategy, compiled=True)
        label = exact.label(self.converted)
        try:
            budgets = BUDGETS if self.batch is None else ()
            ways = [exact, *(replace(exact, budget=budget) for budget in budgets)]
            self._add_compiled([*ways, *(replace(exact, bits=bits) for bits in self.bits)], f"{label} {place}")
            if self.batch is not None and not any(o.fits and o.strategy == exact for o in self.options):
                # The state of the optimizer is no part of the peak that the backend knows.
                peak = peak_text(self.usable - self._before().state)
                self._add_compiled([replace(exact, budget=peak)], f"{label}+budget {place}")
        except RuntimeError as error:
            self.left_out[label] = str(error).partition(": ")[2]

    def _add_compiled(self, ways: Sequence[Strategy], said: str) -> None:
        """Adds ways of the backend; one compilation counts all of them at a batch that all of them try.

        Without samples all of them need the same bytes, which follow from the first way.
        """
        net, backend = self._net(Strategy()), self.backend
        assert backend is not None
        low, high = STARTS
        seen: dict[tuple[int, int], Counted] = {}

        def empty() -> float | None:
            known = {n: of.total for (way, n), of in seen.items() if way == 0}
            return Line.through(known, low, high).empty if low in known and high in known else None

        def tries(way: int, n: int) -> bool:
            """Whether a way tries a batch at its start, or right after it."""
            if n in (self.batch, low):
                return True
            none = empty()
            if none is None:
                return False
            return Line.through({0: none, low: seen[way, low].total}, 0, low).reach(self.usable) == n

        def report(way: int, n: int) -> Counted:
            if (way, n) not in seen:
                counted = [other for other in range(len(ways)) if other == way or tries(other, n)]
                self.say(f"{said}, batch {n}")
                inputs = fake_inputs(batched(self.input_shape, n), self.dtype)
                before = self._before().owned + sum(tensor.nbytes for tensor in inputs)
                options = [ways[number].options for number in counted]
                found = backend(net, inputs, options, ways[0].autocast(self.autocast))
                for number, of in zip(counted, found, strict=True):
                    seen[number, n] = Counted(before + of.peak, of.kept, of.repeated)
            return seen[way, n]

        for number, way in enumerate(ways):
            self._add(way, partial(report, number), empty())

    def _before(self) -> Before:
        """The bytes that are there before a step, whatever the batch is."""
        if self._there is None:
            n = self.batch or EXAMPLE
            report = self._report(self._net(Strategy()), Strategy(), "before the step", n)
            kinds = dict.fromkeys(("inputs", "optimizer state"), 0)
            for storage in report.storages:
                if storage.kind in kinds:
                    kinds[storage.kind] += storage.nbytes
            self._there = Before(report.resident - kinds["inputs"], kinds["optimizer state"])
        return self._there

    def _net(self, strategy: Strategy) -> nn.Module:
        key = replace(strategy, amp=False)
        if key not in self._nets:
            net = fake_model(self.model, self.mode, self.dtype)
            self.name = self.name or type(net).__name__
            self._nets[key] = strategy.prepare(net, self.convert)
        return self._nets[key]

    def _report(self, net: nn.Module, strategy: Strategy, said: str, n: int) -> MemoryReport:
        self.say(f"{said}, batch {n}")
        inputs = fake_inputs(batched(self.input_shape, n), self.dtype)
        return profile_fake(
            net, inputs, optimizer=self.optimizer, loss=self.loss, autocast=strategy.autocast(self.autocast)
        )

    def _add(
        self, strategy: Strategy, report: Callable[[int], MemoryReport | Counted], empty: float | None = None
    ) -> None:
        seen: dict[int, MemoryReport | Counted] = {}

        def total(n: int) -> int:
            if n not in seen:
                seen[n] = report(n)
            return seen[n].total

        found = largest(total, self.usable, empty) if self.batch is None else self.batch
        at = found or min(seen)
        fits = total(at) <= self.usable
        of = seen[at]
        label, code = strategy.label(self.converted), self._code(strategy)
        self.options.append(
            Option(label, strategy, found, of.total, at, fits, kept=of.saved, repeated=of.repeated, code=code)
        )

    def _code(self, strategy: Strategy) -> str:
        """The lines of Python that make a model run in this way."""
        lines = []
        if strategy.converted:
            lines.append(self.code or f"fusedseg.convert(model, example_inputs={self._example()})")
        if strategy.compiled:
            options = f", options={strategy.options}".replace("'", '"') if strategy.options else ""
            lines.append(f'model = torch.compile(model, backend="fusedseg"{options})')
        if strategy.checkpoint:
            lines.append("fusedseg.memory.checkpoint_blocks(model)")
        return "\n".join(lines)

    def _example(self) -> str:
        shapes = batched(self.input_shape, self.batch or EXAMPLE)
        dtype = "" if self.dtype == torch.float32 else f", dtype={self.dtype}"
        inputs = [f"torch.empty({', '.join(map(str, shape))}{dtype})" for shape in shapes]
        return inputs[0] if len(inputs) == 1 else f"[{', '.join(inputs)}]"


def peak_text(nbytes: int) -> str:
    """The backend's budget of a peak, rounded down."""
    unit, size = ("GiB", 2**30) if nbytes >= 2**30 else ("MiB", 2**20)
    return f"peak {math.floor(max(nbytes, size // 100) / size * 100) / 100:g}{unit}"


class Line(NamedTuple):
    """Bytes that grow with the batch on a straight line.

    empty: the bytes of a step without samples.  sample: the bytes of each sample.
    """

    empty: float
    sample: float

    @classmethod
    def through(cls, known: Mapping[int, float], a: int, b: int) -> "Line":
        """The line through the known bytes of two batches."""
        sample = (known[b] - known[a]) / (b - a)
        return cls(known[a] - sample * a, sample)

    def at(self, batch: int) -> float:
        return self.empty + self.sample * batch

    def reach(self, usable: int) -> int:
        """The largest batch whose bytes are at most ``usable``."""
        return int((usable - self.empty) / self.sample) if self.sample > 0 else LARGEST


def largest(total: Callable[[int], int], usable: int, empty: float | None = None) -> int:
    """The largest batch whose total is at most ``usable``; 0 if none is.

    Totals grow with the batch nearly on a straight line, so each guess follows the line through two known totals.  For
    lines that bend, a guess halves the remaining range if the guess before has not, and steps upwards grow until a
    batch does not fit.  A guess that fits is the result if the next batch cannot fit unless the line is wrong by more
    than at the guess.

    Args:
        total: the bytes of a batch.
        usable: the bytes that a batch may need.
        empty: the bytes of a step without samples, if they are known: then one total fewer is asked for at the start.
    """
    low, high = STARTS
    known: dict[int, float] = {low: total(low)}
    if known[low] > usable:
        # BatchNorm refuses a batch of one if a channel has a single value.
        with suppress(ValueError):
            return int(total(1) <= usable)
        return 0
    fits, fails = low, LARGEST + 1
    known |= {high: total(high)} if empty is None else {0: empty}
    halve, step = False, 1
    remaining = fails - fits
    while fails - fits > 1:
        nearest = sorted(known, key=lambda n: abs(known[n] - usable))[:2]
        line = Line.through(known, *((fits, fails) if fails in known else nearest))
        guess = (fits + fails) // 2 if halve else line.reach(usable)
        guess = min(max(guess, fits + (1 if fails in known else step)), fails - 1)
        known[guess] = total(guess)
        error = abs(known[guess] - line.at(guess))
        if known[guess] <= usable < line.at(guess + 1) - 2 * error:
            return guess
        if known[guess] <= usable:
            fits, step = guess, 2 * step
        else:
            fails = guess
        # Halving starts once a batch has failed.  Before that, half of the remaining range is far too large.
        halve = not halve and fails in known and fails - fits > remaining / 2
        remaining = fails - fits
    return fits


def batched(input_shape: Sequence[Any], batch: int) -> list[tuple[int, ...]]:
    """The shapes of all inputs with their batch."""
    if isinstance(input_shape, Tensor):
        raise TypeError(
            f"{OP}: input_shape must be the shape of a sample, or a sequence of such, got a tensor of shape "
            f"{tuple(input_shape.shape)}"
        )
    if not isinstance(input_shape, Sequence) or not input_shape:
        raise TypeError(f"{OP}: input_shape must be the shape of a sample, or a sequence of such, got {input_shape!r}")
    shapes = [input_shape] if all(isinstance(size, int) for size in input_shape) else input_shape
    return [(batch, *shape) for shape in shapes]
