"""Snapshots of a model, to restore it."""

import operator
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import chain
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
                # Some containers of other packages refuse to be changed, so that they have not changed.
                if _is_same(held, content):
                    continue
                if isinstance(held, list):
                    held[:] = content
                else:
                    held.clear()
                    held.update(content)


def _is_same(one: Collection[object], two: Collection[object]) -> bool:
    """Whether two containers hold the same objects in the same order."""
    if isinstance(one, set):
        return one == two
    left, right = (list(chain.from_iterable(held.items()) if isinstance(held, dict) else held) for held in (one, two))
    return len(left) == len(right) and all(map(operator.is_, left, right))


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
