"""Kernels at the sizes of a program: the first call of each kind is compared with PyTorch's ops, on a GPU.

The self-test (``self_test/``) runs each family of kernels once, on small tensors.  A program's tensors have other
sizes, for which Triton compiles other code, and programs share the work in other ways.  So at the first call of a kind,
which is an op with its options, sizes, strides and dtypes, PyTorch's ops compute the results once more.  If a result
differs by more than rounding can explain, this call returns the right result, the family runs on PyTorch's ops from
then on, and a warning says so.

A family declares a ``Check`` for each of its launching functions, which ``checked`` wraps.  In all later calls of a
kind the wrapper looks its key up in a set, and does no more.  A replay (``replay.py``) does not call the function.

PyTorch's ops compute in float64, some channels at a time, so that their own error does not count and little memory is
needed.  Each value has a bound of its own.  It follows from what a kernel does:

* Kernels compute in fp32 at least.  An operation has a relative error of at most ``U``; constants such as eps and the
  slope of an activation are fp32 in every kernel.
* A sum of n terms that is made in blocks has an error of at most ``growth(n)`` times the sum of the terms' absolute
  values.  A chain of k additions gives k U.  The lanes of a program add side by side, so that a chain of a kernel has
  fewer than 4 sqrt(n) additions for fewer than 16 million terms.  Above that number the chain grows faster, but
  roundings of both signs cancel: k of them make 6 sqrt(k) U with a probability of 1 - 3e-8 (Higham and Mary, "A new
  approach to probabilistic rounding error analysis", SIAM J. Sci. Comput. 2019), which is less.
* A result is rounded to its dtype once, ``rounding``.  Numbers below the normal range may become 0.
* An error of an argument of a function with a kink, or with a jump, counts as the largest change of the function
  within the error.

A value that overflows, and a value whose bound is not finite, says nothing.  A kind of which some values said nothing
is compared again, in ``MOST_TRIES`` calls at most: the first gradients of ``GradScaler`` overflow.
"""

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .. import _backend, _torch

# The rounding of an operation in fp32, and the smallest normal number of fp32.
U, TINY = 2.0**-24, 2.0**-126
# Elements that are compared at once.
PART = 2**22
# The bytes that the comparison of an element takes: about a dozen tensors in float64.
BYTES = 96
MOST_TRIES = 4
# Sizes that change with every call are not compared for ever.
MOST_KINDS = 128

Found = TypeVar("Found")


class Compared(NamedTuple):
    """A part of a result, and the same part in float64 with its bounds.

    close: which values are within their bounds, or say nothing.
    says: which values say something.
    """

    name: str
    found: Tensor
    exact: Tensor
    close: Tensor
    says: Tensor


class Check(NamedTuple):
    """How the calls of a function that launches kernels are compared.

    family: the family of kernels, as in ``_backend.use_triton``.
    x: the tensor of a call whose device and dtype count.
    kind: what a call has in common with those for which it stands.
    results: (what the function returned, the arguments, the arguments of ``before``) -> the parts of the results.
    before: the arguments with copies of what the kernels write over.
    seen, tries: the kinds that need no more comparison, and the number of calls that said nothing.
    """

    family: str
    x: Callable[..., Tensor]
    kind: Callable[..., Hashable]
    results: Callable[[Any, tuple[Any, ...], tuple[Any, ...]], Iterator[Compared]]
    before: Callable[..., tuple[Any, ...]]
    seen: set[Hashable]
    tries: Counter[Hashable]


_checks: list[Check] = []
# What has been compared, and what could not be.
report: Counter[str] = Counter()


def untouched(*call: Any) -> tuple[Any, ...]:
    """The arguments of kernels that write over none of them."""
    return call


def checked(
    family: str,
    x: Callable[..., Tensor],
    kind: Callable[..., Hashable],
    results: Callable[[Any, tuple[Any, ...], tuple[Any, ...]], Iterator[Compared]],
    before: Callable[..., tuple[Any, ...]] = untouched,
) -> Callable[[Callable[..., Found]], Callable[..., Found]]:
    """Decorates a function that launches kernels.  The arguments are those of ``Check``."""
    check = Check(family, x, kind, results, before, set(), Counter())
    _checks.append(check)
    seen = check.seen

    def decorate(kernels: Callable[..., Found]) -> Callable[..., Found]:
        @functools.wraps(kernels)
        def run(*call: Any) -> Found:
            key = kind(*call)
            return kernels(*call) if key in seen else _first(check, key, kernels, call)

        return run

    return decorate


def forget() -> None:
    """Forgets what has been compared."""
    for check in _checks:
        check.seen.clear()
        check.tries.clear()


_backend.at_forget(forget)


def _first(check: Check, key: Hashable, kernels: Callable[..., Found], call: tuple[Any, ...]) -> Found:
    """Calls the kernels for the first time, and compares their results if that can be done now."""
    x = check.x(*call)
    # Launches are listed on fake tensors.
    if type(x) not in (Tensor, torch.nn.Parameter) or torch.compiler.is_compiling():
        return kernels(*call)
    if not _backend.is_tested(x.device):
        check.seen.add(key)
        return kernels(*call)
    if len(check.seen) >= MOST_KINDS or _is_captured(x):
        return kernels(*call)
    check.tries[key] += 1
    if check.tries[key] >= MOST_TRIES:
        check.seen.add(key)
    if not _has_room(x):
        report["no room"] += 1
        return kernels(*call)
    before = _guarded(check, x, lambda: check.before(*call))
    found = kernels(*call)
    if before is None:
        return found

    def judged() -> tuple[bool, str]:
        says, wrong = _judged(check.results(found, call, before))
        if wrong:
            for part in check.results(found, call, before):
                part.found.copy_(part.exact)
        return says, wrong

    verdict = _guarded(check, x, judged)
    if verdict is None:
        return found
    says, wrong = verdict
    report["compared" if says or wrong else "not finite"] += 1
    if says or wrong:
        check.seen.add(key)
    if wrong:
        # A dispatch mode sees an op here, so that no replay is made of this call.
        x.new_empty(0).zero_()
        _refuse(check.family, x, wrong)
    return found


