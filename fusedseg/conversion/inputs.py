"""Parses the example that a model is called with."""

from collections.abc import Mapping, Sequence

from torch import Tensor


def parse_inputs(op: str, example: object) -> tuple[tuple, dict]:
    """Arguments and keyword arguments of an example: a tensor, a sequence of arguments, or a mapping of keywords."""
    if isinstance(example, Tensor):
        return (example,), {}
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, Sequence) and not isinstance(example, str):
        if example and all(type(part) is int for part in example):
            shape = ", ".join(map(str, example))
            raise TypeError(f"{op}: the example must be a tensor, got the numbers ({shape}); pass torch.randn({shape})")
        return tuple(example), {}
    raise TypeError(
        f"{op}: the example must be a tensor, a sequence of arguments or a mapping of keywords, "
        f"got {type(example).__name__}"
    )
