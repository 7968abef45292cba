"""``fusedseg.revert`` gives a converted model its stock modules back."""

from typing import TypeVar

from torch import nn

from . import scope
from .formats import lay_back
from .twins import STOCK, become_stock

Model = TypeVar("Model", bound=nn.Module)


def revert(model: Model) -> Model:
    """Gives a converted model its stock modules back, in place, and returns it.

    Its outputs, parameters, buffers, hooks and mode stay the same.  It can be scripted and exported as before the
    conversion.  What ``convert(memory_format=...)`` has laid out is contiguous again.  After ``convert(mode="leaky")``
    the LeakyReLU modules stay, because the model was trained with them.  A model that was never converted stays as it
    is, and so do fused modules that the model was built with.

    Raises:
        TypeError: ``model`` is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"fusedseg.revert: model must be an nn.Module, got {type(model).__name__}")
    for module in model.modules():
        # The scope goes first: if the root itself is a fused module, its class is a subclass of the fused class.
        scope.remove(module)
        lay_back(module)
        if STOCK in module.__dict__:
            become_stock(module)
    return model
