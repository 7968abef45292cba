"""All byte budgets that a model can follow, found from one observation; ``fusedseg plan`` chooses among them."""

import math
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from torch import nn

from ..memory import Footprint
from ..ops.recompute.choice import Choice
from ..ops.recompute.guide import Follow, choices
from .budget import observed
from .convert import convert
from .inputs import parse_inputs
from .scope import WIRING, is_converted

OP = "fusedseg.conversion.Ladder"
# The most decimals of a budget that a rung names.
DECIMALS = 6


class Rung(NamedTuple):
    """One budget.

    Attributes:
        budget: the share of the stock model's bytes with which ``fusedseg.convert(model, example_inputs=..., budget=)``
            makes this choice on the same example; None for the conversion without a budget.
        kept: bytes that a training step on the example keeps for backward.
        peak: the most bytes of that step at once, without parameters and inputs.
        repeated: the arithmetic that backward repeats, as a share of the convolution and matrix arithmetic of forward.
        choice: the calls that run twice.
    """

    budget: float | None
    kept: int
    peak: int
    repeated: float
    choice: Choice


class Ladder:
    """Converts a model in place, and finds its budgets: from no repeated arithmetic down to the fewest bytes.

    Iterating over a ladder gives its rungs, by falling bytes.  A rung is searched when it is asked for the first time.
    ``follow`` lets the model follow a rung, so that many budgets are tried with one conversion.

    Attributes:
        model: the converted model.
        before, after: the footprints of a training step on the example before the conversion, and after it without a
            budget.

    Args:
        model: any module, as in ``fusedseg.convert``; it may be fake.
        example_inputs: as in ``fusedseg.convert``.

    Raises:
        ValueError: the model cannot be converted, or does not run on tensors without values, so that its bytes are not
            known; ``fusedseg.convert`` lists further errors.
    """

    before: Footprint
    after: Footprint

    def __init__(self, model: nn.Module, example_inputs: object) -> None:
        report = convert(model, example_inputs=example_inputs)
        if report.before is None or report.after is None or not is_converted(model):
            raise ValueError(f"{OP}: {type(model).__name__} has no budgets: its bytes on the example are not known")
        self.model, self.before, self.after = model, report.before, report.after
        self._inputs = parse_inputs(OP, example_inputs)
        self._rungs: list[Rung] = []
        self._choices: Iterator[Choice] | None = None

    def __iter__(self) -> Iterator[Rung]:
        number = 0
        while number < len(self._rungs) or self._find_next():
            yield self._rungs[number]
            number += 1

    def follow(self, rung: Rung) -> None:
        """Lets the model follow this budget from now on."""
        wiring = self.model.__dict__[WIRING]
        wiring.choice = None if rung.budget is None else rung.choice
        # torch.compile can read this tuple once it is cached, but not compute it.
        assert rung.choice.again_in_order is not None
        wiring.make_guide = None if rung.budget is None else partial(Follow, rung.choice)

    def _find_next(self) -> bool:
        """Adds the next rung; returns whether there is one."""
        eager = self.before.saved
        if self._choices is None:
            graph = observed(self.model.__dict__[WIRING], self._inputs).graph
            assert graph is not None
            self._choices = choices(graph, eager, self.after.saved)
            self._rungs.append(self._rung(None, next(self._choices)))
            # The observation has left its own guide there.
            self.follow(self._rungs[0])
            return True
        choice = next(self._choices, None)
        if choice is None:
            return False
        assert choice.kept is not None
        budget = _shortest((choice.kept + 1) / eager, self._rungs[-1].kept / eager)
        self._rungs.append(self._rung(budget, choice))
        return True

    @staticmethod
    def _rung(budget: float | None, choice: Choice) -> Rung:
        assert choice.kept is not None
        assert choice.peak is not None
        return Rung(budget, choice.kept, choice.peak, choice.repeated, choice)


def _shortest(least: float, below: float) -> float:
    """The number with the fewest decimals, but at least two, from ``least`` up to but not including ``below``."""
    for decimals in range(2, DECIMALS):
        number = math.ceil(least * 10**decimals) / 10**decimals
        if number < below:
            return number
    return least
