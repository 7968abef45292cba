"""Inputs of a subclass of torch.Tensor, such as MONAI's MetaTensor or torchvision's Image: graphs get plain tensors.

AOTAutograd runs a graph on the tensors that it is given, and PyTorch's own kernels refuse a subclass there with
"Multiple dispatch failed for aten.convolution".
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from .. import _torch


def places_of(inputs: Sequence[object]) -> list[int]:
    """The places of inputs whose class only says what a call of PyTorch does, as AOTAutograd knows other classes."""
    others = ((place, x) for place, x in enumerate(inputs) if type(x) is not Tensor and not isinstance(x, nn.Parameter))
    stock = Tensor.__torch_dispatch__
    return [place for place, x in others if isinstance(x, Tensor) and type(x).__torch_dispatch__ is stock]


def without_classes(module: fx.GraphModule, inputs: Sequence[Any], places: Sequence[int]) -> list[Any]:
    """The inputs of a captured graph, with Dynamo's tensors without values in place of those at ``places``."""
    given = [node for node in module.graph.nodes if node.op == "placeholder"]
    return [given[place].meta["example_value"] if place in places else x for place, x in enumerate(inputs)]


def unwrapping(run: Callable[..., Any], places: Sequence[int]) -> Callable[..., Any]:
    """A function that calls ``run`` with plain tensors at ``places``, in the memory of those that it gets."""

    def on_plain_tensors(*args: Any) -> Any:
        return run(*(x.as_subclass(Tensor) if place in places else x for place, x in enumerate(args)))

    return on_plain_tensors


def trace_meta_tensors(*unused: object) -> None:
    """Lets Dynamo trace calls with MONAI's MetaTensors as calls with plain tensors; it runs before each compilation.

    Dynamo cannot trace how MONAI copies metadata.  It ended a graph at each call of a network, so almost nothing was
    compiled.  What a compiled network returns is a plain tensor.  Nothing changes in eager mode.
    """
    monai = sys.modules.get("monai.data.meta_tensor")
    if monai is None or monai.MetaTensor in _traced:
        return
    _traced.add(monai.MetaTensor)
    stock = monai.MetaTensor.__torch_function__.__func__

    def plain_in_graphs(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            return stock(cls, func, types, args, kwargs)
        with _torch.DisableTorchFunction():
            return func(*args, **(kwargs or {}))

    monai.MetaTensor.__torch_function__ = classmethod(plain_in_graphs)


# The classes of MetaTensors that Dynamo can trace.
_traced: set[type] = set()
