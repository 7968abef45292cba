"""Names of an earlier release that are gone: a call raises an error with the line to write instead."""

from typing import Any


def recompute(*args: object, **kwargs: object) -> Any:
    """Gone: ``torch.compile(model, backend="fusedseg")`` keeps less, and works with an unchanged model too."""
    raise RuntimeError(
        'fusedseg.recompute: the recompute scope is gone; write model = torch.compile(model, backend="fusedseg"), with '
        'options={"codegen": "aten"} where there is no C++ compiler'
    )


def _gone(old: str, new: str) -> Any:
    def raises(*args: object, **kwargs: object) -> Any:
        raise RuntimeError(f"fusedseg.{old} is gone; write {new}")

    raises.__doc__ = f"Gone: write {new}."
    return raises


profile = _gone("memory.profile", "fusedseg.profile(model, shape); for a loss, fusedseg.memory.measure")
plan = _gone("memory.plan", "fusedseg.plan(model, shape, budget)")
compare = _gone("memory.compare", "fusedseg.profile(model, shape), which sets the ways beside each other")
curve = _gone("memory.curve", "fusedseg.plan(model, shape, budget), which tries budgets of the backend")
plot = _gone("memory.plot", "fusedseg.profile(model, shape).plot(path)")
partitions = _gone("compiler.partitions", "fusedseg.compiler.estimate(model, shape, options={...})")
