"""The behaviour of this package's modules under ``torch.fx.symbolic_trace`` and ``torch.jit.script``.

``torch.fx.symbolic_trace`` records each module as one call, like the modules of ``torch.nn``, because the forwards
check shapes and read values of their inputs, and a ``Proxy`` has neither.  ``torch.jit.script`` raises an error.
"""

from typing import Any, NoReturn

from torch import nn
from torch.fx import Proxy

from ..ops.conv.sources import Interpolated


def proxy_in(value: Any) -> Proxy | None:
    """The first proxy in a value, or None.  The value may be a tensor, an ``Interpolated``, a list or a tuple."""
    if isinstance(value, Proxy):
        return value
    if isinstance(value, Interpolated):
        return proxy_in(value.x)
    if isinstance(value, (tuple, list)):
        return next((found for part in value if (found := proxy_in(part)) is not None), None)
    return None


def as_leaf(module: nn.Module, *args: Any) -> Any:
    """Records the call ``module(*args)`` as one node in the graph of the proxies among the arguments."""
    proxy = proxy_in(args)
    assert proxy is not None
    tracer: Any = proxy.tracer
    if module is getattr(tracer, "root", None):
        raise TypeError(
            f"torch.fx: {type(module).__name__} is one call in a traced graph and cannot be traced itself; trace a "
            "module that holds it, such as nn.Sequential(module)"
        )
    return tracer.create_proxy("call_module", tracer.path_of_module(module), _formed(args), {})


def _formed(value: Any) -> Any:
    """The value with every ``Interpolated`` computed, because a graph has no values of that class."""
    if isinstance(value, (tuple, list)):
        return type(value)(_formed(part) for part in value)
    return value.formed() if isinstance(value, Interpolated) else value


class Unscriptable:
    """A base class beside ``nn.Module``: TorchScript cannot compile the module, and the error names alternatives."""

    def __prepare_scriptable__(self) -> NoReturn:
        raise RuntimeError(
            f"fusedseg.{type(self).__name__}: torch.jit.script cannot compile its source; use torch.export, "
            "torch.onnx.export or torch.jit.trace, which write it down in stock functions, or first give a model that "
            "fusedseg.convert has converted its stock modules back by fusedseg.revert"
        )
