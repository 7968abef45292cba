"""The names of Triton that its versions have at different places, and whether Triton interprets kernels.

Triton is found by import alone, because it is installed under other names too: ``triton-windows`` on Windows,
``pytorch-triton-rocm`` or ``pytorch-triton-xpu`` with other builds of PyTorch.  ``launcher.py`` alone reads how Triton
launches a kernel, and only in versions whose code we have read.
"""

from typing import Any

import triton
from triton import knobs as knobs
from triton.backends.compiler import GPUTarget as GPUTarget
from triton.compiler import CompiledKernel as CompiledKernel
from triton.runtime import driver as driver
from triton.runtime.jit import JITFunction as JITFunction

# A context in which threads compile.  Triton has it since 3.6 at the latest.
AsyncCompileMode: Any = getattr(triton, "AsyncCompileMode", None)


def interpreted() -> bool:
    """Whether Triton interprets kernels, in place of compiling them."""
    return bool(knobs.runtime.interpret)
