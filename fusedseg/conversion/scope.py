"""The recompute scope around every call of a converted model.

The root of the model changes its class to a subclass whose ``__call__`` enters the scope.  Hooks cannot do this:
PyTorch runs hooks with ``always_call`` only after an ``Exception``, so that a ``KeyboardInterrupt`` would leave the
scope open forever.  A ``forward`` among the root's own attributes cannot do it either: copies of the model would call
the forward of the original.
"""

import types
from collections.abc import Callable
from typing import Any, SupportsIndex

from torch import nn

from ..ops import unfused
from ..ops.unfused import assume_constant_result
from ..scope.scope import recompute
from .wiring import Wiring

# The name of an attribute of a root that has a scope.
WIRING = "_fusedseg_wiring"
# The name of an attribute of a root's new class; it holds the class that the root had.
STOCK_CLASS = "_fusedseg_stock_class"


class Scoped:
    """The first base class of a root's new class; the second base class is the class that the root had."""

    _fusedseg_stock_class: type
    _fusedseg_wiring: Wiring | None = None

    def __init_subclass__(cls, **kwargs: object) -> None:
        # The model's class may have an __init_subclass__ that needs arguments, or that registers its subclasses.
        if STOCK_CLASS not in cls.__dict__:
            super().__init_subclass__(**kwargs)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        if self._fusedseg_wiring is None:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        self._check_wiring()
        # An exported or traced program needs no scope.
        if unfused.wanted():
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        args, kwargs = self._fusedseg_wiring.laid_out(args, kwargs)
        with recompute.of_converted():
            return super().__call__(*args, **kwargs)  # type: ignore[misc]

    @assume_constant_result
    def _check_wiring(self) -> bool:
        """Checks the wiring.  ``torch.compile`` runs this while it traces, and traces again if a module changes."""
        assert self._fusedseg_wiring is not None
        self._fusedseg_wiring.check()
        return True

    def __prepare_scriptable__(self) -> Any:
        """Raises an error, because the module cannot be scripted; ``torch.jit.script`` calls this first."""
        if self._fusedseg_wiring is not None:
            raise RuntimeError(
                "fusedseg.convert: a converted model cannot be scripted; call fusedseg.revert(model) before "
                "torch.jit.script"
            )
        inherited = getattr(super(), "__prepare_scriptable__", None)
        return self if inherited is None else inherited()

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Pickles the root under the name of the class that it had; unpickling makes the scoped class again."""
        if STOCK_CLASS not in type(self).__dict__:
            # Other code has changed the class once more, and must pickle its own class.
            return super().__reduce_ex__(protocol)
        make, args, *rest = _as_stock(self).__reduce_ex__(protocol)
        return (_made_again, (make, args, self._fusedseg_wiring is not None), *rest)


def _as_stock(root: Any) -> Any:
    """An object of the class that the root had, which shares the root's attributes."""
    view = object.__new__(type(root)._fusedseg_stock_class)
    object.__setattr__(view, "__dict__", root.__dict__)
    return view


def _made_again(make: Callable[..., Any], args: tuple[object, ...], has_scope: bool) -> Any:
    """Makes a root while it is unpickled or copied; pickle or copy sets its attributes afterwards."""
    made = make(*args)
    if has_scope:
        _change_class(made)
    return made


def _change_class(root: object) -> None:
    stock = type(root)
    # Python refers to subclasses weakly, so that looking among them keeps no class alive.
    cls = next((sub for sub in stock.__subclasses__() if sub.__dict__.get(STOCK_CLASS) is stock), None)
    if cls is None:
        # The names that the model prints, and by which its source is found.
        names: dict[str, Any] = {
            "__module__": stock.__module__,
            "__qualname__": stock.__qualname__,
            "__doc__": stock.__doc__,
        }
        names[STOCK_CLASS] = stock
        # `new_class` finds the right metaclass.
        cls = types.new_class(stock.__name__, (Scoped, stock), exec_body=lambda body: body.update(names))
    root.__class__ = cls


def install(root: nn.Module, wiring: Wiring) -> None:
    """Lets every call of ``root`` check ``wiring`` and enter the scope from now on."""
    if not isinstance(root, Scoped):
        _change_class(root)
    root.__dict__[WIRING] = wiring


def is_converted(module: nn.Module) -> bool:
    """Whether ``convert`` has given the module a scope; it gives one to the root of a model."""
    return WIRING in module.__dict__


def remove(module: nn.Module) -> None:
    """Takes the scope away, and restores the module's class unless other code has changed the class since."""
    module.__dict__.pop(WIRING, None)
    stock = type(module).__dict__.get(STOCK_CLASS)
    if stock is not None:
        module.__class__ = stock
