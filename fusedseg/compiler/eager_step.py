"""What eager mode keeps of a graph that Dynamo has captured: a step on tensors without values, under the meter.

The report shows these bytes.  A budget is a share of those that ``plan/eager_mode.py`` reads from the joint graph
without a step, where the positions of a pool are bytes in place of 64-bit integers.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx

from ..memory.fake import fake_mode
from ..memory.meter import Footprint, measure
from .counting import GIVEN, MODEL, Module, module_of
from .graph import copy_of, hint_of


class Captured:
    """A graph as Dynamo has captured it, and its inputs without values: a step of eager mode is counted on it."""

    def __init__(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
        self._module, self._inputs = copy_of(module), [_without_values(value) for value in example_inputs]
        self._autocast = {
            kind: torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)
        }

    @cached_property
    def step(self) -> Footprint:
        """What a step needs; ``saved_by`` has the modules, and what the model was given."""
        run = _ByModule(self._module)
        with ExitStack() as stack:
            stack.enter_context(fake_mode())
            for kind, dtype in self._autocast.items():
                stack.enter_context(torch.autocast(kind, dtype))
            inputs = [value() if isinstance(value, FunctionType) else value for value in self._inputs]
            owned = [x for x in inputs if isinstance(x, Tensor)]
            found = measure(run.results, *inputs, owned=owned, where=lambda: run.place)
        by = {module if isinstance(module, Module) else GIVEN: n for module, n in found.saved_by.items()}
        return replace(found, saved_by=by)


class _ByModule(fx.Interpreter):
    """Runs a graph, and knows the module of the call that runs."""

    place = MODEL

    def results(self, *inputs: Any) -> Any:
        out = self.run(*inputs)
        # The interpreter would hold the results through backward.
        self.env = {}
        return out

    def run_node(self, n: fx.Node) -> Any:
        self.place = module_of(n)
        return super().run_node(n)


def _without_values(value: object) -> object:
    """An input as it is, or as a function that makes it without its values."""
    if isinstance(value, torch.SymInt):
        return hint_of(value)
    if not isinstance(value, Tensor):
        return value
    shape, stride, dtype, device = tuple(value.shape), tuple(value.stride()), value.dtype, value.device
    trained, is_leaf = value.requires_grad, value.is_leaf

    def made() -> Tensor:
        tensor = torch.empty_strided(shape, stride, dtype=dtype, device=device).requires_grad_(trained)
        return tensor if is_leaf else tensor.clone()

    return made
