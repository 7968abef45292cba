"""Whether a forward is the second one of ``torch.utils.checkpoint``, which runs inside of the backward pass."""

import torch


def recomputing() -> bool:
    """True inside a backward pass, where this batch has moved the running statistics already.

    Compiled code does not ask: the compiler decides there what is computed twice.
    """
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
