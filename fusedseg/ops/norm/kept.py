"""Kept channels: the channels whose xhat cannot be rebuilt from the output to working accuracy.

A channel is kept where the rounding of z moves xhat = (phi^-1(z) - bias) / weight too far:

    max(|bias|, expm1(weight^2 - bias) for elu and selu) > kappa |weight|

"Any weight must train right" in docs/design.md derives this rule and its consequences for the gradients.  A weight of
0, or one so small that the output falls below the normal range of the dtype, is within this rule too.  The xhat of kept
channels is stored in a side buffer, so memory grows by these channels only.  The list of kept channels depends on the
parameters alone.
"""

import bisect
import functools
import math
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..._torch import FakeTensor, current_graph_task_id, unset_fake_temporarily
from ...activation import TABLE, Activation
from ..check import wide_dtype

# The largest error of xhat, in units of the dtype's rounding, about which a channel need not be kept: that is 2**-5,
# 2**-8, 2**-18 and 2**-41.
KAPPA = {torch.bfloat16: 8.0, torch.float16: 8.0, torch.float32: 64.0, torch.float64: 4096.0}
# Smaller weights than this have no 1 / weight that leaves room for a sum.  kernels/norm_act_bwd.py has this number too.
LEAST = 2.0**-112


def recomputing() -> bool:
    """Whether a backward pass runs in this thread.

    A forward inside a backward pass is the second forward of ``torch.utils.checkpoint``.  The first one has moved the
    running statistics already.  Under ``torch.compile`` the answer is False, because the compiler decides there what is
    computed twice.
    """
    return not torch.compiler.is_compiling() and current_graph_task_id() != -1


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


@functools.cache
def floor_of(act: Activation, dtype: torch.dtype, residual: bool) -> float:
    """A channel with a smaller bias is judged as if its bias were this: outputs stay normal numbers after the slope."""
    inverse = TABLE[act.name].inverse
    assert inverse is not None, act
    return 1.0 if residual else max(torch.finfo(dtype).tiny / inverse.slope(act.param), LEAST * KAPPA[dtype])


def tail_of(act: Activation, residual: bool) -> float | None:
    """The variance that a residual of size 1 adds to y, if the activation saturates; None for all other activations."""
    inverse = TABLE[act.name].inverse
    assert inverse is not None, act
    return float(residual) if inverse.saturates else None


def exceeds(
    weight: Tensor, bias: Tensor, floor: Tensor | float, kappa: Tensor | float, tail: Tensor | float | None
) -> Tensor:
    """The rule of the kept channels.  The ``tail`` of an activation that does not saturate is None or -inf."""
    size = bias.abs().clamp_(min=floor)
    if tail is not None:
        size = torch.maximum(size, weight.square().sub_(bias).add_(tail).expm1_())
    return size > weight.abs().mul_(kappa)


def kept_mask(weight: Tensor, bias: Tensor, act: Activation, dtype: torch.dtype, residual: bool = False) -> Tensor:
    """True for the channels to keep: (C,) bool on the parameters' device.

    ``residual``: a residual is added to the output and subtracted again, so it affects the rounding as a bias does.
    Its size is assumed to be 1, the size of normalised values.  If the residual is many times larger, channels whose
    weight is just above 1 / KAPPA lose accuracy by the same factor.
    """
    wide = wide_dtype(weight.dtype)
    floor, tail = floor_of(act, dtype, residual), tail_of(act, residual)
    return exceeds(weight.detach().to(wide), bias.detach().to(wide), floor, KAPPA[dtype], tail)


def finite_inverse(weight: Tensor, bias: Tensor, dtype: torch.dtype, residual: bool) -> Tensor:
    """1 / weight; 1 where rounding y takes all of xhat, so that xhat counts as about 0.

    Such channels are kept.  Only a list that is older than the parameters may lack them: parameters may change through
    ``.data``, which no version counts.
    """
    eps = torch.finfo(dtype).eps
    lost = weight.abs() < bias.abs().clamp_(min=1.0 if residual else LEAST / eps).mul_(eps)
    return weight.masked_fill(lost, 1.0).reciprocal_()


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
    # There is one wait for the device, and a second copy only if there are kept channels.
    on_cpu = mask.cpu()
    return Kept(slots_of(mask), int(on_cpu.sum()), on_cpu) if on_cpu.any() else None


