"""``Plan``, the answer of ``fusedseg.plan``: what each way to run a step needs, and the ways worth choosing."""

import textwrap
from dataclasses import dataclass, field
from typing import Any

from .._sizes import text_of
from ..memory.tables import table, wrapped
from .ways import BACKEND, Way

NOISE = "With noise in the gradient"


@dataclass(frozen=True)
class Option:
    """One way to run a step, and the memory that it needs.

    Attributes:
        way: the way.
        batch: the wanted batch; without one, the largest batch that fits, or 0 if none fits.
        total: bytes of the whole step at the batch ``smallest``, with the estimated workspaces.
        smallest: equals ``batch``, or the smallest batch that was tried if none fits.
        fits: whether ``total`` is within the budget.
        kept: bytes of ``total`` that are kept for backward at the end of forward.
        workspaces: bytes of ``total`` that are the estimated workspaces of convolutions.
        repeated: the arithmetic that backward repeats, as a share of the forward's.
        code: the lines of Python that make a model run in this way, without autocast; "" if there is nothing to do.
    """

    way: Way
    batch: int
    total: int
    smallest: int
    fits: bool
    kept: int
    workspaces: int
    repeated: float
    code: str = ""

    @property
    def label(self) -> str:
        """Its name, such as "fusedseg+amp"."""
        return self.way.label

    @property
    def noisy(self) -> bool:
        """Whether activations are kept in fewer bits, which adds noise to the gradient."""
        return self.way.noisy


