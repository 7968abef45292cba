"""Names of an earlier release that are gone: a call raises an error with the line to write instead."""

from typing import Any


def recompute(*args: object, **kwargs: object) -> Any:
    """Gone: ``torch.compile(model, backend="fusedseg")`` keeps less, and works with an unchanged model too."""
    raise RuntimeError(
        'fusedseg.recompute: the recompute scope is gone; write model = torch.compile(model, backend="fusedseg"), with '
        'options={"codegen": "aten"} where there is no C++ compiler'
    )