_optimizer_steps = 0
# Modules that compiled code reads kept channels from, by their ``refresh_kept()``.
_modules: "weakref.WeakSet[Any]" = weakref.WeakSet()
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
            module.refresh_kept()


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


_trackers: "weakref.WeakSet[KeptChannels]" = weakref.WeakSet()
Kind = tuple[Activation, torch.dtype, bool]


class Arriving:
    """The masks of many modules on their way to the host, one after the other in one tensor."""

    def __init__(self, mask: Tensor) -> None:
        host = torch.empty(mask.shape, dtype=torch.bool, device="cpu", pin_memory=True)
        self.on_cpu = host.copy_(mask, non_blocking=True)
        self.event = torch.cuda.Event()
        self.event.record(torch.cuda.current_stream(mask.device))

    @functools.cached_property
    def mask(self) -> Tensor:
        return self.on_cpu.clone()

    def here(self) -> bool:
        return "mask" in vars(self) or bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()

    @functools.cached_property
    def empty(self) -> bool:
        return not self.mask.any()

    def of(self, part: slice) -> Tensor | None:
        """The mask of one module; None stands for all False."""
        return None if self.empty or not self.mask[part].any() else self.mask[part]


@functools.lru_cache(16)
def limits_of(kinds: tuple[tuple[Kind, int], ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
    """``floor``, ``kappa`` and ``tail`` of ``exceeds`` for each channel of several modules.

    ``kinds`` has the channels of each module.
    """
    floors = [floor_of(*kind) for kind, channels in kinds for _ in range(channels)]
    kappas = [KAPPA[kind[1]] for kind, channels in kinds for _ in range(channels)]
    tails = [tail_of(kind[0], kind[2]) for kind, channels in kinds for _ in range(channels)]
    saturates = any(tail is not None for tail in tails)
    return (
        torch.tensor(floors, device=device),
        torch.tensor(kappas, device=device),
        torch.tensor([-math.inf if v is None else v for v in tails], device=device) if saturates else None,
    )


def request(device: torch.device) -> Arriving:
    """Asks for the lists of all modules on a device whose parameters may have changed, in a few device ops.

    Modules whose parameters have no memory now, as FSDP frees it, ask later by themselves.
    """
    changed = [of for of in tuple(_trackers) if of.may_have_changed(device)]
    weights, biases = [of.parameters[0] for of in changed], [of.parameters[1] for of in changed]
    limits = limits_of(tuple((of.kind, len(w)) for of, w in zip(changed, weights, strict=True)), device)
    flat = torch.cat([*weights, *biases])
    weight, bias = flat.to(wide_dtype(flat.dtype)).chunk(2)
    arriving = Arriving(exceeds(weight, bias, *limits))
    first = 0
    for of, w in zip(changed, weights, strict=True):
        of.asked(arriving, slice(first, first + len(w)))
        first += len(w)
    return arriving


class KeptChannels:
    """The kept channels of one module, found without making the host wait for the device.

    On a CPU, every call finds the list.  On a GPU it is found at once at the first call.  After a change of the
    parameters, the first module that runs asks for the lists of all modules.  After an optimizer's step they are copied
    to the host asynchronously, and used when they have arrived, so a list may lag behind the parameters by one step.
    After another change of the parameters' versions, as by an optimizer without PyTorch's hooks, that module waits for
    the copy.  A change through ``.data`` is seen after the next optimizer's step.
    """

    def __init__(self) -> None:
        self.kept: Kept | None = None
        # Detached tensors share memory and versions with the parameters.
        self.parameters: tuple[Tensor, ...] = ()
        self.kind: Any = None
        self._key: tuple | None = None
        self._steps = 0
        self._pending: tuple[Arriving, slice] | None = None
        self._made: tuple[Tensor, Any, Any] | None = None
        _trackers.add(self)

    def __reduce__(self):
        # A copy has parameters of its own, and finds its list again.
        return KeptChannels, ()

    def forget(self) -> None:
        """Forgets the parameters, because they were replaced.  The next call finds the list at once."""
        self._key = self._pending = None
        self.parameters = ()

    def refresh(
        self, weight: Tensor | None, bias: Tensor | None, act: Activation, dtype: torch.dtype, residual: bool = False
    ) -> Kept | None:
        """The kept channels for this forward pass, or None.  ``residual`` says whether a residual is added."""
        first = weight if weight is not None else bias
        if first is None or first.is_meta or isinstance(first, FakeTensor):
            return None
        kind = act, dtype, residual
        if first.is_cuda and torch.cuda.is_current_stream_capturing():
            return self._in_capture(kind)
        other = bias if bias is not None else first
        key, lags = _key_of(kind, first, other), self._may_lag(weight, bias)
        if key != self._key or (first.device.type == "cpu" and not lags):
            known = self._key is not None and self.kind == kind
            self.kind, self.parameters = kind, (first.detach(), other.detach()) if lags else ()
            if lags and known:
                stepped = _optimizer_steps != self._steps
                arriving = request(first.device)
                if not stepped:
                    # No optimizer has made this change, so its list counts at once.
                    arriving.wait()
            else:
                self.kept, self._pending = find(weight, bias, *kind), None
                self._key, self._steps = key, _optimizer_steps
        if self._pending is not None:
            self._take_what_arrived(first.device)
        if self.kept is not None and first.is_cuda:
            self._wait_for_slots(self.kept.slots)
        return self.kept

    def _in_capture(self, kind: Kind) -> Kept | None:
        if self._key is None or self.kind != kind:
            raise RuntimeError(
                "fusedseg: the values of norm weights cannot be read while a CUDA graph is captured; run one "
                "forward pass of the same dtype before the capture, as torch.cuda.make_graphed_callables does"
            )
        return self.kept

    def _take_what_arrived(self, device: torch.device) -> None:
        # A forward pass that is computed again must keep the same channels as the first one.
        assert self._pending is not None
        arrived, part = self._pending
        if not recomputing() and arrived.here():
            self._pending = None
            self._use(arrived.of(part), device)

    def _use(self, mask: Tensor | None, device: torch.device) -> None:
        """Takes a list that has arrived.  An equal list stays, so that nothing is copied to the device."""
        if mask is None:
            self.kept = None
        elif self.kept is None or self.kept.mask is None or not torch.equal(mask, self.kept.mask):
            slots = slots_of(mask)
            slots = slots.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else slots
            self.kept = Kept(slots, int(mask.sum()), mask)

    def _wait_for_slots(self, slots: Tensor) -> None:
        """Lets the current stream use slots that another stream may have made."""
        stream = torch.cuda.current_stream(slots.device)
        if self._made is None or self._made[0] is not slots:
            self._made = slots, stream, stream.record_event()
        elif stream != self._made[1]:
            stream.wait_event(self._made[2])
            slots.record_stream(stream)

    @staticmethod
    def _may_lag(weight: Tensor | None, bias: Tensor | None) -> bool:
        if weight is None or bias is None or not weight.is_cuda:
            return False
        _watch_optimizers()
        return True

    def may_have_changed(self, device: torch.device) -> bool:
        if not self.parameters or self.parameters[0].device != device:
            return False
        here = all(t.untyped_storage().nbytes() for t in self.parameters)
        return here and _key_of(self.kind, *self.parameters) != self._key

    def asked(self, arriving: Arriving, part: slice) -> None:
        """Notes that the list for the present parameters is on its way."""
        self._pending = arriving, part
        self._key, self._steps = _key_of(self.kind, *self.parameters), _optimizer_steps


def _key_of(kind: Kind, weight: Tensor, bias: Tensor) -> tuple:
    # Some optimizers step on ``.data``, which no version counts.
    return kind, weight.data_ptr(), weight._version, bias.data_ptr(), bias._version, _optimizer_steps