@dataclass(frozen=True)
class Plan:
    """The ways that fit in a budget, and those that are worth choosing.

    Attributes:
        model: the class of the model.
        options: all ways that can run.
        budget: bytes of the budget.
        usable: bytes of the budget without the reserve.
        batch: the wanted batch, or None.
        left_out: the label of each way that cannot run, and the reason.
    """

    model: str
    options: tuple[Option, ...]
    budget: int
    usable: int
    batch: int | None
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def _fitting(self) -> list[Option]:
        """The options that fit, the cheapest first."""
        return sorted((option for option in self.options if option.fits), key=_cost)

    @property
    def cheapest(self) -> Option:
        """The way that fits with the least repeated arithmetic; noisy ones come after all others.

        Ties are decided by the largest batch, then the fewest measures, then the fewest bytes.
        """
        return self._fitting[0]

    @property
    def choices(self) -> list[Option]:
        """The cheapest way, and each further one whose repeated arithmetic buys a larger batch."""
        chosen: list[Option] = []
        for option in self._fitting:
            if not chosen or (option.batch > chosen[-1].batch and option.noisy == chosen[0].noisy):
                chosen.append(option)
        return chosen

    @property
    def exact(self) -> Option | None:
        """The cheapest way without autocast, which rounds, and without noise; None if none fits."""
        return next((option for option in self._fitting if not option.way.amp and not option.noisy), None)

    def table(self) -> str:
        """A line for each way: its batch, its bytes, and the arithmetic that it repeats."""
        head = "largest batch" if self.batch is None else f"fits batch {self.batch}"
        lines = []
        for option in self.options:
            found = str(option.batch) if option.fits else "none"
            if self.batch is not None:
                found = "yes" if option.fits else "no"
            remarks = [remark for remark in ("noise" if option.noisy else "", self._useless(option)) if remark]
            needs = text_of(option.kept), text_of(option.total), _share(option)
            lines.append((option.label, found, *needs, ", ".join(remarks)))
        lines += [(label, "left out", "", "", "", "") for label in self.left_out]
        return table(("", head, "kept", "peak", "repeated", ""), lines)

    def _useless(self, option: Option) -> str:
        """A remark if another way with fewer measures and no more arithmetic is as good; otherwise ""."""
        for other in sorted(self.options, key=lambda other: other.way.measures):
            simpler = other.way.is_part_of(option.way) and _cost(other)[:2] <= _cost(option)[:2]
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
                "kept_bytes": option.kept,
                "workspace_bytes": option.workspaces,
                "total_bytes": option.total,
                "fits": option.fits,
                "repeated": option.repeated,
                "budget": option.way.options.get("budget"),
                "bits": option.way.options.get("bits"),
                "code": option.code,
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
        kept_back = f" ({text_of(self.budget - self.usable)} of it kept back)" if self.usable < self.budget else ""
        title = f"{self.model} in {text_of(self.budget)}{kept_back}"
        reasons: dict[str, list[str]] = {}
        for label, reason in self.left_out.items():
            reasons.setdefault(reason, []).append(label)
        note = (
            "One training step, estimated on tensors without values. Peak: with parameters, optimizer state, inputs, "
            "and an estimate of the workspaces of convolutions. Repeated: the arithmetic that backward runs again, as "
            "a share of the forward's."
        )
        if any(option.way.kind == BACKEND for option in self.options):
            note += " The bytes of the backend fusedseg are counted on the graphs that the compiler captures."
        named, lines = self._wanted() if self.batch is not None else self._largest()
        lines += [f"Left out: {', '.join(labels)}: {reason}." for reason, labels in reasons.items()]
        text = wrapped("\n".join([*lines, note]))
        labels: dict[str, list[str]] = {}
        for option in named:
            labels.setdefault(option.code, []).append(option.label)
        code = [f"\n{', '.join(of)}:\n{textwrap.indent(lines, '    ')}" for lines, of in labels.items() if lines]
        return "\n".join([title, "═" * len(title), self.table(), "", text, *code])

    def _wanted(self) -> tuple[list[Option], list[str]]:
        """The options to name, and sentences about them."""
        best, exact = self.cheapest, self.exact
        named = [best]
        lines = [f"Cheapest for batch {self.batch}: {best.label}, {text_of(best.total)}, {_price(best)}."]
        if exact is not None and exact is not best:
            named.append(exact)
            text = f"{exact.label}, {text_of(exact.total)}, {_price(exact)}"
            lines.append(f"Without autocast, which rounds to half precision: {text}.")
        if not best.noisy and named[-1].repeated:
            noisy = [option for option in self._fitting if option.noisy and option.way.amp == named[-1].way.amp]
            lines += [f"{NOISE}: {option.label}, {text_of(option.total)}, {_price(option)}." for option in noisy[:1]]
        return named, lines

    def _largest(self) -> tuple[list[Option], list[str]]:
        first, *more = self.choices
        named = [first]
        lines = [f"Largest batch {_price(first)}: {first.batch}, with {first.label}."]
        if first.way.amp:
            exact = [option for option in self._fitting if not option.way.amp and option.noisy == first.noisy]
            best = next((option for option in exact if _rounded(option) <= _rounded(first)), None)
            if best is not None:
                named.append(best)
                lines.append(f"Without autocast, which rounds to half precision: {best.batch}, with {best.label}.")
        for option in more:
            gain = f"{option.batch / first.batch - 1:+.1%}"
            lines.append(f"{_share(option)} of repeated arithmetic buys {option.batch} ({gain}), with {option.label}.")
        if not more and any(option.repeated for option in self.options):
            lines.append("More arithmetic buys no larger batch.")
        if not first.noisy:
            noisy = [option for option in self._fitting if option.noisy and option.way.amp == first.way.amp]
            lines += [f"{NOISE}: {option.batch}, with {option.label}." for option in noisy]
        return [*named, *more], lines


def _rounded(option: Option) -> float:
    """The repeated arithmetic, rounded so that differences too small to matter do not count."""
    return round(option.repeated, 3)


def _cost(option: Option) -> tuple[int, float, int, int, int]:
    # Fewer bits are noisier.
    noise = 64 - option.way.options["bits"] if option.way.noisy else 0
    return noise, _rounded(option), -option.batch, option.way.measures, option.total


def _share(option: Option) -> str:
    return f"{option.repeated:.1%}" if option.repeated else "none"


def _price(option: Option) -> str:
    return f"with {_share(option)} of repeated arithmetic" if option.repeated else "without repeated arithmetic"
