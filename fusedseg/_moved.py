"""Names of an earlier release: a call of one that is gone raises an error with the line to write instead."""

import sys
import warnings
from typing import Any


def recompute(*args: object, **kwargs: object) -> Any:
    """Gone: ``torch.compile(model, backend="fusedseg")`` keeps less, and works with an unchanged model too."""
    raise RuntimeError(
        'fusedseg.recompute: the recompute scope is gone; write model = torch.compile(model, backend="fusedseg")'
    )


def _gone(old: str, new: str) -> Any:
    def raises(*args: object, **kwargs: object) -> Any:
        raise RuntimeError(f"fusedseg.{old} is gone; write {new}")

    raises.__doc__ = f"Gone: write {new}."
    return raises


def profile(*inputs: Any, **options: Any) -> Any:
    """Moved: write ``fusedseg.profile(model, shape)``; for a loss, ``fusedseg.memory.measure``."""
    warnings.warn(
        "fusedseg.memory.profile has moved; write fusedseg.profile(model, shape); for a loss, fusedseg.memory.measure",
        DeprecationWarning,
        stacklevel=2,
    )
    # The package is above this file, and imported it.
    return sys.modules["fusedseg"].profile(*inputs, **options)


plan = _gone("memory.plan", "fusedseg.plan(model, shape, budget)")
compare = _gone("memory.compare", "fusedseg.profile(model, shape), which sets the ways beside each other")
curve = _gone("memory.curve", "fusedseg.plan(model, shape, budget), which tries budgets of the backend")
plot = _gone("memory.plot", "fusedseg.profile(model, shape).plot(path)")
partitions = _gone("compiler.partitions", "fusedseg.compiler.estimate(model, shape, options={...})")
