"""``plan`` finds the batch that fits in a budget, or the cheapest way to make a wanted batch fit."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._sizes import parse_bytes
from .._torch import FakeTensorMode
from .fake import Model, fake_inputs, fake_mode, fake_model, profile_fake
from .plan import Option, Plan
from .step import OptimizerFactory
from .strategy import Backend, Convert, NoBlocks, NotOneGraph, Strategy, combinations
from .tables import gib

OP = "fusedseg.memory.plan"
# The search ends here, because a model that needs no memory has no largest batch.
LARGEST = 2**20
# The batches with which each search begins.
STARTS = (2, 4)
# The budgets of the backend that a plan tries if it looks for the largest batch, and its numbers of bits.
BUDGETS, BITS = (0.4, 0.3, 0.2), (8, 4)
OWNED = ("parameters", "buffers", "optimizer state")


class Needs(NamedTuple):
    """What a step needs, with the names of ``MemoryReport``."""

    total: int
    saved: int
    repeated: float


def plan(
    model: Model,
    input_shape: Sequence[Any],
    budget: int | str,
    *,
    batch: int | None = None,
    convert: Convert | None = None,
    backend: Backend | None = None,
    code: str | None = None,
    dtype: torch.dtype = torch.float32,
    optimizer: OptimizerFactory | None = torch.optim.AdamW,
    reserve: float = 0.1,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """Finds the largest batch that fits in a budget, or the cheapest way to fit a wanted ``batch``.

    It tries the model as it is, converted, under autocast, with checkpoints, and all combinations of these.

    With ``backend`` it also tries ``torch.compile(model, backend="fusedseg")``, without options, with 8 and 4 bits, and
    with budgets, whose backward repeats a part of the forward's arithmetic: for a wanted batch with ``"peak ..."`` that
    fits, and for the largest batch with the shares ``BUDGETS``.  Bits add noise to the gradient, so they come after all
    other combinations.  The bytes of compiled models are counted on their graphs, to which parameters, inputs and the
    state of the optimizer are added; the loss is not part of these graphs.  They grow with the batch on a straight
    line, so that graphs for two batches tell the largest one.

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
        code: the line of Python that makes the converted model; the default is a call of ``fusedseg.convert``.
        dtype: the dtype of the model.
        optimizer: as in ``profile``; its state is part of the memory.
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
    nbytes = parse_bytes(OP, budget)
    if not 0.0 <= reserve < 1.0:
        raise ValueError(f"{OP}: reserve must be at least 0 and below 1, got {reserve}")
    if batch is not None and batch < 1:
        raise ValueError(f"{OP}: batch must be at least 1, got {batch}")
    usable = int(nbytes * (1 - reserve))
    with fake_mode() as mode:
        search = _Search(
            model, input_shape, usable, batch, convert, backend=backend, code=code, dtype=dtype, optimizer=optimizer,
            say=progress or (lambda text: None), mode=mode,
        )  # fmt: skip
        search.run()
    options = tuple(search.options)
    if not any(option.fits for option in options):
        least = min(options, key=lambda option: option.total)
        back = f", of which {reserve:.0%} are kept back" if reserve else ""
        raise ValueError(
            f"{OP}: {search.name} with batch {least.smallest} does not fit in {gib(nbytes)}{back}: the "
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
    code: str | None
    dtype: torch.dtype
    optimizer: OptimizerFactory | None
    say: Callable[[str], None]
    mode: FakeTensorMode
    options: list[Option] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    name: str = ""
    # Models are shared by the strategies with and without autocast; the keys are those without.
    _nets: dict[Strategy, nn.Module] = field(default_factory=dict)
    # The bytes that are there before a step of the stock model whatever the batch is, by kind.
    _before: dict[str, int] = field(default_factory=dict)

    def run(self) -> None:
        # Autocast saves nothing where parameters are in half precision already.
        amps = (False, True) if self.dtype.itemsize > 2 else (False,)
        strategies = combinations(self.convert is not None, amps)
        strategies += [Strategy(amp=amp, compiled=True) for amp in amps if self.backend is not None]
        for number, strategy in enumerate(strategies, 1):
            try:
                run = self._try_backend if strategy.compiled else self._try
                run(strategy, f"{strategy.label} ({number} of {len(strategies)})")
            except (NoBlocks, NotOneGraph) as error:
                self.left_out[strategy.label] = str(error).partition(": ")[2]

    def _try(self, strategy: Strategy, said: str) -> None:
        """Runs steps in eager mode."""
        net = self._net(strategy)
        seen: dict[int, Needs] = {}

        def total(n: int) -> int:
            if n not in seen:
                self.say(f"{said}, batch {n}")
                report = profile_fake(net, self._inputs(n), optimizer=self.optimizer, autocast=strategy.autocast)
                if not self._before:
                    resident = report.resident_by_kind()
                    self._before = {kind: resident.get(kind, 0) for kind in OWNED}
                seen[n] = Needs(report.total, report.saved, report.repeated)
            return seen[n].total

        found = largest(total, self.usable) if self.batch is None else self.batch
        at = found or min(seen)
        total(at)
        self._add(strategy, found, at, seen[at])

    def _try_backend(self, exact: Strategy, said: str) -> None:
        """Counts graphs, for all ways at once."""
        noisy = [replace(exact, bits=bits) for bits in BITS]
        if self.batch is not None:
            ways = [exact, *noisy]
            for way, needs in zip(ways, self._counted(ways, self.batch, said), strict=True):
                self._add(way, self.batch, self.batch, needs)
            if not any(option.fits for option in self.options if option.strategy == exact):
                # The state of the optimizer is no part of the peak that the backend knows.
                peak = peak_text(self.usable - self._before["optimizer state"])
                way = replace(exact, budget=peak)
                self._add(way, self.batch, self.batch, *self._counted([way], self.batch, said))
            return
        low, high = STARTS
        (first,) = self._counted([exact], low, said)
        # The gradients of the parameters do not grow with the batch either.
        fixed = sum(self._before.values()) + self._before["parameters"]
        high = max(Line.through({0: fixed, low: first.total}, 0, low).reach(self.usable), high)
        # A budget that the first way meets changes nothing.
        eager = next(option for option in self.options if option.strategy == replace(exact, compiled=False))
        shares = [share for share in BUDGETS if first.saved / low > share * eager.kept / eager.smallest]
        ways = [exact, *(replace(exact, budget=share) for share in shares), *noisy]
        counted = self._counted(ways, high, said)
        # Without samples all ways need the same bytes.
        empty = Line.through({low: first.total, high: counted[0].total}, low, high).empty
        for way, needs in zip(ways, counted, strict=True):
            total = Line(empty, (needs.total - empty) / high)
            found = max(total.reach(self.usable), 0)
            at = found or 1
            self._add(way, found, at, Needs(round(total.at(at)), needs.saved * at // high, needs.repeated))

    def _counted(self, ways: Sequence[Strategy], n: int, said: str) -> list[Needs]:
        """What graphs of the stock model need with batch ``n``."""
        assert self.backend is not None
        self.say(f"{said}, batch {n}")
        inputs = self._inputs(n)
        before = sum(self._before.values()) + sum(tensor.nbytes for tensor in inputs)
        found = self.backend(self._net(Strategy()), inputs, [way.options for way in ways], ways[0].autocast)
        return [Needs(before + of.peak, of.kept, of.repeated) for of in found]

    def _net(self, strategy: Strategy) -> nn.Module:
        key = replace(strategy, amp=False)
        if key not in self._nets:
            net = fake_model(self.model, self.mode, self.dtype)
            self.name = self.name or type(net).__name__
            self._nets[key] = strategy.prepare(net, self.convert)
        return self._nets[key]

    def _inputs(self, n: int) -> list[Tensor]:
        return fake_inputs(batched(self.input_shape, n), self.dtype)

    def _add(self, strategy: Strategy, found: int, at: int, needs: Needs) -> None:
        """Adds an option: the largest batch that was found, or the wanted one, and what the batch ``at`` needs."""
        self.options.append(
            Option(
                strategy,
                batch=found,
                total=needs.total,
                smallest=at,
                fits=needs.total <= self.usable,
                kept=needs.saved,
                repeated=needs.repeated,
                code=self._code(strategy),
            )
        )

    def _code(self, strategy: Strategy) -> str:
        """The lines of Python that make a model run in this way."""
        lines = []
        if strategy.converted:
            lines.append(self.code or "fusedseg.convert(model)")
        if strategy.compiled:
            options = f", options={strategy.options}".replace("'", '"') if strategy.options else ""
            lines.append(f'model = torch.compile(model, backend="fusedseg"{options})')
        if strategy.checkpoint:
            lines.append("fusedseg.memory.checkpoint_blocks(model)")
        return "\n".join(lines)


def peak_text(nbytes: int) -> str:
    """The backend's budget of a peak, rounded down."""
    unit, size = ("GiB", 2**30) if nbytes >= 2**30 else ("MiB", 2**20)
    return f"peak {math.floor(max(nbytes, size // 100) / size * 100) / 100:g}{unit}"


class Line(NamedTuple):
    """Bytes that grow with the batch on a straight line.

    empty: the bytes of a step without samples.  sample: the bytes of each sample.
    """

    empty: Fraction
    sample: Fraction

    @classmethod
    def through(cls, known: Mapping[int, int], a: int, b: int) -> "Line":
        """The line through the known bytes of two batches."""
        sample = Fraction(known[b] - known[a], b - a)
        return cls(known[a] - sample * a, sample)

    def at(self, batch: int) -> Fraction:
        return self.empty + self.sample * batch

    def reach(self, usable: int) -> int:
        """The largest batch whose bytes are at most ``usable``."""
        return min(int((usable - self.empty) / self.sample), LARGEST) if self.sample > 0 else LARGEST


def largest(total: Callable[[int], int], usable: int) -> int:
    """The largest batch whose total is at most ``usable``; 0 if none is.

    Totals grow with the batch nearly on a straight line, so each guess follows the line through two known totals.  For
    lines that bend, a guess halves the remaining range if the guess before has not, and steps upwards grow until a
    batch does not fit.  A guess that fits is the result if the next batch cannot fit unless the line is wrong by more
    than at the guess.

    Args:
        total: the bytes of a batch.
        usable: the bytes that a batch may need.
    """
    low, high = STARTS
    known = {low: total(low)}
    if known[low] > usable:
        # BatchNorm refuses a batch of one if a channel has a single value.
        with suppress(ValueError):
            return int(total(1) <= usable)
        return 0
    fits, fails = low, LARGEST + 1
    known[high] = total(high)
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
    if isinstance(input_shape, Tensor) or not isinstance(input_shape, Sequence) or not input_shape:
        raise TypeError(f"{OP}: input_shape must be the shape of a sample, or a sequence of such, got {input_shape!r}")
    shapes = [input_shape] if all(isinstance(size, int) for size in input_shape) else input_shape
    return [(batch, *shape) for shape in shapes]
