"""``fusedseg.revert``: stock modules back."""

from typing import TypeVar

from torch import nn

from . import scope
from .twins import STOCK, become_stock

Model = TypeVar("Model", bound=nn.Module)


def revert(model: Model) -> Model:
    """Gives a converted model its stock modules back, in place, and returns it.

    Its outputs stay what they are, and so do parameters, buffers, hooks and mode; it scripts and exports as before it
    was converted.  In what ``convert(mode="leaky")`` has made, LeakyReLU stays in place of ReLU: the model was trained
    with it.  A model that was never converted stays as it is; so do fused modules that a model was built with.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"fusedseg.revert: model must be an nn.Module, got {type(model).__name__}")
    for module in model.modules():
        # first, since the class of a root that was fused itself is a subclass of the fused class
        scope.remove(module)
        if STOCK in module.__dict__:
            become_stock(module)
    return model
