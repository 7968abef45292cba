"""``plan``: which batch fits in a budget, and what it takes to make one fit."""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .fake import Model, fake_inputs, fake_mode, fake_model, profile_fake
from .report import MemoryReport
from .step import OptimizerFactory
from .strategy import Convert, NoBlocks, Strategy, combinations
from .tables import table, wrapped
from .units import MEBIBYTE

OP = "fusedseg.memory.plan"
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    f"{prefix}iB": 2**power for prefix, power in (("K", 10), ("M", 20), ("G", 30), ("T", 40))
}
# no batch beyond: what needs no memory has no largest one
LARGEST = 2**20


def parse_budget(budget: int | str) -> int:
    """Bytes of "16GiB", "24 GB", "800MiB" or a number of bytes.

    Raises:
        ValueError: anything else, or nothing at all.
    """
    nbytes = budget if isinstance(budget, int) else 0
    if isinstance(budget, str) and (match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", budget)):
        unit = next((unit for unit in UNITS if unit.lower() == match[2].lower()), None)
        nbytes = int(float(match[1]) * UNITS[unit]) if unit else 0
    if nbytes <= 0:
        raise ValueError(
            f"{OP}: budget must be a positive number with one of {', '.join(UNITS)}, such as 16GiB, got {budget!r}"
        )
    return nbytes


def gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / MEBIBYTE:.1f} MiB"


@dataclass(frozen=True)
class Option:
    """One combination: its largest batch that fits, 0 if none does, and what it needs.

    total: bytes at that batch; or at the wanted one, where one was.  fits: whether that is within the budget.
    smallest: the batch that total is of where none fits.
    recomputed: arithmetic that checkpoints add, relative to the step.  convolutions: of them, how many run again.
    """

    label: str
    strategy: Strategy
    batch: int
    total: int
    smallest: int
    fits: bool
    recomputed: float
    convolutions: int


@dataclass(frozen=True)
class Plan:
    """What fits, and which of it is worth choosing.

    options: all combinations that can run.  left_out: the label of each other one, and why it cannot.
    batch: the wanted one, or None.  budget, usable: bytes, with and without the reserve.
    """

    model: str
    options: tuple[Option, ...]
    budget: int
    usable: int
    batch: int | None
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def cheapest(self) -> Option:
        """Of the combinations that fit: the least arithmetic again, then the largest batch, then the fewest measures,
        then the fewest bytes."""
        return min((option for option in self.options if option.fits), key=_cost)

    @property
    def choices(self) -> list[Option]:
        """The cheapest combination, and each further one whose extra arithmetic buys a larger batch."""
        chosen: list[Option] = []
        for option in sorted((option for option in self.options if option.fits), key=_cost):
            if not chosen or option.batch > chosen[-1].batch:
                chosen.append(option)
        return chosen

    def table(self) -> str:
        head = "largest batch" if self.batch is None else f"fits batch {self.batch}"
        lines = []
        for option in self.options:
            found = str(option.batch) if option.fits else "none"
            if self.batch is not None:
                found = "yes" if option.fits else "no"
            lines.append((option.label, found, gib(option.total), _arithmetic(option), self._useless(option)))
        lines += [(label, "left out", "", "", "") for label in self.left_out]
        return table(("", head, "needs", "extra arithmetic", ""), lines)

    def _useless(self, option: Option) -> str:
        """Says where a combination has nothing over another that takes fewer measures and no more arithmetic."""
        for other in sorted(self.options, key=lambda other: other.strategy.measures):
            simpler = other.strategy.is_part_of(option.strategy) and _rounded(other) <= _rounded(option)
            no_gain = other.total <= option.total if self.batch is not None else other.batch >= option.batch
            if simpler and no_gain and other.fits:
                return f"no gain over {other.label}"
        return ""

    def to_dict(self) -> dict[str, Any]:
        options = [
            {
                "label": option.label,
                "batch": option.batch,
                "total_bytes": option.total,
                "fits": option.fits,
                "recomputed": option.recomputed,
                "convolutions_run_again": option.convolutions,
            }
            for option in self.options
        ]
        return {
            "model": self.model,
            "budget_bytes": self.budget,
            "usable_bytes": self.usable,
            "wanted_batch": self.batch,
            "options": options,
            "left_out": self.left_out,
            "cheapest": self.cheapest.label,
            "choices": [option.label for option in self.choices],
        }

    def __str__(self) -> str:
        kept_back = f" ({gib(self.budget - self.usable)} of it kept back)" if self.usable < self.budget else ""
        title = f"{self.model} in {gib(self.budget)}{kept_back}"
        reasons: dict[str, list[str]] = {}
        for label, reason in self.left_out.items():
            reasons.setdefault(reason, []).append(label)
        note = (
            "One training step, with parameters, optimizer state and inputs, estimated on tensors without values. What "
            "is kept back is for workspaces and fragmentation."
        )
        lines = self._wanted() if self.batch is not None else self._largest()
        lines += [f"Left out: {', '.join(labels)}: {reason}." for reason, labels in reasons.items()]
        return "\n".join([title, "═" * len(title), self.table(), "", wrapped("\n".join([*lines, note]))])

    def _wanted(self) -> list[str]:
        best = self.cheapest
        price = f"with {_arithmetic(best)} arithmetic" if best.convolutions else "without extra arithmetic"
        return [f"Cheapest for batch {self.batch}: {best.label}, {gib(best.total)}, {price}."]

    def _largest(self) -> list[str]:
        first, *more = self.choices
        price = f"with {_arithmetic(first)} arithmetic" if first.convolutions else "without extra arithmetic"
        lines = [f"Largest batch {price}: {first.batch}, with {first.label}."]
        if first.strategy.amp:
            exact = [option for option in self.options if option.fits and not option.strategy.amp]
            same = [option for option in exact if _rounded(option) <= _rounded(first)]
            if same:
                best = min(same, key=_cost)
                lines.append(f"Without autocast, which rounds to half precision: {best.batch}, with {best.label}.")
        for option in more:
            gain = option.batch / first.batch - 1
            lines.append(f"{_arithmetic(option)} arithmetic buys {option.batch} ({gain:+.1%}), with {option.label}.")
        if not more and any(option.strategy.checkpoint for option in self.options):
            lines.append("More arithmetic buys no larger batch.")
        return lines


