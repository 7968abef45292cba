"""``plan``: which batch fits in a budget, and what it takes to make one fit."""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .fake import Model, fake_inputs, fake_mode, fake_model, profile_fake
from .report import MemoryReport
from .step import OptimizerFactory
from .strategy import Convert, Strategy, combinations
from .tables import table
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
    if isinstance(budget, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B)\s*", budget, re.IGNORECASE)
        unit = next((unit for unit in UNITS if match and unit.lower() == match[2].lower()), None)
        if match is None or unit is None:
            raise ValueError(f"{OP}: budget must be a number with one of {', '.join(UNITS)}, got {budget!r}")
        budget = int(float(match[1]) * UNITS[unit])
    if budget <= 0:
        raise ValueError(f"{OP}: budget must be more than nothing, got {budget}")
    return budget


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
    """options: all combinations.  batch: the wanted one, or None.  budget, usable: bytes, with and without reserve."""

    model: str
    options: tuple[Option, ...]
    budget: int
    usable: int
    batch: int | None

    @property
    def cheapest(self) -> Option:
        """Of the combinations that fit: the least arithmetic again, then the fewest measures, then the fewest bytes.

        Without a wanted batch: of those with the largest batch.
        """
        fit = [option for option in self.options if option.fits]
        most = max(option.batch for option in fit)
        if self.batch is None:
            fit = [option for option in fit if option.batch == most]
        return min(fit, key=lambda option: (round(option.recomputed, 3), option.strategy.measures, option.total))

    def table(self) -> str:
        lines = [
            (
                option.label,
                str(option.batch) if option.fits else "none",
                gib(option.total),
                f"{option.convolutions} run again, {option.recomputed:+.0%} arithmetic"
                if option.strategy.checkpoint
                else "none run again",
            )
            for option in self.options
        ]
        if self.batch is None:
            return table(("", "largest batch", "needs", "convolutions"), lines)
        lines = [
            (label, needs, "yes" if o.fits else "no", cost)
            for (label, _, needs, cost), o in zip(lines, self.options, strict=True)
        ]
        return table(("", f"needs for batch {self.batch}", "fits", "convolutions"), lines)

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
        figures = {"budget_bytes": self.budget, "usable_bytes": self.usable, "wanted_batch": self.batch}
        return {"model": self.model, **figures, "options": options, "cheapest": self.cheapest.label}

    def __str__(self) -> str:
        best = self.cheapest
        kept_back = f" ({gib(self.budget - self.usable)} of it kept back)" if self.usable < self.budget else ""
        title = f"{self.model} in {gib(self.budget)}{kept_back}"
        wanted = f"batch {self.batch}" if self.batch is not None else f"the largest batch, {best.batch}"
        chosen = f"Cheapest for {wanted}: {best.label}, {gib(best.total)}."
        note = (
            "One training step, with parameters, optimizer state and inputs; estimated on tensors without values. "
            "Workspaces and\nfragmentation are what is kept back for."
        )
        return "\n".join([title, "═" * len(title), self.table(), "", chosen, note])


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
) -> Plan:
    """The largest batch that fits in a budget as the model is, converted, under autocast, with checkpoints, and with
    all combinations of these; or, for a wanted ``batch``, what each needs and which is the cheapest that fits.

    Sizes are those of ``estimate``: no GPU is needed.

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
    options = []
    name = ""
    for strategy in combinations(convert is not None):
        with fake_mode() as mode:
            net = fake_model(model, mode, dtype)
            name = name or type(net).__name__
            net = strategy.prepare(net, convert)

            def report(n: int, net: nn.Module = net, strategy: Strategy = strategy) -> MemoryReport:
                inputs = fake_inputs(_batched(input_shape, n), dtype)
                return profile_fake(net, inputs, optimizer=optimizer, loss=loss, autocast=strategy.autocast(autocast))

            options.append(_option(strategy, converted, report, usable, batch))
    if not any(option.fits for option in options):
        least = min(options, key=lambda option: option.total)
        raise ValueError(
            f"{OP}: {name} with batch {batch or least.smallest} needs {gib(least.total)} at least ({least.label}), "
            f"and {gib(usable)} of the budget of {gib(nbytes)} may be used"
        )
    return Plan(name, tuple(options), nbytes, usable, batch)


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

    Totals grow with the batch, on nearly a straight line, along which the next guess lies.
    """
    low, high = 2, 4
    if total(low) > usable:
        # BatchNorm refuses a batch of one where a single value is left in a channel
        with suppress(ValueError):
            return int(total(1) <= usable)
        return 0
    fits, fails = low, LARGEST + 1
    known = {low: total(low), high: total(high)}
    while fails - fits > 1:
        (a, of_a), (b, of_b) = sorted(known.items(), key=lambda item: abs(item[1] - usable))[:2]
        slope = (of_b - of_a) / (b - a)
        guess = int(a + (usable - of_a) / slope) if slope > 0 else LARGEST
        guess = min(max(guess, fits + 1), fails - 1)
        known[guess] = total(guess)
        if known[guess] <= usable:
            fits = guess
        else:
            fails = guess
    return fits


def _batched(input_shape: Sequence[Any], batch: int) -> list[tuple[int, ...]]:
    if not isinstance(input_shape, Sequence) or not input_shape:
        raise TypeError(f"{OP}: input_shape must be the shape of a sample, or a sequence of such, got {input_shape!r}")
    shapes = [input_shape] if all(isinstance(size, int) for size in input_shape) else input_shape
    return [(batch, *shape) for shape in shapes]
