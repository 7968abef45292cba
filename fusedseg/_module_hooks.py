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


def is_observed(module: nn.Module) -> bool:
    """Whether the module has hooks, or a forward of its own in place of its class's."""
    if has_hooks(module):
        return True
    own = module.__dict__
    # The compiler traces the forward that it finds, and cannot follow this question.
    return not torch.compiler.is_compiling() and ("forward" in own or "_conv_forward" in own)


def is_called_unseen(*modules: nn.Module) -> bool:
    """Whether other code may do the work of these modules, because nobody looks at their calls."""
    # The compiler of early versions follows no generator here.
    for module in modules:
        if is_observed(module):
            return False
    return not has_global_hooks()
