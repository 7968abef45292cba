"""What eager mode keeps of a graph that Dynamo has captured: a step on tensors without values, under the meter."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ..memory.fake import fake_mode
from ..memory.meter import measure
from .counting import GIVEN, MODEL, Bytes, Course, Module, module_of
from .graph import hint_of, twin_of


class Captured:
    """A graph as Dynamo has captured it, and its inputs without values: a step of eager mode is counted on it."""

    def __init__(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
        graph, _ = twin_of(module.graph)
        self._module, self._inputs = fx.GraphModule(module, graph), [_without_values(value) for value in example_inputs]
        self._autocast = {
            kind: torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)
        }
        self._found: InEagerMode | None = None

    def step(self) -> "InEagerMode":
        """What a step needs."""
        if self._found is None:
            self._found = self._counted()
        return self._found

    def _counted(self) -> "InEagerMode":
        run = _ByModule(self._module)
        with ExitStack() as stack:
            stack.enter_context(fake_mode())
            for kind, dtype in self._autocast.items():
                stack.enter_context(torch.autocast(kind, dtype))
            inputs = [value() if isinstance(value, InputWithoutValues) else value for value in self._inputs]
            owned = [x for x in inputs if isinstance(x, Tensor)]
            found = measure(run.results, *inputs, owned=owned, where=lambda: run.place)
        by = {module if isinstance(module, Module) else GIVEN: n for module, n in found.saved_by.items()}
        return InEagerMode(Bytes(found.saved, found.peak, found.with_workspaces), by, found.course)


class InEagerMode(NamedTuple):
    """The bytes of a step, the kept ones by the module that has made them, and their course."""

    needs: Bytes
    by: Mapping[Module, int]
    course: Course


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


class InputWithoutValues(NamedTuple):
    """An input without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    is_leaf: bool

    def __call__(self) -> Tensor:
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        made.requires_grad_(self.requires_grad)
        return made if self.is_leaf else made.clone()


def _without_values(value: object) -> object:
    if isinstance(value, torch.SymInt):
        return hint_of(value)
    if not isinstance(value, Tensor):
        return value
    shape, stride = tuple(value.shape), tuple(value.stride())
    return InputWithoutValues(shape, stride, value.dtype, value.device, value.requires_grad, value.is_leaf)
