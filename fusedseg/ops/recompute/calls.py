"""A call of any function, to be done again with other tensors."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

Function = Callable[..., Any]


class _Slot:
    """The place of a tensor among the arguments of a call."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class Replay:
    """A call with its tensors taken out, to be done again with others in their place."""

    __slots__ = ("args", "func", "kwargs")

    def __init__(self, func: Function, args: Any, kwargs: dict[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs

    def __call__(self, *tensors: Tensor) -> Tensor:
        return self.func(*_with(self.args, tensors), **_with(self.kwargs, tensors))

    def by(self, func: Function, **kwargs: Any) -> "Replay":
        """The same tensors given to another function, or with other options."""
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


def replay(func: Function, args: Any, kwargs: Any) -> tuple[Replay, list[Tensor]]:
    """The call without its tensors, and these."""
    tensors: list[Tensor] = []
    return Replay(func, _without(args, tensors), _without(kwargs, tensors)), tensors
