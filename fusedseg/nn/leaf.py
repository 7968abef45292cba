"""Modules of this package under ``torch.fx.symbolic_trace``: each is one call, as the modules of ``torch.nn`` are.

Their forwards check shapes and look at values of their inputs, which a ``Proxy`` does not have.
"""

from typing import Any

from torch import nn
from torch.fx import Proxy

from ..ops.sources import Interpolated


def proxy_in(value: Any) -> Proxy | None:
    """A proxy that is the value, that it enlarges, or that is among the parts of a list or tuple."""
    if isinstance(value, Proxy):
        return value
    if isinstance(value, Interpolated):
        return proxy_in(value.x)
    if isinstance(value, (tuple, list)):
        return next((found for part in value if (found := proxy_in(part)) is not None), None)
    return None


def as_leaf(module: nn.Module, *args: Any) -> Any:
    """The call ``module(*args)`` as one node of the graph that the proxies among the arguments belong to."""
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
    """A graph has no values of the class ``Interpolated``: it enlarges the tensor before the call."""
    if isinstance(value, (tuple, list)):
        return type(value)(_formed(part) for part in value)
    return value.formed() if isinstance(value, Interpolated) else value
