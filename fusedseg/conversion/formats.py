"""The argument ``memory_format`` of ``convert``: parameters and inputs with the dimensions of an image lie in it."""

from typing import Any

import torch
from torch import Tensor, nn

from .._torch import tree_map_only
from ..ops.layout import FORMATS

# The name of a module's attribute that lists the parameters and buffers that ``convert`` has laid out anew.
LAID = "_fusedseg_laid"


def _is_image(t: Tensor, memory_format: torch.memory_format) -> bool:
    return FORMATS.get(t.dim()) == memory_format and t.is_floating_point()


def inputs_in(memory_format: torch.memory_format, inputs: object) -> Any:
    """The inputs of a model, with a copy in place of each image that lies otherwise."""

    def laid_out(t: Tensor) -> Tensor:
        return t.contiguous(memory_format=memory_format) if _is_image(t, memory_format) else t

    return tree_map_only(Tensor, laid_out, inputs)


def lay_out(model: nn.Module, memory_format: torch.memory_format) -> None:
    """Lays out the parameters and buffers of a model; each stays the same object."""
    for module in model.modules():
        names = []
        for name, t in (*module._parameters.items(), *module._buffers.items()):
            if t is None or nn.parameter.is_lazy(t) or not _is_image(t, memory_format):
                continue
            # ``contiguous`` leaves the strides of a weight for one channel as they are, and a convolution reads them.
            laid = t.detach().to(memory_format=memory_format)
            if laid.stride() != t.stride():
                t.data = laid
                names.append(name)
        if names:
            module.__dict__[LAID] = names


def lay_back(module: nn.Module) -> None:
    """Makes contiguous again what ``lay_out`` has laid out in this module."""
    for name in module.__dict__.pop(LAID, ()):
        t = module._parameters.get(name, module._buffers.get(name))
        if t is not None:
            t.data = t.detach().to(memory_format=torch.contiguous_format)
