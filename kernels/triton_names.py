"""The names of Triton that its versions have at different places, and whether Triton interprets kernels.

Triton is found by import alone, because it is installed under other names too: ``triton-windows`` on Windows,
``pytorch-triton-rocm`` or ``pytorch-triton-xpu`` with other builds of PyTorch.  ``launcher.py`` alone reads how Triton
launches a kernel, and only in versions whose code we have read.
"""

import os
from typing import Any

import triton
from triton.backends.compiler import GPUTarget as GPUTarget
from triton.compiler import CompiledKernel as CompiledKernel
from triton.runtime import driver as driver
from triton.runtime.jit import JITFunction as JITFunction

# Triton's options.  Before 3.4 they were environment variables.
knobs: Any = getattr(triton, "knobs", None)
# A context in which threads compile.  Triton has it since 3.6 at the latest.
AsyncCompileMode: Any = getattr(triton, "AsyncCompileMode", None)


def interpreted() -> bool:
    """Whether Triton interprets kernels, in place of compiling them."""
    if knobs is None:
        # These versions know no other word.
        return os.environ.get("TRITON_INTERPRET", "0") == "1"
    return bool(knobs.runtime.interpret)
