"""The rules of a scope with ``bits`` for the ops of this package."""

from collections.abc import Mapping

from torch import Tensor

from .. import _torch
from ..ops.conv.cat import CatCall
from ..ops.conv.join_conv import ConvCall
from ..ops.conv.sources import concatenated, enlarges_of
from ..ops.max_pool.op import PoolCall
from ..ops.norm.eager import NormCall
from ..ops.observer import OpCall
from .joins import note_sources
from .packed import OpRule, PackingRegistry
from .packed_norm import norm
from .packed_pool import max_pool
from .parts import JoinedSources
from .plain import plain


def _convolution(registry: PackingRegistry, call: ConvCall) -> Tensor:
    """The sources are packed, but not a computed weight."""
    with registry.linear(spared=call.weight):
        return call.run()


def _cat(registry: PackingRegistry, call: CatCall) -> Tensor:
    sources, inputs = call.sources, call.inputs
    if not all(map(plain, inputs)):
        return concatenated(sources)
    with _torch.DisableTorchFunction(), registry.linear():
        out = call.run()
        registry.offer(out, JoinedSources(enlarges_of(sources)), inputs)
        if registry.converted:
            note_sources(out, sources)
    return out


OPS: Mapping[type[OpCall], OpRule] = {NormCall: norm, PoolCall: max_pool, ConvCall: _convolution, CatCall: _cat}
