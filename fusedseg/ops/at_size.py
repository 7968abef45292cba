"""Kernels at the sizes of a program: the first call of each kind is compared with PyTorch's ops, on a GPU.

The self-test (``self_test/``) runs each family of kernels once, on small tensors.  A program's tensors have other
sizes, for which Triton compiles other code, and programs share the work in other ways.  So at the first call of a kind,
which is an op with its options, sizes, strides and dtypes, PyTorch's ops compute the results once more.  If a result
differs by more than rounding can explain, this call returns the right result, the family runs on PyTorch's ops from
then on, and a warning says so.

``checked`` wraps each function that launches kernels.  In all later calls of a kind the wrapper looks its key up in a
set, and does no more.  A replay (``replay.py``) does not call the function.  A key is ``forms``, all that kernels may
depend on.  Functions of norms, which programs call most often, and of packing, which gets a random number, have keys of
their own.

Triton also compiles other code for an address that is no multiple of 16, as a view may have.  Keys have no addresses,
because reading them takes longer than all else, until a launch tells of such an address.  From then on a call with such
addresses is of a kind of its own.  So one call is not compared: the first one of a process with such an address, if a
call of its kind came before.

PyTorch's ops compute in float64, some channels at a time, so that their own error does not count and little memory is
needed.  Each value has a bound of its own.  ``Rounded`` finds it together with the value, by what a kernel does:

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
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .. import _backend, _torch

# The rounding of an operation in fp32, and the smallest normal number of fp32.
U, TINY = 2.0**-24, 2.0**-126
# In units of U: what an operation rounds in any grouping of sums and products, and such functions as exp and tanh.
STEPS, FUNCTION = 8, 64
# Elements that are compared at once, and the bytes that the comparison of an element takes: two dozen tensors in fp64.
PART, BYTES = 2**21, 192
MOST_TRIES = 4
# Tensors with an address; launches are listed on fake tensors.
REAL = (Tensor, torch.nn.Parameter)
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


_checks: list["checked"] = []
# Whether a launch had an address that is no multiple of 16.
_has_odd = False
# What has been compared, and what could not be.
report: Counter[str] = Counter()


def untouched(*call: Any) -> tuple[Any, ...]:
    """The arguments of kernels that write over none of them."""
    return call


def forms(*call: Any) -> tuple[Hashable, ...]:
    """Shape, strides, dtype and device of each tensor, also in lists and tuples, and the other arguments.

    A record counts as one argument, so it must have no tensors.
    """
    key: list[Hashable] = []
    for one in call:
        if isinstance(one, Tensor):
            key += one.shape, one.stride(), one.dtype, one.get_device()
        elif isinstance(one, list) or type(one) is tuple:
            key += forms(*one)
        else:
            key.append(one)
    return tuple(key)


class checked:
    """Decorates a function that launches kernels, whose calls are compared.

    family: the family of kernels, as in ``_backend.use_triton``.
    results: (what the function returned, the arguments, the arguments of ``before``) -> the parts of the results.
    kind: what a call has in common with those for which it stands.
    before: the arguments with copies of what the kernels write over.
    seen, tries: the kinds that need no more comparison, and the number of calls that were compared.
    """

    def __init__(
        self,
        family: str,
        results: Callable[[Any, tuple[Any, ...], tuple[Any, ...]], Iterator[Compared]],
        kind: Callable[..., Hashable] = forms,
        before: Callable[..., tuple[Any, ...]] = untouched,
    ) -> None:
        self.family, self.results, self.kind, self.before = family, results, kind, before
        self.seen, self.tries = set[Hashable](), Counter[Hashable]()
        _checks.append(self)

    def __call__(self, kernels: Callable[..., Found]) -> Callable[..., Found]:
        kind, seen = self.kind, self.seen

        @functools.wraps(kernels)
        def run(*call: Any) -> Found:
            key = kind(*call)
            if _has_odd:
                key = _with_addresses(key, call)
            return kernels(*call) if key in seen else _first(self, key, kernels, call)

        return run


def _met_odd() -> None:
    global _has_odd
    _has_odd = True


def _with_addresses(key: Hashable, call: tuple[Any, ...]) -> Hashable:
    """The kind of a call, with the addresses modulo 16 if they are not 0."""
    addresses = _addresses(call)
    return (key, *addresses) if any(addresses) else key


def _addresses(arguments: Iterable[Any]) -> list[int]:
    """The addresses modulo 16 of all tensors, also of those in records."""
    found: list[int] = []
    for one in arguments:
        if type(one) in REAL:
            found.append(one.data_ptr() % 16)
        elif isinstance(one, (tuple, list)):
            found += _addresses(one)
    return found


def forget() -> None:
    """Forgets what has been compared."""
    global _has_odd
    _has_odd = False
    for check in _checks:
        check.seen.clear()
        check.tries.clear()


_backend.at_forget(forget)


def _first(check: checked, key: Hashable, kernels: Callable[..., Found], call: tuple[Any, ...]) -> Found:
    """Calls the kernels for the first time, and compares their results if that can be done now."""
    from ..kernels import launcher

    launcher.tell_of_odd = _met_odd
    plain, key = key, _with_addresses(key, call)
    if key is not plain:
        _met_odd()
        if key in check.seen:
            return kernels(*call)
    # The device and the dtype of the first tensor count.
    x = call[0] if isinstance(call[0], Tensor) else call[0][0]
    is_real = type(x) in REAL and not torch.compiler.is_compiling()
    if not is_real or len(check.seen) >= MOST_KINDS or _is_captured(x):
        return kernels(*call)
    check.tries[key] += 1
    if check.tries[key] == MOST_TRIES or not _backend.is_tested(x.device):
        check.seen.add(key)
    if not _backend.is_tested(x.device):
        return kernels(*call)
    before = _tried(check, x, lambda: check.before(*call)) if _has_memory(x) else None
    found = kernels(*call)
    if before is None:
        return found
    wrong = _tried(check, x, lambda: _judged(check, found, call, before))
    if wrong is not None:
        check.seen.add(key)
    if wrong:
        # A dispatch mode sees an op here, so that no replay is made of this call.
        x.new_empty(0).zero_()
        _refuse(check.family, x, wrong)
    return found


def _tried(check: checked, x: Tensor, compute: Callable[[], Found]) -> Found | None:
    """What ``compute`` returns; None if memory is short, or if PyTorch's ops fail, which must not end a step."""
    try:
        with _unseen(x):
            return compute()
    except torch.OutOfMemoryError:
        report["no memory"] += 1
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


