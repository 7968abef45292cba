"""Parses the example that a model is called with, and names of its modules."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from torch import Tensor, nn


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


def named(op: str, argument: str, model: nn.Module, patterns: str | Sequence[str]) -> tuple[nn.Module, ...]:
    """The modules whose names match one of the patterns, such as "stem" or "head.*"."""
    patterns = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[nn.Module, None] = {}
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"{op}: {argument} must be names of modules, got {type(pattern).__name__}")
        matches = [module for name, module in modules.items() if name and fnmatchcase(name, pattern)]
        if not matches:
            names = ", ".join(name for name, _ in model.named_children())
            raise ValueError(
                f"{op}: {argument} {pattern!r} matches no module; the model's modules are {names or 'none'}"
            )
        found.update(dict.fromkeys(matches))
    return tuple(found)
