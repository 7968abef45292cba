"""What the norm op saves in a recompute scope with ``bits``: its output, or its input with the kink of the norm.

An activation that is linear on each side of 0 needs the exact sign of its argument and nothing else, so any number of
bits leaves the gradient right on average.  For others, which bend smoothly, at least 8 bits are kept.  Nothing is
rounded for the rest: derivatives that jump away from 0, inverses that are not linear, and the sign of a sum.

On Triton, the kernels of the norm write the codes and read them (``coded.py``); elsewhere, the scope packs what is
saved.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from .. import _torch
from ..activation import TABLE
from ..ops.low_bit.kink import kink_of, of_channels
from ..ops.low_bit.spec import SMOOTH_BITS
from ..ops.norm import coded
from ..ops.norm.eager import NormCall
from ..ops.norm.spec import Passed, Saved, Spec
from .codes import CodesHandle
from .packed import UNKNOWN, PackedData, PackingRegistry, Reading
from .packing import after_norm
from .recipes import claimed
from .saved import EXACT

# Activations that are linear on each side of 0; SMOOTH ones are smooth everywhere, CURVED ones on each side of 0.
PIECEWISE_LINEAR = ("leaky_relu", "relu", "prelu", "identity")
SMOOTH, CURVED = ("silu", "gelu", "gelu_tanh", "mish", "softplus"), ("elu", "selu")


def norm(registry: PackingRegistry, call: NormCall) -> Tensor:
    """Makes a call of the norm op, and offers its output."""
    z = _recorded(registry, call)
    if call.inputs:
        registry.offer_of(call, z, call.inputs)
    return z


def _recorded(registry: PackingRegistry, call: NormCall) -> Tensor:
    passed, _, spec, _, done, for_others, _ = call
    x = passed.x
    bits, name = registry.rounding.bits, spec.act.name
    bends, linear, of_input = not TABLE[name].identity, name in PIECEWISE_LINEAR, spec.keep == "input"
    registry.settle()
    # The sign of a sum of two rounded tensors is not exact.
    if of_input and passed.residual is not None and bends and name not in SMOOTH:
        return _as_it_is(registry, call)
    if not linear:
        # Where ELU is flat, its inverse enlarges the rounding.
        if not of_input or name not in (*SMOOTH, *CURVED):
            return _as_it_is(registry, call)
        bits = max(bits, SMOOTH_BITS)
    defers = of_input and passed.residual is None
    needs = EXACT if defers and bends else 0 if linear else SMOOTH_BITS
    with registry.allowing(Reading(needs, bits, own=True, defers=defers, sides=defers and bends)):
        copy = None
        # If a function that bends may follow, it is not known yet how x is packed.
        if done is None and (bends or not defers) and coded.may_write(x, spec):
            with _torch.DisableTorchFunction():
                if registry.packs_anew(x, overwritten=spec.keep == "output"):
                    copy = coded.Copy(bits, registry.next_key, defers)
        with nullcontext() if copy is None else claimed(registry, _Claim(registry, copy)):
            z = call._replace(copy=copy).run()
    if not registry.pending:
        return z
    found: Saved | None = for_others[0] if for_others else None

    def kink() -> Tensor | None:
        return None if found is None else _kink(found, passed, spec)

    with _torch.DisableTorchFunction():
        if bends:
            pending, registry.pending = registry.pending, []
            for data in pending:
                data.settle(bits, kink())
        else:
            # A function that bends may follow.
            after_norm(registry, z, kink)
    return z


def _as_it_is(registry: PackingRegistry, call: NormCall) -> Tensor:
    with registry.allowing(UNKNOWN):
        return call.run()


class _Claim:
    """Saves the written copy in place of the tensor that it stands for."""

    made: PackedData | None = None

    def __init__(self, registry: PackingRegistry, copy: coded.Copy) -> None:
        self.registry, self.copy = registry, copy

    def __call__(self, t: Tensor) -> Any:
        packed, source = self.copy.packed, self.copy.source
        if packed is None or source is None or t.untyped_storage() is not source.untyped_storage():
            return None
        if self.made is not None:
            # The residual may be the input too.
            return self.made
        self.made = self.registry.keep_packed(t, packed)
        return CodesHandle(self.made) if self.copy.is_read else self.made


def _kink(saved: Saved, passed: Passed, spec: Spec) -> Tensor | None:
    if saved.mean is None:
        return None
    mean, shape = saved.mean, passed.x.shape
    rstd = torch.rsqrt(saved.second + spec.eps) if spec.keeps_variance else saved.second
    if spec.kind == "group":
        mean, rstd = of_channels(mean, shape), of_channels(rstd, shape)
    return kink_of(mean, rstd, passed.weight, passed.bias, shape)
