"""Calls without their tensors, which can be made again with other tensors."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

Function = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class _Slot:
    """A placeholder for a tensor among the arguments of a call."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class Replay:
    """A call whose tensors were taken out.  Calling a ``Replay`` with other tensors makes the call with them."""

    __slots__ = ("args", "func", "kwargs")

    def __init__(self, func: Function, args: object, kwargs: Kwargs) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs

    def __call__(self, *tensors: Tensor) -> Tensor:
        return self.func(*_with(self.args, tensors), **_with(self.kwargs, tensors))

    def by(self, func: Function, **kwargs: object) -> "Replay":
        """The same call of another function, or with other options."""
        return Replay(func, self.args, self.kwargs | kwargs if kwargs else self.kwargs)


def _without(tree: Any, tensors: list[Tensor]) -> Any:
    if isinstance(tree, Tensor):
        tensors.append(tree)
        return _Slot(len(tensors) - 1)
    kind = type(tree)
    if kind is tuple or kind is list:
        return kind([_without(part, tensors) for part in tree])
    if kind is dict:
        return {name: _without(part, tensors) for name, part in tree.items()}
    return tree


def _with(tree: Any, tensors: tuple[Tensor, ...]) -> Any:
    kind = type(tree)
    if kind is _Slot:
        return tensors[tree.index]
    if kind is tuple or kind is list:
        return kind([_with(part, tensors) for part in tree])
    if kind is dict:
        return {name: _with(part, tensors) for name, part in tree.items()}
    return tree


def replay(func: Function, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[Replay, list[Tensor]]:
    """Returns the call without its tensors, and the list of these tensors."""
    tensors: list[Tensor] = []
    return Replay(func, _without(args, tensors), _without(kwargs, tensors)), tensors
