"""Snapshots of a model, to restore it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

CONTAINERS = (dict, list, set)


class Snapshot:
    """The class and attributes of every module, and the contents of containers among the attributes.

    Such containers are the dictionaries of parameters, buffers, hooks and children, and the model's own lists.  Tensors
    are not copied.
    """

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
    """A context that restores the model's attributes at its end."""
    snapshot = Snapshot(root)
    try:
        yield
    finally:
        snapshot.restore()


@contextmanager
def all_or_nothing(root: nn.Module) -> Iterator[None]:
    """A context that restores the model's attributes if it ends with an exception."""
    snapshot = Snapshot(root)
    try:
        yield
    except BaseException:
        snapshot.restore()
        raise
