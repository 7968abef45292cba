"""The ways to run a training step, and what each of them needs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..memory.step_bytes import StepBytes

EAGER, CONVERT, BACKEND = "eager", "convert", "fusedseg"
# A function that is called with a model of its own, and returns the converted model.
Convert = Callable[[nn.Module], nn.Module]
# The search for a batch ends here, because a model that needs no memory has no largest batch.
LARGEST = 2**20
# The batches with which a search begins.
STARTS = (2, 4)


@dataclass(frozen=True)
class Way:
    """A way to run a step.

    Attributes:
        kind: "eager", "convert" or "fusedseg", which is the backend of ``torch.compile``.
        amp: whether the step runs under autocast.
        options: options of the backend.
    """

    kind: str = EAGER
    amp: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Its name, such as "fusedseg+amp+bits=4"."""
        options = [
            f"{name}={value if isinstance(value, str) else f'{value:g}'}" for name, value in self.options.items()
        ]
        return "+".join([self.kind, *(["amp"] if self.amp else []), *options])

    @property
    def measures(self) -> int:
        """How many things differ from a step of the model as it is."""
        return (self.kind != EAGER) + self.amp + len(self.options)

    @property
    def noisy(self) -> bool:
        """Whether activations are kept in fewer bits, which adds noise to the gradient."""
        return "bits" in self.options

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype of autocast; bytes are the same in bfloat16."""
        return torch.float16 if self.amp else None

    def is_part_of(self, other: "Way") -> bool:
        """Whether ``other`` does all of this and more."""
        kind = self.kind in (EAGER, other.kind)
        options = set(self.options.items()) <= set(other.options.items())
        return self.measures < other.measures and kind and options and self.amp <= other.amp


def of_backend(model: nn.Module, inputs: Sequence[Tensor], ways: Sequence[Way]) -> tuple[list[StepBytes], str | None]:
    """What the backend needs in each of several ways with the same autocast, and the codegen of all trained graphs.

    The codegen is None if the graphs have different ones.  Raises ``compiler.NotCompiled``.
    """
    # Importing the compiler takes seconds.
    from ..compiler.estimate import estimate_ways

    reports = estimate_ways(model, inputs, [way.options for way in ways], ways[0].autocast)
    codegens = {graph.codegen for graph in reports[0].graphs if graph.trained}
    codegen = codegens.pop() if len(codegens) == 1 else None
    return [report.steps()[1] for report in reports], codegen


class Line(NamedTuple):
    """Bytes that grow with the batch on a straight line.

    empty: the bytes of a step without samples.  sample: the bytes of each sample.
    """

    empty: Fraction
    sample: Fraction

    @classmethod
    def through(cls, known: Mapping[int, int]) -> "Line":
        """The line through the known bytes of two batches."""
        (a, at_a), (b, at_b) = known.items()
        sample = Fraction(at_b - at_a, b - a)
        return cls(at_a - sample * a, sample)

    def at(self, batch: int) -> int:
        return round(self.empty + self.sample * batch)

    def reach(self, usable: int) -> int:
        """The largest batch whose bytes are at most ``usable``, or a number below 1."""
        return min(int((usable - self.empty) // self.sample), LARGEST) if self.sample > 0 else LARGEST
