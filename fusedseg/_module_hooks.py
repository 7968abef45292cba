"""Whether code looks at the calls of a module: hooks of the module, PyTorch's global hooks, or a replaced forward.

A module of this package that does the work of others does not call them, or gives them other tensors, so it asks here
whether anybody would notice.
"""

import torch
from torch import nn

from . import _torch


@_torch.assume_constant_result
def has_global_hooks() -> bool:
    """Whether code has registered hooks of all modules."""
    return any(_torch.global_module_hooks)


def has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether backward hooks give the module views in place of its inputs."""
    _, _, backward, backward_pre = _torch.global_module_hooks
    return bool(module._backward_hooks or module._backward_pre_hooks or backward or backward_pre)


def is_called_unseen(*modules: nn.Module) -> bool:
    """Whether other code may do the work of these modules: they have no hooks, and the forward of their class."""
    # The compiler of early versions follows no generator here.
    for module in modules:
        # The compiler traces the forward that it finds, and cannot follow the question for one of the module's own.
        own = () if torch.compiler.is_compiling() else module.__dict__
        if has_hooks(module) or "forward" in own or "_conv_forward" in own:
            return False
    return not has_global_hooks()
