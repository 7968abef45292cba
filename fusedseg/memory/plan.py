"""``plan`` finds the batch that fits in a budget, or the cheapest way to make a wanted batch fit."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .._sizes import parse_bytes
from .fake import Model, fake_inputs, fake_mode, fake_model, profile_fake
from .report import MemoryReport
from .step import OptimizerFactory
from .strategy import Convert, NoBlocks, Strategy, combinations
from .tables import table, wrapped
from .units import MEBIBYTE

OP = "fusedseg.memory.plan"
# The search ends here, because a model that needs no memory has no largest batch.
LARGEST = 2**20


def parse_budget(budget: int | str) -> int:
    """The bytes of a text such as "16GiB", "24 GB" or "800MiB", or of a number of bytes.

    Raises:
        ValueError: the text cannot be read, or the budget is not positive.
    """
    return parse_bytes(OP, "budget", budget)


def gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / MEBIBYTE:.1f} MiB"


@dataclass(frozen=True)
class Option:
    """One combination of strategies, and the memory that it needs.

    Attributes:
        label: its name, such as "fusedseg+amp".
        strategy: the combination.
        batch: the wanted batch; without one, the largest batch that fits, or 0 if none fits.
        total: bytes at the batch ``smallest``.
        smallest: equals ``batch``, or the smallest batch that was tried if none fits.
        fits: whether ``total`` is within the budget.
        recomputed: the arithmetic that checkpoints add, relative to the step without them.
        convolutions: the number of convolutions that checkpoints run again.
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
    """The combinations that fit in a budget, and those that are worth choosing.

    Attributes:
        model: the class of the model.
        options: all combinations that can run.
        budget: bytes of the budget.
        usable: bytes of the budget without the reserve.
        batch: the wanted batch, or None.
        left_out: the label of each combination that cannot run, and the reason.
    """

    model: str
    options: tuple[Option, ...]
    budget: int
    usable: int
    batch: int | None
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def cheapest(self) -> Option:
        """The combination that fits with the least extra arithmetic.

        Ties are decided by the largest batch, then the fewest measures, then the fewest bytes.
        """
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
        """A line for each combination: its batch, its bytes, and the arithmetic that it adds."""
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
        """A remark if another combination with fewer measures and no more arithmetic is as good; otherwise ""."""
        for other in sorted(self.options, key=lambda other: other.strategy.measures):
            simpler = other.strategy.is_part_of(option.strategy) and _rounded(other) <= _rounded(option)
            no_gain = other.total <= option.total if self.batch is not None else other.batch >= option.batch
            if simpler and no_gain and other.fits:
                return f"no gain over {other.label}"
        return ""

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain values, for JSON."""
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
    """The extra arithmetic, rounded so that differences too small to matter do not count."""
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
    """Finds the largest batch that fits in a budget, or the cheapest way to fit a wanted ``batch``.

    It tries the model as it is, converted, under autocast, with checkpoints, and all combinations of these.  Sizes are
    those of ``estimate``, so that no GPU is needed.  A model without a block to checkpoint (see ``checkpoint_blocks``)
    has no combinations with checkpoints, and the plan says so.

    Args:
        model: a function that builds the model, or a module, which is copied without its values.
        input_shape: the shape of one sample without the batch, or a sequence of such shapes, one for each input.
        budget: bytes, or a text such as "16GiB".
        batch: the wanted batch; None looks for the largest batch.
        convert: a function that is called with a copy of the model and returns the converted model; None leaves out the
            combinations with conversion.
        converted: the name of the converted model in labels.
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
        ``estimate`` lists further errors.
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
    """The largest batch whose total is at most ``usable``; 0 if none is.

    Totals grow with the batch nearly on a straight line, so each guess follows the line through two known totals.  For
    lines that bend, every second guess halves the remaining range, and steps upwards grow until a batch does not fit.
    """
    low, high = 2, 4
    if total(low) > usable:
        # BatchNorm refuses a batch of one if a channel has a single value.
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
        # Halving starts once a batch has failed.  Before that, half of the remaining range is far too large.
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
