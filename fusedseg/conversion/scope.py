"""The recompute scope around every forward of a converted model, as hooks of its root."""

import threading
from typing import Any

import torch
from torch import nn

from ..ops import unfused
from ..ops.recompute import recompute

SCRIPTABLE = "__prepare_scriptable__"


class _Active(threading.local):
    def __init__(self) -> None:
        self.scopes: list[tuple[nn.Module, Any]] = []


_active = _Active()


def _apart() -> bool:
    """Whether there is nothing for the scope to do: what is called is compiled, or written down for a program."""
    return torch.compiler.is_compiling() or unfused.wanted()


def enter(module: nn.Module, args: Any) -> None:
    if not _apart():
        scope = recompute()
        scope.__enter__()
        _active.scopes.append((module, scope))


def leave(module: nn.Module, args: Any, out: Any) -> None:
    """Called after an exception as well, also one from before ``enter``."""
    if not _apart() and _active.scopes and _active.scopes[-1][0] is module:
        _active.scopes.pop()[1].__exit__(None, None, None)


def refuse_script() -> None:
    """What ``torch.jit.script`` calls first, if a module has it: the hooks above are not for it to compile."""
    raise RuntimeError(
        "fusedseg.convert: a converted model cannot be scripted; call fusedseg.revert(model) before torch.jit.script"
    )


def install(root: nn.Module) -> None:
    # around the hooks of others
    root.register_forward_pre_hook(enter, prepend=True)
    root.register_forward_hook(leave, always_call=True)
    root.__dict__[SCRIPTABLE] = refuse_script


def remove(module: nn.Module) -> bool:
    """Whether there was one."""
    found = False
    for hooks, ours in ((module._forward_pre_hooks, enter), (module._forward_hooks, leave)):
        for key, hook in list(hooks.items()):
            if hook is ours:
                del hooks[key]
                module._forward_hooks_always_called.pop(key, None)
                found = True
    if found:
        module.__dict__.pop(SCRIPTABLE, None)
    return found
