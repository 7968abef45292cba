"""Ways to run a step in less memory, and their combinations.

These are conversion, the compiler backend with its budgets, autocast and checkpoints.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.utils.checkpoint import checkpoint

EAGER, AMP, CHECKPOINT, FUSED, COMPILED = "eager", "amp", "checkpoint", "fusedseg", "fusedseg-compile"
# A function that is called with a model of its own, and returns the converted model.
Convert = Callable[[nn.Module], nn.Module]


class NotOneGraph(RuntimeError):
    """Raised if a model cannot be compiled as one graph, or needs no gradient."""


class Partition(NamedTuple):
    """What one way to divide the graph keeps.

    Attributes:
        kept: bytes that forward keeps for backward, without parameters and buffers.
        peak: the most bytes at once if elementwise functions are fused (``buffers.py``), without inputs and parameters.
        repeated: the arithmetic of convolutions and matrix products that backward repeats, as a share of forward's.
    """

    kept: int
    peak: int
    repeated: float


# A function that is called with a model, its inputs, the ways, and the dtype of autocast, and returns what a compiled
# model keeps in each way: options of the backend, or the compiler's own ``activation_memory_budget``.
Ways = Sequence[Mapping[str, Any] | float]
Backend = Callable[[nn.Module, Sequence[torch.Tensor], Ways, torch.dtype | None], list[Partition]]


class NoBlocks(ValueError):
    """Raised if the model has no block to checkpoint."""


def checkpoint_blocks(model: nn.Module, limit: int = 4) -> list[str]:
    """Checkpoints the blocks of a model, in place: each block keeps only its inputs, and runs again in backward.

    A block is a module with children and with 1 to ``limit`` convolutions or linear layers that lies in no other such
    module.  ``forward`` of each block is wrapped in ``torch.utils.checkpoint.checkpoint`` (``use_reentrant=False``).
    A stock BatchNorm in a block updates its running statistics twice with each batch, a known flaw of checkpoints.

    Args:
        model: any module.
        limit: the largest number of convolutions and linear layers in a block.

    Returns:
        The names of the blocks.

    Raises:
        ValueError: ``limit`` is below 1, or the model has no such block, for example a flat ``nn.Sequential`` of many
            convolutions.
    """
    if limit < 1:
        raise ValueError(f"fusedseg.memory.checkpoint_blocks: limit must be at least 1, got {limit}")
    blocks = _blocks(model, "", limit)
    if not blocks:
        raise NoBlocks(
            f"fusedseg.memory.checkpoint_blocks: {type(model).__name__} has no module with 1 to {limit} convolutions "
            "or linear layers among its children"
        )
    for _, block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return [name for name, _ in blocks]


def _blocks(module: nn.Module, name: str, limit: int) -> list[tuple[str, nn.Module]]:
    weights = sum(isinstance(part, (_ConvNd, nn.Linear)) for part in module.modules())
    # ModuleList and ModuleDict are never called, and the whole model is no block.
    called = bool(name) and not isinstance(module, (nn.ModuleList, nn.ModuleDict))
    if called and 1 <= weights <= limit and next(module.children(), None) is not None:
        return [(name, module)]
    found = []
    for child, part in module.named_children():
        found += _blocks(part, f"{name}.{child}" if name else child, limit)
    return found


@dataclass(frozen=True)
class Strategy:
    """A combination of measures.

    Attributes:
        converted: whether the caller's function converts the model.
        amp: whether the step runs under autocast.
        checkpoint: whether ``checkpoint_blocks`` is applied.
        budget, bits: the backend's options of these names; None without.
        compiled: whether the stock model is compiled by the backend of this package.
    """

    converted: bool = False
    amp: bool = False
    checkpoint: bool = False
    budget: float | str | None = None
    bits: int | None = None
    compiled: bool = False

    @property
    def label(self) -> str:
        parts = [(self.converted, FUSED), (self.compiled, COMPILED), (self.amp, AMP), (self.checkpoint, CHECKPOINT)]
        parts += [(True, f"{name}={option_text(value)}") for name, value in self.options.items()]
        return "+".join(name for used, name in parts if used) or EAGER

    @property
    def options(self) -> dict[str, Any]:
        """The options of the backend."""
        return {name: value for name, value in (("budget", self.budget), ("bits", self.bits)) if value is not None}

    @property
    def measures(self) -> int:
        return self.converted + self.compiled + self.amp + self.checkpoint + len(self.options)

    def is_part_of(self, other: "Strategy") -> bool:
        """Whether ``other`` has all of these measures and more."""
        each = zip(astuple(self), astuple(other), strict=True)
        return self.measures < other.measures and all(theirs or not mine for mine, theirs in each)

    def prepare(self, model: nn.Module, convert: Convert | None) -> nn.Module:
        if self.converted:
            assert convert is not None
            model = convert(model)
        if self.checkpoint:
            checkpoint_blocks(model)
        return model

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype of autocast; bytes are the same in bfloat16."""
        return torch.float16 if self.amp else None

    @classmethod
    def parse(cls, label: str) -> "Strategy":
        """The strategy of a label such as "eager", "fusedseg+amp" or "fusedseg-compile+bits=4".

        Raises:
            ValueError: the label has an unknown word, or a word twice.
        """
        first, *more = words = label.split("+")
        options = dict(word.partition("=")[::2] for word in more)
        if first == COMPILED and set(options) <= set(OPTIONS):
            return cls(compiled=True, **{name: OPTIONS[name](text) for name, text in options.items()})
        known = (FUSED, AMP, CHECKPOINT)
        if words != [EAGER] and (not set(words) <= set(known) or len(set(words)) < len(words)):
            raise ValueError(
                f"expected {EAGER}, or {', '.join(known)} joined by +, or {COMPILED} with {' or '.join(OPTIONS)}, got "
                f"{label!r}"
            )
        return cls(FUSED in words, AMP in words, CHECKPOINT in words)


def _number_or_text(text: str) -> float | str:
    """A budget: a share such as 0.3, or a text such as 6GiB."""
    try:
        return float(text)
    except ValueError:
        return text


# The options of the backend in a label, and what reads their values.
OPTIONS: dict[str, Callable[[str], Any]] = {"budget": _number_or_text, "bits": int}


def option_text(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def combinations(with_converted: bool, amps: Sequence[bool]) -> list[Strategy]:
    converted = (False, True) if with_converted else (False,)
    return [Strategy(*used) for used in product(converted, amps, (False, True))]
