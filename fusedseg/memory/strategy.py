"""Ways to run a step in less memory, and their combinations: another model, autocast, checkpoints."""

from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.utils.checkpoint import checkpoint

EAGER, AMP, CHECKPOINT = "eager", "amp", "checkpoint"
# called with a model that nobody else uses; returns it converted, or another
Convert = Callable[[nn.Module], nn.Module]
# called with a block's forward, returns what runs in its place
Within = Callable[[Callable[..., Any]], Callable[..., Any]]


class NoBlocks(ValueError):
    """The model has no block to checkpoint."""


def checkpoint_blocks(model: nn.Module, limit: int = 4, *, within: Within | None = None) -> list[str]:
    """Checkpoints the model's blocks, in place: each keeps its inputs alone, and runs a second time in backward.

    A block is a module with children and at least one convolution or linear layer, but at most ``limit``, that lies in
    no other such module.  Returns the blocks' names, and leaves ``forward`` of each wrapped in
    ``torch.utils.checkpoint.checkpoint`` (``use_reentrant=False``).  A stock BatchNorm in a block takes its running
    statistics from the batch twice, a known flaw of checkpoints.

    Args:
        model: any module.
        limit: of a block's convolutions and linear layers.
        within: decorates each block's forward, inside its checkpoint.  A scope around a checkpoint does not reach what
            a block saves when it runs again: ``fusedseg.recompute()`` here does, and takes its time twice.

    Raises:
        ValueError: a limit below 1; a model without such blocks, such as a flat ``nn.Sequential`` of many convolutions.
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
        forward = block.forward if within is None else within(block.forward)
        block.forward = partial(checkpoint, forward, use_reentrant=False)
    return [name for name, _ in blocks]


def _blocks(module: nn.Module, name: str, limit: int) -> list[tuple[str, nn.Module]]:
    weights = sum(isinstance(part, (_ConvNd, nn.Linear)) for part in module.modules())
    # lists are not called; the model as a whole is no block
    called = bool(name) and not isinstance(module, (nn.ModuleList, nn.ModuleDict))
    if called and 1 <= weights <= limit and next(module.children(), None) is not None:
        return [(name, module)]
    found = []
    for child, part in module.named_children():
        found += _blocks(part, f"{name}.{child}" if name else child, limit)
    return found


@dataclass(frozen=True)
class Strategy:
    """converted: by the caller's function.  amp: autocast.  checkpoint: ``checkpoint_blocks``."""

    converted: bool = False
    amp: bool = False
    checkpoint: bool = False

    def label(self, converted: str) -> str:
        parts = [(self.converted, converted), (self.amp, AMP), (self.checkpoint, CHECKPOINT)]
        return "+".join(name for used, name in parts if used) or EAGER

    @property
    def measures(self) -> int:
        return self.converted + self.amp + self.checkpoint

    def is_part_of(self, other: "Strategy") -> bool:
        """Whether the other one takes all of these measures and more."""
        each = zip(astuple(self), astuple(other), strict=True)
        return self != other and all(theirs or not mine for mine, theirs in each)

    def prepare(self, model: nn.Module, convert: Convert | None) -> nn.Module:
        if self.converted:
            if convert is None:
                raise ValueError("fusedseg.memory: a converted model was asked for without a function that converts")
            model = convert(model)
        if self.checkpoint:
            checkpoint_blocks(model)
        return model

    def autocast(self, dtype: torch.dtype) -> torch.dtype | None:
        return dtype if self.amp else None

    @classmethod
    def parse(cls, label: str, converted: str) -> "Strategy":
        """From a label such as "eager" or "fusedseg+amp".

        Raises:
            ValueError: another word, or one twice.
        """
        words = label.split("+")
        known = (converted, AMP, CHECKPOINT)
        if words != [EAGER] and (not set(words) <= set(known) or len(set(words)) < len(words)):
            raise ValueError(f"expected {EAGER}, or {', '.join(known)} joined by +, got {label!r}")
        return cls(converted in words, AMP in words, CHECKPOINT in words)


def combinations(with_converted: bool) -> list[Strategy]:
    converted = (False, True) if with_converted else (False,)
    return [Strategy(*used) for used in product(converted, (False, True), (False, True))]
