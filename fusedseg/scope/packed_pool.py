"""What a pool saves in a recompute scope with ``bits``: its codes, in as few bits as number the positions of a window.

The output is rebuilt by these codes from the rounded input.  The maximum of rounded values would be too large on
average, and might lie elsewhere.
"""

from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from .. import _torch
from ..ops.low_bit.spec import is_dense
from ..ops.max_pool.op import PoolCall, pick
from . import recipes
from .packed import PackingRegistry
from .plain import Place
from .saved import OFF, Handle, Recipe


def squeeze(codes: Tensor, bits: int) -> Tensor:
    """The codes of a dense tensor, ``8 // bits`` adjacent ones a byte, as a vector."""
    per = 8 // bits
    flat = codes.as_strided((codes.numel(),), (1,))
    if flat.numel() % per:
        flat = torch.nn.functional.pad(flat, (0, per - flat.numel() % per))
    of_byte = flat.view(-1, per)
    found = of_byte[:, 0].clone()
    for j in range(1, per):
        found |= of_byte[:, j] << bits * j
    return found


def stretch(squeezed: Tensor, size: tuple[int, ...], stride: tuple[int, ...], bits: int) -> Tensor:
    """The reverse of ``squeeze``."""
    per = 8 // bits
    of_byte = squeezed.new_empty((squeezed.numel(), per))
    for j in range(per):
        torch.bitwise_and(squeezed >> bits * j, (1 << bits) - 1, out=of_byte[:, j])
    return of_byte.as_strided(size, stride)


def max_pool(registry: PackingRegistry, call: PoolCall) -> Tensor:
    """Makes a call of the pool, and offers its output as that of ``pick`` with the codes."""
    x, pool = call
    positions = prod(pool.kernel)
    bits = next(bits for bits in (2, 4, 8) if positions <= 1 << bits)
    saved: list[Any] = []

    def codes(t: Tensor) -> Handle | None:
        if saved or t.dtype != torch.uint8 or not is_dense(t.shape, t.stride()):
            return None
        at = Place.of(t)
        if bits == 8:
            saved.append(registry.keep(t))
            return saved[0]
        few = squeeze(t, bits)
        data, rebuild = registry.keep(few), partial(stretch, size=at.size, stride=at.stride, bits=bits)
        saved.append(Recipe(at, t.device, rebuild, None, OFF, [(data, Place.of(few))]))
        return Handle(saved[0], at)

    with recipes.claimed(registry, codes):
        z = call.run()
    if saved:
        rows = z.grad_fn.rows  # type: ignore[union-attr]
        with _torch.DisableTorchFunction():
            registry.offer(z, lambda x, codes: pick(x, codes, rows, pool), [x, saved[0]])
    return z
