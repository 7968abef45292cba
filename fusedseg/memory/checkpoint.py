"""``checkpoint_blocks``: PyTorch's checkpoints around the blocks of a model."""

from functools import partial

from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.utils.checkpoint import checkpoint


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
        raise ValueError(
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
