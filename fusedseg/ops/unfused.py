"""Whether a call becomes part of a program that runs without this package: ``torch.export``, ONNX and TorchScript.

Each op calls stock functions then.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from .. import _torch

Function = TypeVar("Function", bound=Callable[..., Any])


def assume_constant_result(function: Function) -> Function:
    """Lets the compiler call the function once, while it traces, and treat the result as a constant.

    It replaces ``torch.compiler.assume_constant_result``.  PyTorch's decorator imports ``torch._dynamo``, and with it
    triton and sympy, which takes longer than the rest of ``import fusedseg``.  Then it only sets this attribute.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@assume_constant_result
def _exporting() -> bool:
    """Whether an export is running.  It is called while a function is traced.

    In compiled code the answer of PyTorch 2.11 is always True.
    """
    return _torch.is_exporting()


def wanted() -> bool:
    """Whether a call is being exported or traced to a program, and must therefore use stock functions."""
    return _exporting() or torch.jit.is_tracing()