def _has_memory(x: Tensor) -> bool:
    """Whether a comparison is sure to fit: a copy of x, a result, and the parts that are compared at once."""
    if not x.is_cuda:
        return True
    needed = 2 * x.nbytes + BYTES * max(min(x.numel(), PART), x.numel() // x.shape[min(1, x.dim() - 1)])
    free = torch.cuda.mem_get_info(x.device)[0] + torch.cuda.memory_reserved(x.device)
    has_memory = free - torch.cuda.memory_allocated(x.device) >= needed
    report["no memory"] += not has_memory
    return has_memory


@contextmanager
def _unseen(x: Tensor) -> Iterator[None]:
    """A context for PyTorch's ops that no mode and no autograd sees, and that may wait for the device."""
    autocast = torch.autocast(x.device.type, enabled=False)
    unseen = _torch.no_dispatch_modes()
    with _backend.may_wait(x.device), _backend.launching(x), unseen, torch.no_grad(), autocast:
        yield


def _judged(check: checked, found: Any, call: tuple[Any, ...], before: tuple[Any, ...]) -> str | None:
    """What is wrong, whose values are replaced, or ""; None if nothing is wrong, and some values say nothing."""
    names, verdicts = [], []
    for name, mine, exact, close, says in check.results(found, call, before):
        signed = exact.dtype if exact.is_floating_point() else torch.int16
        off = (mine.detach().to(signed) - exact).abs_().masked_fill_(close, 0)
        off = torch.where(off.isnan(), torch.inf, off)
        largest = exact.abs().masked_fill_(~says, 0)
        names.append(name)
        verdicts.append(torch.stack([t.double() for t in (says.all(), (~close).sum(), off.amax(), largest.amax())]))
    # The host waits once.
    rows = torch.stack(verdicts).tolist() if verdicts else []
    wrong = [
        f"{count:.0f} values of {name} are off by up to {off:.1e}, and the largest one is {largest:.1e}"
        for name, (_, count, off, largest) in zip(names, rows, strict=True)
        if count
    ]
    if wrong:
        for part in check.results(found, call, before):
            part.found.copy_(part.exact)
    all_say = bool(wrong) or all(row[0] for row in rows)
    report["compared" if all_say else "not finite"] += 1
    return "".join(wrong[:1]) if all_say else None


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


@dataclass(frozen=True)
class Rounded:
    """Values in float64, and how far a kernel's values may be off.  Each operation adds what it may round."""

    exact: Tensor
    bound: Tensor

    def _made(self, exact: Tensor, bound: Tensor, size: Tensor) -> "Rounded":
        return Rounded(exact, bound + STEPS * U * size + TINY)

    def __getitem__(self, at: Any) -> "Rounded":
        return Rounded(self.exact[at], self.bound[at])

    def __add__(self, other: "Rounded") -> "Rounded":
        a, b = self.exact, other.exact
        return self._made(a + b, self.bound + other.bound, a.abs() + b.abs())

    def __sub__(self, other: "Rounded") -> "Rounded":
        return self + Rounded(-other.exact, other.bound)

    def __mul__(self, other: "Rounded") -> "Rounded":
        a, b = self.exact, other.exact
        bound = a.abs() * other.bound + (b.abs() + other.bound) * self.bound
        return self._made(a * b, bound, (a * b).abs())

    def rsqrt(self) -> "Rounded":
        """1 / sqrt(v); nothing is said where the error is more than a quarter of v."""
        exact, share = self.exact.rsqrt(), self.bound / self.exact
        return Rounded(exact, torch.where(share > 0.25, torch.inf, exact * (share + STEPS * U)))

    def through(self, f: Callable[[Tensor], Tensor], steep: float = 1.0, least: float = 0.0) -> "Rounded":
        """f(v).  What f rounds has the size of f(v), and of ``steep`` times v, and ``least`` at least."""
        exact = f(self.exact)
        changes = [(f(v) - exact).abs_() for v in (self.exact + self.bound, self.exact - self.bound)]
        size = exact.abs() + steep * self.exact.abs() + least
        return Rounded(exact, torch.maximum(*changes) + FUNCTION * U * size)

    def reduced(self, by: Callable[[Tensor], Tensor], n: int) -> "Rounded":
        """``by``, a sum or a mean of n values."""
        size = by(self.exact.abs())
        bound = by(self.bound) + growth(n) * size + TINY
        # Parts of the sum may overflow in fp32.
        return Rounded(by(self.exact), bound.masked_fill_(size * n > 1e37, torch.inf))

    def stored(self, dtype: torch.dtype) -> "Rounded":
        """The values as a tensor of this dtype has them."""
        return Rounded(self.exact, self.bound + rounding(self.exact, dtype))

    def near(self, name: str, found: Tensor) -> Compared:
        """A part of a result that should be these values.  It may have another shape."""
        exact, bound = self.exact.reshape(found.shape), self.bound.reshape(found.shape)
        says = exact.isfinite() & bound.isfinite()
        return Compared(name, found, exact, ((found.detach().to(exact.dtype) - exact).abs_() <= bound) | ~says, says)


def exactly(v: Tensor | float) -> Rounded:
    """Values in float64 that a kernel has exactly."""
    v = torch.as_tensor(v, dtype=torch.float64)
    return Rounded(v, v.new_zeros(()).expand_as(v))


def channel_ranges(x: Tensor, together: int = 1) -> Iterator[tuple[int, int]]:
    """Ranges of the channels of x with about ``PART`` elements, each a multiple of ``together``."""
    C = x.shape[1]
    step = max(PART // (x.numel() // C) // together, 1) * together
    for a in range(0, C, step):
        yield a, min(a + step, C)


def wide(t: Tensor, a: int, b: int) -> Tensor:
    """A range of channels in float64, (N, channels, positions)."""
    return t.detach()[:, a:b].reshape(t.shape[0], b - a, -1).double()
