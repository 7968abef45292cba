"""The behaviour of this package's modules under ``torch.fx.symbolic_trace`` and ``torch.jit.script``.

``torch.fx.symbolic_trace`` records each module as one call, like the modules of ``torch.nn``, because the forwards
check shapes and read values of their inputs, and a ``Proxy`` has neither.  ``torch.jit.script`` raises an error.
"""

from typing import Any, NoReturn

from torch import nn
from torch.fx import Proxy

from ..ops.conv.sources import Interpolated


def proxy_in(value: object) -> Proxy | None:
    """The first proxy in a value, or None.  The value may be a tensor, an ``Interpolated``, a list or a tuple."""
    if isinstance(value, Proxy):
        return value
    if isinstance(value, Interpolated):
        return proxy_in(value.x)
    if isinstance(value, (tuple, list)):
        # The compiler of PyTorch 2.11 and earlier cannot follow a generator that assigns a name.
        for part in value:
            found = proxy_in(part)
            if found is not None:
                return found
    return None


def as_leaf(module: nn.Module, *args: object) -> Any:
    """Records the call ``module(*args)`` as one node in the graph of the proxies among the arguments."""
    proxy = proxy_in(args)
    assert proxy is not None
    tracer: Any = proxy.tracer
    if module is getattr(tracer, "root", None):
        raise TypeError(
            f"fusedseg.{type(module).__name__}: torch.fx records a call of this module as one node, and cannot trace "
            "the module itself; trace a module that holds it, such as nn.Sequential(module)"
        )
    return tracer.create_proxy("call_module", tracer.path_of_module(module), _formed(args), {})


def _formed(value: object) -> Any:
    """The value with every ``Interpolated`` computed, because a graph has no values of that class."""
    if isinstance(value, (tuple, list)):
        return type(value)(_formed(part) for part in value)
    return value.formed() if isinstance(value, Interpolated) else value


class Unscriptable:
    """A base class beside ``nn.Module``: TorchScript cannot compile the module, and the error names alternatives."""

    @classmethod
    def _name(cls) -> str:
        """The name of the module in errors."""
        return f"fusedseg.{cls.__name__}"

    def __prepare_scriptable__(self) -> NoReturn:
        raise RuntimeError(
            f"{self._name()}: torch.jit.script cannot compile this module; use torch.export, "
            "torch.onnx.export or torch.jit.trace, whose programs call stock functions in place of the module.  If "
            "fusedseg.convert made it, fusedseg.revert(model) gives the model its stock modules back"
        )
