"""The recompute scope around every call of a converted model: its root changes its class to a subclass whose
``__call__`` enters the scope.

Hooks would not do: PyTorch runs those with ``always_call`` after an ``Exception`` alone, so that a
``KeyboardInterrupt`` would leave the scope open for good.  A ``forward`` among the root's own attributes would not do
either: copies of the model would call the forward of the original.
"""

import copy
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from ..ops import unfused
from ..ops.recompute.scope import recompute
from ..ops.unfused import assume_constant_result
from .wiring import Wiring

# an attribute of a root that has a scope
WIRING = "_fusedseg_wiring"
# an attribute of a root's new class: the class that the root had
STOCK_CLASS = "_fusedseg_stock_class"


class Scoped:
    """The first base class of a root's new class; the second one is the class that the root had."""

    _fusedseg_stock_class: type
    _fusedseg_wiring: Wiring | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # the model's class may have an __init_subclass__ that asks for arguments, or that registers its subclasses
        if STOCK_CLASS not in cls.__dict__:
            super().__init_subclass__(**kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._fusedseg_wiring is None:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        self._check_wiring()
        if _apart(self, args, kwargs):
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        with recompute():
            return super().__call__(*args, **kwargs)  # type: ignore[misc]

    @assume_constant_result
    def _check_wiring(self) -> bool:
        """Under ``torch.compile`` once, while the call is traced; it is traced anew where a module is another."""
        assert self._fusedseg_wiring is not None
        self._fusedseg_wiring.check()
        return True

    def __prepare_scriptable__(self) -> Any:
        """What ``torch.jit.script`` calls first."""
        if self._fusedseg_wiring is not None:
            raise RuntimeError(
                "fusedseg.convert: a converted model cannot be scripted; call fusedseg.revert(model) before "
                "torch.jit.script"
            )
        inherited = getattr(super(), "__prepare_scriptable__", None)
        return self if inherited is None else inherited()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A pickle finds classes by name: it names the class that the root had, and makes this one when it is read."""
        if STOCK_CLASS not in type(self).__dict__:
            # somebody else has changed the class once more, and answers for that
            return super().__reduce_ex__(protocol)
        make, args, *rest = _as_stock(self).__reduce_ex__(protocol)
        return (_made_again, (make, args, self._fusedseg_wiring is not None), *rest)


class _ScopedGraph(Scoped):
    """Of a ``GraphModule``, which has a class of its own, to which it writes its code, and ways of its own to copy."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # GraphModule.recompile() changes __call__ and forward of type(self): this runs below them
        call: Any = self._fusedseg_stock_class._wrapped_call  # type: ignore[attr-defined]
        if self._fusedseg_wiring is None:
            return call(self, *args, **kwargs)
        self._check_wiring()
        if _apart(self, args, kwargs):
            return call(self, *args, **kwargs)
        with recompute():
            return call(self, *args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if STOCK_CLASS not in type(self).__dict__:
            return super().__reduce_ex__(protocol)
        state = {WIRING: self.__dict__[WIRING]} if WIRING in self.__dict__ else {}
        return (_made_again, (*self._without_scope().__reduce__(), bool(state)), state)

    def _without_scope(self) -> Any:
        """A GraphModule's own copies are made of its attributes, which must not refer to it as the wiring does."""
        view = _as_stock(self)
        object.__setattr__(view, "__dict__", {name: v for name, v in self.__dict__.items() if name != WIRING})
        return view

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = memo[id(self)] = copy.deepcopy(self._without_scope(), memo)
        if self._fusedseg_wiring is not None:
            install(made, copy.deepcopy(self._fusedseg_wiring, memo))
        return made

    def __copy__(self) -> Any:
        made = copy.copy(self._without_scope())
        if self._fusedseg_wiring is not None:
            install(made, self._fusedseg_wiring.of(made))
        return made


def _apart(root: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether there is nothing for the scope to do: what is called is compiled, or written down for a program."""
    if torch.compiler.is_compiling() or root._compiled_call_impl is not None or unfused.wanted():
        return True
    return any(isinstance(arg, fx.Proxy) for arg in (*args, *kwargs.values()))


def _as_stock(root: Any) -> Any:
    """The same attributes as an object of the class that the root had."""
    view = object.__new__(type(root)._fusedseg_stock_class)
    object.__setattr__(view, "__dict__", root.__dict__)
    return view


def _made_again(make: Callable[..., Any], args: Any, has_scope: bool) -> Any:
    """Unpickles a root, or copies one; its attributes follow."""
    made = make(*args)
    if has_scope:
        _change_class(made)
    return made


def _change_class(root: Any) -> None:
    stock = type(root)
    # looked for among the subclasses, which Python refers to weakly, so that no class is kept alive
    cls = next((sub for sub in stock.__subclasses__() if sub.__dict__.get(STOCK_CLASS) is stock), None)
    if cls is None:
        base = _ScopedGraph if isinstance(root, fx.GraphModule) else Scoped
        # as the model prints, and as its class is found in its source
        names: dict[str, Any] = {
            "__module__": stock.__module__,
            "__qualname__": stock.__qualname__,
            "__doc__": stock.__doc__,
        }
        names[STOCK_CLASS] = stock
        # new_class finds the metaclass
        cls = types.new_class(stock.__name__, (base, stock), exec_body=lambda body: body.update(names))
    root.__class__ = cls


def install(root: nn.Module, wiring: Wiring) -> None:
    """Every call of ``root`` enters the scope from now on, after it was compared with ``wiring``."""
    if not isinstance(root, Scoped):
        _change_class(root)
    root.__dict__[WIRING] = wiring


def remove(module: nn.Module) -> None:
    """The module without a scope; in the class that it had, unless somebody else has changed the class since."""
    module.__dict__.pop(WIRING, None)
    stock = type(module).__dict__.get(STOCK_CLASS)
    if stock is not None:
        module.__class__ = stock
        if isinstance(module, fx.GraphModule):
            # its graph may have changed
            module.recompile()
