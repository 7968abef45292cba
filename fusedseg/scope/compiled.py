"""The recompute scope under ``torch.compile``: labels for the compiler's partition of a graph (``ops/labels.py``).

* ``with fusedseg.recompute():`` inside the compiled function calls ``begin`` and ``end``.
* A scope around the call of a compiled function has a function mode (``watch.py``).  The compiler traces the mode too,
  and ``called`` follows each call of a function.  The compiler itself checks at each call whether the modes are those
  of the trace, so one function compiled once serves calls inside and outside of scopes with one graph for each.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from .. import _torch
from ..ops.labels import begin, called, end
from ..ops.unfused import assume_constant_result

Function = TypeVar("Function", bound=Callable[..., Any])


def as_python(function: Function) -> Function:
    """Keeps the compiler from compiling ``function``, and what it calls, where plain Python calls it.

    After a break of the graph, the compiler looks at each function that Python calls.  The scope of eager mode must
    run as it is.  The compiler still follows ``function`` where a compiled function calls it.
    """
    _torch.run_as_python(function.__code__)
    return function


@assume_constant_result
def prepare() -> bool:
    """Lets the compiler take the scope's calls of ``ops/labels.py`` into its graph.  It runs while it traces.

    Returns False, and warns once, if the scope cannot do its work with this version of PyTorch.
    """
    problem = _torch.compiled_problem()
    if problem:
        warn_of_torch(problem)
        return False
    for function in (begin, end, called):
        torch.compiler.allow_in_graph(function)
    return True


@functools.cache
def warn_of_torch(problem: str) -> None:
    """Warns once that the scope does nothing."""
    warnings.warn(
        f"fusedseg.recompute does nothing, so that autograd keeps what it keeps without a scope: {problem}.  Gradients "
        "are right; `python -m fusedseg doctor` names the versions of PyTorch that are tested",
        stacklevel=4,
    )
