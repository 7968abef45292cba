"""Kept channels: the channels whose xhat cannot be rebuilt from the output to working accuracy.

Rebuilding xhat = (y - bias) / weight has a relative error of u |bias / weight|, where u is the rounding of the dtype.
It loses everything if weight is 0, or so small that the output falls below the normal range of the dtype.  The xhat of
such channels is stored in a side buffer, so memory grows by these channels only.  The list of kept channels depends on
the parameters alone.
"""

import bisect
import functools
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..._torch import FakeTensor, unset_fake_temporarily
from ...activation import TABLE, Activation
from ..recompute.saved import recomputing

# A channel is kept if |bias| > KAPPA |weight|.  In the other channels, u |bias / weight| stays below 2**-6, 2**-9,
# 2**-18 and 2**-41.
KAPPA = {torch.bfloat16: 8.0, torch.float16: 8.0, torch.float32: 64.0, torch.float64: 4096.0}
# Smaller weights than this have no 1 / weight that leaves room for a sum.  kernels/norm_act_bwd.py has this number too.
LEAST = 2.0**-112


@dataclass(frozen=True, eq=False)
class Kept:
    """The kept channels of one call.

    ``slots``, (C,) int32 on the parameters' device, is the place of a kept channel in the side buffer, and -1 for all
    other channels.  ``count`` is the number of kept channels.  ``mask``, (C,) bool on the CPU, is True for kept
    channels; if it is None, it is read from ``slots``.
    """

    slots: Tensor
    count: int
    mask: Tensor | None = None

    @functools.cached_property
    def index(self) -> Tensor:
        """The numbers of the kept channels in ascending order, int64, on the CPU."""
        mask = self.slots.cpu() >= 0 if self.mask is None else self.mask
        return mask.nonzero().squeeze(1)

    def within(self, c: slice) -> tuple[Tensor, slice]:
        """The kept channels of a range of channels, counted from the start of the range, and their slots."""
        channels = self.index.tolist()
        start = c.start or 0
        stop = len(self.slots) if c.stop is None else c.stop
        slots = slice(bisect.bisect_left(channels, start), bisect.bisect_left(channels, stop))
        return self.index[slots] - start, slots


def kept_mask(
    weight: Tensor, bias: Tensor, act: Activation, dtype: torch.dtype, residual: bool = False
) -> Tensor | None:
    """True for the channels to keep: (C,) bool on the parameters' device.  On a CPU, None stands for all False.

    ``residual``: a residual is added to the output and subtracted again, so it affects the rounding as a bias does.
    Its size is assumed to be 1, the size of normalised values.  If the residual is many times larger, channels whose
    weight is just above 1 / KAPPA lose accuracy by the same factor.
    """
    # This is the smallest weight whose outputs stay normal numbers after the multiplication by the slope.
    inverse = TABLE[act.name].inverse
    assert inverse is not None, act
    slope = inverse.slope(act.param)
    floor = 1.0 if residual else max(torch.finfo(dtype).tiny / slope, LEAST * KAPPA[dtype])
    if weight.device.type == "cpu" and weight.dtype == bias.dtype and weight.dtype in (torch.float32, torch.float64):
        # These are few values in every step, and numpy's calls cost a tenth of aten's.  DLPack is used because
        # Tensor.numpy() would forbid resizing the storage, which FSDP does.
        w, b = np.from_dlpack(weight.detach()), np.from_dlpack(bias.detach())
        mask = np.maximum(np.abs(b), floor) > np.abs(w) * KAPPA[dtype]
        return torch.from_numpy(mask) if mask.any() else None
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    return bias.detach().to(wide).abs().clamp(min=floor) > weight.detach().to(wide).abs() * KAPPA[dtype]


def finite_inverse(weight: Tensor, bias: Tensor, dtype: torch.dtype, residual: bool) -> tuple[Tensor, Tensor]:
    """1 / weight and weight ** 2; 1 and weight where rounding y takes all of xhat, so that xhat counts as about 0.

    Such channels are kept.  Only a list that is older than the parameters may lack them: parameters may change through
    ``.data``, which no version counts.
    """
    eps = torch.finfo(dtype).eps
    lost = weight.abs() < bias.abs().clamp_(min=1.0 if residual else LEAST / eps).mul_(eps)
    return weight.masked_fill(lost, 1.0).reciprocal_(), torch.where(lost, weight, weight.square())


def slots_of(mask: Tensor) -> Tensor:
    return torch.where(mask, mask.cumsum(0) - 1, -1).int()