def _rounded(option: Option) -> float:
    """Arithmetic run again, in steps that a reader would tell apart."""
    return round(option.recomputed, 3)


def _cost(option: Option) -> tuple[float, int, int, int]:
    return _rounded(option), -option.batch, option.strategy.measures, option.total


def _arithmetic(option: Option) -> str:
    return f"{option.recomputed:+.0%}" if option.convolutions else "none"


def plan(
    model: Model,
    input_shape: Sequence[Any],
    budget: int | str,
    *,
    batch: int | None = None,
    convert: Convert | None = None,
    converted: str = "fusedseg",
    dtype: torch.dtype = torch.float32,
    autocast: torch.dtype = torch.float16,
    optimizer: OptimizerFactory | None = torch.optim.AdamW,
    loss: Callable[..., Tensor] | None = None,
    reserve: float = 0.1,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """The largest batch that fits in a budget as the model is, converted, under autocast, with checkpoints, and with
    all combinations of these; or, for a wanted ``batch``, what each needs and which is the cheapest that fits.

    Sizes are those of ``estimate``: no GPU is needed.  A model without a block to checkpoint (see
    ``checkpoint_blocks``) has no combinations with checkpoints; the plan says so.

    Args:
        model: a function that builds it, or a module, which is copied without its values.
        input_shape: of one sample, without the batch; or a sequence of such, one for each input.
        budget: bytes, or text such as "16GiB".
        batch: the wanted one.
        convert: called with a copy of the model, returns what stands in its place; without it, nothing is converted.
        converted: what to call that.
        dtype, autocast: of the model, and of autocast where it is used.
        optimizer: see ``profile``; its state is part of what has to fit.
        loss: called with the output alone, see ``profile``.
        reserve: share of the budget kept back for what an estimate cannot know: workspaces and fragmentation.
        progress: called with a few words before each step that is estimated.

    Raises:
        ValueError: a budget that cannot be read, or that nothing fits in; a batch below 1; a reserve outside [0, 1).
        And what ``estimate`` raises.
    """
    nbytes = parse_budget(budget)
    if not 0.0 <= reserve < 1.0:
        raise ValueError(f"{OP}: reserve must be at least 0 and below 1, got {reserve}")
    if batch is not None and batch < 1:
        raise ValueError(f"{OP}: batch must be at least 1, got {batch}")
    usable = int(nbytes * (1 - reserve))
    options: list[Option] = []
    left_out: dict[str, str] = {}
    name = ""
    strategies = combinations(convert is not None)
    for count, strategy in enumerate(strategies, 1):
        label = strategy.label(converted)
        with fake_mode() as mode:
            net = fake_model(model, mode, dtype)
            name = name or type(net).__name__
            try:
                net = strategy.prepare(net, convert)
            except NoBlocks as error:
                left_out[label] = str(error).partition(": ")[2]
                continue

            now = f"{label} ({count} of {len(strategies)})"

            def report(n: int, net: nn.Module = net, strategy: Strategy = strategy, now: str = now) -> MemoryReport:
                if progress is not None:
                    progress(f"{now}, batch {n}")
                inputs = fake_inputs(_batched(input_shape, n), dtype)
                return profile_fake(net, inputs, optimizer=optimizer, loss=loss, autocast=strategy.autocast(autocast))

            options.append(_option(strategy, converted, report, usable, batch))
    if not any(option.fits for option in options):
        least = min(options, key=lambda option: option.total)
        raise ValueError(
            f"{OP}: {name} with batch {batch or least.smallest} needs {gib(least.total)} at least ({least.label}), "
            f"and {gib(usable)} of the budget of {gib(nbytes)} may be used"
        )
    return Plan(name, tuple(options), nbytes, usable, batch, left_out)


def _option(
    strategy: Strategy, converted: str, report: Callable[[int], MemoryReport], usable: int, batch: int | None
) -> Option:
    seen: dict[int, MemoryReport] = {}

    def total(n: int) -> int:
        if n not in seen:
            seen[n] = report(n)
        return seen[n].total

    found = largest(total, usable) if batch is None else batch
    at = found or min(seen)
    fits = total(at) <= usable
    of = seen[at]
    again = of.convolutions["recomputed"]
    return Option(strategy.label(converted), strategy, found, of.total, at, fits, of.recomputed, again)


def largest(total: Callable[[int], int], usable: int) -> int:
    """The largest batch whose total is within what may be used; 0 if none is.

    Totals grow with the batch, on nearly a straight line, along which the next guess lies; for lines that bend,
    every other guess halves what is left, and steps upwards grow until something fails.
    """
    low, high = 2, 4
    if total(low) > usable:
        # BatchNorm refuses a batch of one where a single value is left in a channel
        with suppress(ValueError):
            return int(total(1) <= usable)
        return 0
    fits, fails = low, LARGEST + 1
    known = {low: total(low), high: total(high)}
    halve, step = False, 1
    while fails - fits > 1:
        nearest = sorted(known.items(), key=lambda item: abs(item[1] - usable))[:2]
        (a, of_a), (b, of_b) = ((n, known[n]) for n in (fits, fails)) if fails in known else nearest
        slope = (of_b - of_a) / (b - a)
        guess = int(a + (usable - of_a) / slope) if slope > 0 else LARGEST
        if halve:
            guess = (fits + fails) // 2
        # once something has failed: before, half of what is left is far beyond
        halve = not halve and fails in known
        guess = min(max(guess, fits + (1 if fails in known else step)), fails - 1)
        known[guess] = total(guess)
        if known[guess] <= usable:
            fits, step = guess, 2 * step
        else:
            fails = guess
    return fits


def _batched(input_shape: Sequence[Any], batch: int) -> list[tuple[int, ...]]:
    if not isinstance(input_shape, Sequence) or not input_shape:
        raise TypeError(f"{OP}: input_shape must be the shape of a sample, or a sequence of such, got {input_shape!r}")
    shapes = [input_shape] if all(isinstance(size, int) for size in input_shape) else input_shape
    return [(batch, *shape) for shape in shapes]
