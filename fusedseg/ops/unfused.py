"""Whether a call becomes part of a program that runs without this package: ``torch.export``, ONNX and TorchScript.

Each op calls stock functions then.
"""

import torch

from .. import _torch


@_torch.assume_constant_result
def _exporting() -> bool:
    """Whether an export is running.  It is called while a function is traced.

    In compiled code the answer of PyTorch 2.11 is always True.
    """
    return torch.compiler.is_exporting()


def wanted() -> bool:
    """Whether a call is being exported or traced to a program, and must therefore use stock functions."""
    return _exporting() or torch.jit.is_tracing()