def find(
    weight: Tensor | None, bias: Tensor | None, act: Activation, dtype: torch.dtype, residual: bool = False
) -> Kept | None:
    """The kept channels for the present values of the parameters, or None if there are none.

    It returns None for parameters without values (meta, fake).  For parameters on a GPU it waits for the device.
    """
    if weight is None and bias is None:
        return None
    weight = torch.ones_like(bias) if weight is None else weight  # type: ignore[arg-type]
    bias = torch.zeros_like(weight) if bias is None else bias
    if weight.is_meta or isinstance(weight, FakeTensor):
        return None
    mask = kept_mask(weight, bias, act, dtype, residual)
    if mask is None or not mask.any():
        return None
    on_cpu = mask.cpu()
    return Kept(slots_of(mask), int(on_cpu.sum()), on_cpu)


_optimizer_steps = 0
_modules: weakref.WeakSet = weakref.WeakSet()
_compiled = False


@functools.cache
def _watch_optimizers() -> None:
    def after_step(optimizer, args, kwargs):
        global _optimizer_steps
        _optimizer_steps += 1
        if _compiled:
            refresh_modules()

    register_optimizer_step_post_hook(after_step)


def refresh_modules() -> None:
    # An optimizer may step on fake tensors.  The modules of this loop may have real parameters, which must be read.
    with unset_fake_temporarily():
        for module in tuple(_modules):
            # A module that has become a stock module again has no list.
            if isinstance(module, Refreshed):
                module.refresh_kept()


class Refreshed:
    """The base class of modules that compiled code reads kept channels from."""

    def refresh_kept(self) -> None:
        raise NotImplementedError


def watch(module) -> None:
    """Registers a module, so that its ``refresh_kept()`` is called for compiled code."""
    _modules.add(module)


def serve_compiled_code() -> None:
    """Refreshes the lists of all modules after every optimizer step from now on.

    Compiled code cannot read the parameters' values to find the list by itself.
    """
    global _compiled
    if not _compiled:
        _compiled = True
        _watch_optimizers()
        refresh_modules()


class KeptChannels:
    """The kept channels of one module, found without making the host wait for the device.

    On a CPU, every call finds the list.  On a GPU it is found at once at the first call, and after a change of the
    parameters' versions that is not an optimizer's step.  After an optimizer's step, a GPU's list is copied to the host
    asynchronously, and used when it has arrived, so it may lag behind the parameters by one step.  A change through
    ``.data`` is seen after the next optimizer's step.
    """

    def __init__(self) -> None:
        self.kept: Kept | None = None
        self._key: tuple | None = None
        self._steps = 0
        self._pending: tuple[Tensor, Tensor, Any] | None = None

    def __reduce__(self):
        # A copy has parameters of its own, and finds its list again.
        return KeptChannels, ()

    def forget(self) -> None:
        """Forgets the parameters, because they were replaced.  The next call finds the list at once."""
        self._key = self._pending = None

    def refresh(
        self, weight: Tensor | None, bias: Tensor | None, act: Activation, dtype: torch.dtype, residual: bool = False
    ) -> Kept | None:
        """The kept channels for this forward pass, or None.  ``residual`` says whether a residual is added."""
        first = weight if weight is not None else bias
        if first is None or first.is_meta or isinstance(first, FakeTensor):
            return None
        if first.is_cuda and torch.cuda.is_current_stream_capturing():
            return self.kept
        other = bias if bias is not None else first
        kind = (act, dtype, residual)
        # Some optimizers step on ``.data``, which no version counts.
        key = (kind, first.data_ptr(), first._version, other.data_ptr(), other._version, _optimizer_steps)
        lags = self._may_lag(weight, bias)
        if key != self._key or (first.device.type == "cpu" and not lags):
            known = self._key is not None and self._key[0] == kind
            if lags and known and _optimizer_steps != self._steps:
                self._request(weight, bias, *kind)
            else:
                self.kept, self._pending = find(weight, bias, *kind), None
            self._key, self._steps = key, _optimizer_steps
        # A forward pass that is computed again must keep the same channels as the first one.
        if self._pending is not None and not recomputing() and self._pending[2].query():
            slots, mask, _ = self._pending
            count = int(mask.sum())
            self.kept, self._pending = (Kept(slots, count, mask) if count else None), None
        return self.kept

    @staticmethod
    def _may_lag(weight: Tensor | None, bias: Tensor | None) -> bool:
        if weight is None or bias is None or not weight.is_cuda:
            return False
        _watch_optimizers()
        return True

    def _request(self, weight, bias, act: Activation, dtype: torch.dtype, residual: bool) -> None:
        mask = kept_mask(weight, bias, act, dtype, residual)
        assert mask is not None
        on_cpu = torch.empty(mask.shape, dtype=torch.bool, pin_memory=True)
        on_cpu.copy_(mask, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self._pending = (slots_of(mask), on_cpu, arrived)