def _guarded(check: Check, x: Tensor, compute: Callable[[], Found]) -> Found | None:
    """What ``compute`` returns; None if memory is short, or if PyTorch's ops fail, which must not end a step."""
    try:
        with _unseen(x):
            return compute()
    except torch.OutOfMemoryError:
        report["no room"] += 1
    except Exception as error:
        report["failed"] += 1
        warnings.warn(
            f"fusedseg: its {check.family} kernels could not be compared with PyTorch's ops, and run without that. "
            f"Please report this: {type(error).__name__}: {' '.join(str(error).split())[:300]}",
            RuntimeWarning,
            stacklevel=4,
        )
    return None


def _is_captured(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _has_room(x: Tensor) -> bool:
    """Whether a comparison is sure to fit: a copy of x, and the parts that are compared at once."""
    if not x.is_cuda or x.numel() <= PART // 64:
        return True
    channel = x.numel() // x.shape[1] if x.dim() > 1 else 0
    needed = 2 * x.nbytes + BYTES * max(min(x.numel(), PART), channel)
    free, _ = torch.cuda.mem_get_info(x.device)
    return free + torch.cuda.memory_reserved(x.device) - torch.cuda.memory_allocated(x.device) >= needed


@contextmanager
def _unseen(x: Tensor) -> Iterator[None]:
    """A context for PyTorch's ops that no mode and no autograd sees, and that may wait for the device."""
    forbids = torch.cuda.get_sync_debug_mode() if x.is_cuda else 0
    if forbids:
        torch.cuda.set_sync_debug_mode(0)
    autocast = torch.autocast(x.device.type, enabled=False)
    try:
        with _backend.launching(x), _torch.no_dispatch_modes(), torch.no_grad(), autocast:
            yield
    finally:
        if forbids:
            torch.cuda.set_sync_debug_mode(forbids)


def _judged(parts: Iterator[Compared]) -> tuple[bool, str]:
    """Whether all values said something, and what is wrong, or ""."""
    names, verdicts = [], []
    for name, found, exact, close, says in parts:
        signed = exact.dtype if exact.is_floating_point() else torch.int16
        off = (found.detach().to(signed) - exact).abs_().masked_fill_(close, 0)
        off = torch.where(off.isnan(), torch.inf, off)
        largest = exact.abs().masked_fill_(~says, 0)
        names.append(name)
        verdicts.append(torch.stack([t.double() for t in (says.all(), (~close).sum(), off.amax(), largest.amax())]))
    if not verdicts:
        return True, ""
    # The host waits once.
    rows = torch.stack(verdicts).tolist()
    for name, (_, count, off, largest) in zip(names, rows, strict=True):
        if count:
            return (
                False,
                f"{count:.0f} values of {name} are off by up to {off:.1e}, and the largest one is {largest:.1e}",
            )
    return all(row[0] for row in rows), ""


def _refuse(family: str, x: Tensor, wrong: str) -> None:
    name = str(x.dtype).removeprefix("torch.")
    reason = (
        f"its {family} kernels in {name} were wrong for a tensor {tuple(x.shape)} with strides {x.stride()}: {wrong}"
    )
    try:
        _backend.refuse(family, x.dtype, x.device, reason)
    finally:
        warnings.warn(
            f"fusedseg: {reason}. PyTorch's own ops take their place from now on, and in this call too, so results are "
            "right, and training is slower. Please report this, and attach the file that `python -m fusedseg doctor "
            "--gpu --json fusedseg.json` writes. FUSEDSEG_SELF_TEST=0 runs the kernels without this test.",
            RuntimeWarning,
            stacklevel=4,
        )


def growth(n: int) -> float:
    """The error of a sum of n terms beside the sum of their absolute values."""
    return (16 + 4 * n**0.5) * U


def rounding(v: Tensor, dtype: torch.dtype) -> Tensor:
    """What storing v in a dtype may change; infinite where v may overflow."""
    info = torch.finfo(dtype)
    bound = v.abs() * (info.eps / 2) + max(info.tiny * info.eps, TINY)
    return bound.masked_fill_(v.abs() > info.max * (1 - 4 * info.eps), torch.inf)


def near(name: str, found: Tensor, exact: Tensor, bound: Tensor | float) -> Compared:
    """A part whose values may be off by ``bound``.  Shapes may differ from that of ``found``."""
    exact = exact.reshape(found.shape)
    off = (found.detach().to(exact.dtype) - exact).abs_()
    says = exact.isfinite()
    if isinstance(bound, Tensor):
        bound = bound.reshape(found.shape)
        says &= bound.isfinite()
    return Compared(name, found, exact, (off <= bound) | ~says, says)


def channel_ranges(x: Tensor, together: int = 1) -> Iterator[tuple[int, int]]:
    """Ranges of the channels of x with about ``PART`` elements, each a multiple of ``together``."""
    C = x.shape[1]
    step = max(PART // (x.numel() // C) // together, 1) * together
    for a in range(0, C, step):
        yield a, min(a + step, C)


def wide(t: Tensor, a: int, b: int) -> Tensor:
    """A range of channels in float64, (N, channels, positions)."""
    return t.detach()[:, a:b].reshape(t.shape[0], b - a, -1).double()
