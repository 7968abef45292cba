"""Chooses the calls that run twice for a budget, from one forward and one step on tensors without values."""

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._module_hooks import looking_on
from .._sizes import text_of
from ..memory import Footprint, LiveBytes
from ..memory.meter import mean_of
from ..ops.recompute.choice import Budget, Choice
from ..ops.recompute.guide import Learn, Observe, Sizes, Weigh, choose
from .flow import paths_of
from .observe import on_fake_tensors, set_training
from .wiring import Wiring

OP = "fusedseg.convert"


class Twice(NamedTuple):
    """The part of a ``ConversionReport`` about a budget.

    Attributes:
        budget: the budget that was asked for.
        wanted: its bytes; None if only arithmetic was asked for.
        choice: the calls that run twice; None if the first step chooses them.
        paths: the paths of the modules that make these calls, and the names of the functions.
    """

    budget: Budget
    wanted: int | None = None
    choice: Choice | None = None
    paths: tuple[tuple[str, str], ...] = ()

    @property
    def missed(self) -> bool:
        """Whether the bytes are not reached."""
        kept = None if self.choice is None else self.choice.kept
        return kept is not None and self.wanted is not None and kept > self.wanted

    def __str__(self) -> str:
        if self.choice is None:
            return f"For {self.budget}, the first training step chooses the calls that run twice"
        share = f"{self.choice.repeated:.1%} of the forward's convolution and matrix arithmetic"
        lines = [f"For {self.budget}, {len(self.paths)} of {len(self.choice.calls)} calls run twice: {share}"]
        lines += [f"  {path or '(the model)'}  {function}" for path, function in self.paths]
        return "\n".join([*lines, *([f"  {self.reached()}"] if self.missed else [])])

    def reached(self) -> str:
        assert self.choice is not None
        assert self.choice.kept is not None
        assert self.wanted is not None
        return (
            f"{text_of(self.wanted)} cannot be reached without a higher peak or more arithmetic: "
            f"{text_of(self.choice.kept)} are kept"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        choice = self.choice
        return {
            "budget": str(self.budget),
            "wanted_bytes": self.wanted,
            "kept_bytes": None if choice is None else choice.kept,
            "repeated": None if choice is None else choice.repeated,
            "calls": [{"path": path, "function": function} for path, function in self.paths],
        }


class _Named(Observe):
    """An ``Observe`` that also notes the module that makes each call."""

    def __init__(self, model: nn.Module, live: LiveBytes) -> None:
        super().__init__(live)
        self._names = {module: paths[0] for module, paths in paths_of(model).items()}
        self._running = [""]
        self.paths: list[str] = []

    def made(self, index: int, out: Tensor) -> None:
        super().made(index, out)
        self.paths.append(self._running[-1])

    @contextmanager
    def watching(self) -> Iterator[None]:
        with looking_on(lambda module, args: self._running.append(self._name(module)), lambda *call: self._left()):
            yield

    def _left(self) -> None:
        self._running.pop()

    def _name(self, module: nn.Module) -> str:
        return self._names.get(module, self._running[-1])


def apply_budget(
    wiring: Wiring, budget: Budget, inputs: tuple[tuple, dict] | None, before: Footprint | None, after: Footprint | None
) -> Twice:
    """Lets the scope of a converted model follow a budget.

    Args:
        wiring: the model's wiring.
        budget: the budget.
        inputs: the example.
        before, after: the footprints of the stock model and of the converted model without a budget.  If one is None,
            because there is no example or because the model does not run on tensors without values, then the first
            training step chooses.
    """
    if inputs is None or before is None or after is None:
        wiring.make_guide = partial(Learn, budget, None if wiring.rounding is None else wiring.rounding.bits)
        return Twice(budget)
    seen = observed(wiring, inputs)
    assert seen.graph is not None
    choice = wiring.choice = choose(seen.graph, budget, before.saved, after.saved)
    wiring.make_guide = Sizes(budget, choice, before.saved, seen.graph.eager).guide
    paths = tuple((seen.paths[i], choice.calls[i].function) for i in sorted(choice.again))
    twice = Twice(budget, budget.bytes_of(before.saved), choice, paths)
    if twice.missed:
        warnings.warn(f"{OP}: {twice.reached()}", stacklevel=3)
    return twice


@contextmanager
def _only_young_objects() -> Iterator[None]:
    """Lets ``gc.collect(0)`` find all cycles that are made inside, without a look at the objects from before."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def observed(wiring: Wiring, inputs: tuple[tuple, dict]) -> _Named:
    """Runs the model twice on tensors without values: a forward, and a whole step."""
    model = wiring.root

    def guided(make: Any) -> Any:
        wiring.make_guide = make
        return model(*args, **kwargs)

    with _only_young_objects(), on_fake_tensors(model, inputs) as (args, kwargs), torch.enable_grad():
        set_training(model, True)
        for parameter in model.parameters():
            parameter.grad = None
        with LiveBytes() as live:
            named = _Named(model, live)
            with named.watching():
                out = guided(lambda: named)
        graph = named.graph
        assert graph is not None
        del out
        # Cycles of the model would hold tensors during the second run.
        gc.collect(0)
        with LiveBytes() as live:
            weigh = Weigh(live)
            out = guided(lambda: weigh)
            value = mean_of(out)
            del out
            live.peak = live.current
            if value.requires_grad:
                value.backward()
        graph.others = weigh.others(graph)
    return named
