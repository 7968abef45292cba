"""An error of the model itself, such as a wrong number of channels, first says which module raised it.

Dynamo runs a model on tensors without values before it calls any backend.  The error that it raises there names an op
and no module, and a model with such an error never reaches the backend.  So ``name_module`` runs when a compilation
ends, and reads the module from the traceback.
"""

import sys
import traceback
from types import FrameType

from torch import fx

from .. import _torch
from .counting import MODEL, module_of
from .settings import OP


def name_module(*unused: object) -> None:
    """Begins the message of an error that ends a compilation with the module and with eager mode's message.

    It changes no other error, and none of a model that is compiled for another backend.
    """
    error = sys.exc_info()[1]
    if error is None or not error.args:
        return
    first: BaseException = error
    while first.__context__ is not None:
        first = first.__context__
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    module = next(filter(None, map(_module_in, frames)), "")
    if module and first is not error and any(map(_torch.compiles_for_fusedseg, frames)):
        error.args = (f"{OP}: {module}: {first}\n{error.args[0]}", *error.args[1:])


def _module_in(frame: FrameType) -> str:
    """The module whose op a frame of Dynamo runs on tensors without values, or ""."""
    node = frame.f_locals.get("node")
    name, kind = module_of(node) if isinstance(node, fx.Node) else MODEL
    return f"{'the model' if name == MODEL.name else name} ({kind})" if kind else ""
