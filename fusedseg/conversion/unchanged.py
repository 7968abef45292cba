"""A model as it was: snapshots of its modules, taken back."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

CONTAINERS = (dict, list, set)


class Snapshot:
    """Class and attributes of every module; containers among the attributes (parameters, buffers, hooks, children, and
    lists of the model's own) with what they hold.  Tensors are not copied."""

    def __init__(self, root: nn.Module) -> None:
        self._states: list[tuple[nn.Module, type, dict[str, Any], list[tuple[Any, Any]]]] = []
        for module in list(root.modules()):
            state = dict(module.__dict__)
            contents = [(held, held.copy()) for held in state.values() if isinstance(held, CONTAINERS)]
            self._states.append((module, type(module), state, contents))

    def restore(self) -> None:
        for module, cls, state, contents in self._states:
            if type(module) is not cls:
                object.__setattr__(module, "__class__", cls)
            module.__dict__.clear()
            module.__dict__.update(state)
            for held, content in contents:
                if isinstance(held, list):
                    held[:] = content
                else:
                    held.clear()
                    held.update(content)


@contextmanager
def unchanged(root: nn.Module) -> Iterator[None]:
    """Whatever happens to the model's attributes inside is taken back."""
    snapshot = Snapshot(root)
    try:
        yield
    finally:
        snapshot.restore()


@contextmanager
def all_or_nothing(root: nn.Module) -> Iterator[None]:
    """An exception takes back whatever happened to the model's attributes."""
    snapshot = Snapshot(root)
    try:
        yield
    except BaseException:
        snapshot.restore()
        raise
