"""The data objects of a budget: how much may be kept (``Budget``), and which calls run twice for it (``Choice``).

They hold plain values.  The scope of eager mode (``twice.py``) and the compiled scope read the same ``Choice``.  A call
is known by its place in the order of the calls.
"""

import functools
import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from ..._sizes import parse_bytes, text_of


@dataclass(frozen=True)
class Budget:
    """How much a training step may keep for backward, and how much arithmetic may run twice for it.

    Attributes:
        fraction: the share of the bytes that the step keeps without fusedseg, above 0 and at most 1; or None.
        nbytes: the bytes that may be kept; or None.
        extra_flops: the arithmetic that may run twice, as a share of the arithmetic of all calls that may run twice,
            in forward; or None for ``MOST``.

    One of ``fraction`` and ``nbytes`` asks for as little repeated arithmetic as the bytes allow.  With ``extra_flops``
    alone, as few bytes are kept as that arithmetic buys.  With both, the peak counts less than the two limits.
    """

    fraction: float | None = None
    nbytes: int | None = None
    extra_flops: float | None = None

    # The default of ``extra_flops``.  The last bytes cost most.  With budget 0.3, MONAI's SwinUNETR of 12 features at
    # 1 x 1 x 64^3 keeps 0.776 of the bytes and repeats 0.24 of its forward.  Without a limit it would keep 0.740 and
    # repeat 1.81 of it.
    MOST = 0.35

    @classmethod
    def parse(cls, op: str, budget: float | str | None, extra_flops: float | None) -> "Budget | None":
        """The budget of the arguments of ``op``; None if both are None.

        Raises:
            TypeError: ``budget`` is no float, int or text, or ``extra_flops`` is no number.
            ValueError: a fraction is not above 0 or is above 1, bytes are not positive, a text cannot be read, or
                ``extra_flops`` is negative.
        """
        if budget is None and extra_flops is None:
            return None
        fraction = nbytes = None
        if isinstance(budget, bool) or not isinstance(budget, (float, int, str, type(None))):
            raise TypeError(
                f"{op}: budget must be a fraction such as 0.3, a number of bytes, or a text such as '6GiB', "
                f"got {budget!r}"
            )
        if isinstance(budget, float):
            if not 0.0 < budget <= 1.0:
                raise ValueError(
                    f"{op}: budget must be a fraction above 0.0 and at most 1.0, or bytes as an int or a text such as "
                    f"'6GiB', got {budget!r}"
                )
            fraction = budget
        elif budget is not None:
            nbytes = parse_bytes(op, "budget", budget)
        if extra_flops is not None:
            if isinstance(extra_flops, bool) or not isinstance(extra_flops, (float, int)):
                raise TypeError(f"{op}: extra_flops must be a number such as 0.02, got {extra_flops!r}")
            if not 0.0 <= extra_flops < float("inf"):
                raise ValueError(f"{op}: extra_flops must be finite and at least 0, got {extra_flops!r}")
            extra_flops = float(extra_flops)
        return cls(fraction, nbytes, extra_flops)

    def bytes_of(self, eager: int) -> int | None:
        """The bytes that may be kept, of ``eager`` that the step keeps without fusedseg; None for the fewest."""
        return int(self.fraction * eager) if self.fraction is not None else self.nbytes

    @property
    def most_flops(self) -> float:
        """The largest share of the arithmetic that may run twice."""
        return self.MOST if self.extra_flops is None else self.extra_flops

    def missed(self, choice: "Choice", eager: int) -> str | None:
        """What to tell the user if ``choice`` keeps more than the budget allows; None if it does not.

        eager: as in ``bytes_of``.
        """
        wanted, kept = self.bytes_of(eager), choice.kept
        if wanted is None or kept is None or kept <= wanted:
            return None
        nearest = text_of(kept) if self.fraction is None or not eager else f"{math.ceil(kept / eager * 1000) / 1000:g}"
        return (
            f"{text_of(wanted)} cannot be reached without a higher peak or more arithmetic: {text_of(kept)} are kept, "
            f"and {choice.repeated:.1%} of the forward's arithmetic runs again.  The nearest budget that can be met is "
            f"{nearest}; extra_flops, which is {self.most_flops:g}, limits the arithmetic"
        )

    def __str__(self) -> str:
        parts = [] if self.fraction is None else [f"budget {self.fraction:g}"]
        parts += [] if self.nbytes is None else [f"budget {text_of(self.nbytes)}"]
        parts += [] if self.extra_flops is None else [f"extra_flops {self.extra_flops:g}"]
        return ", ".join(parts)


@dataclass(frozen=True)
class Call:
    """One call of a convolution, a linear layer or a matrix product.

    Attributes:
        function: its name, such as "conv3d" (``twice.FUNCTIONS`` has all of them).
        options: the arguments that are no tensors, for example stride and padding; equal for every size of the input.
        tensors: for each argument that is a tensor, its shape, its dtype and its strides.
        nbytes: bytes of its output.
        flops: floating-point operations of one run, where a multiplication and an addition are two.
        autocast: the state of autocast.
        workspace: bytes that a run allocates for a moment beside its output, such as an enlarged input.
    """

    function: str
    options: Hashable = field(repr=False)
    tensors: tuple[Any, ...]
    nbytes: int
    flops: int
    autocast: Hashable = field(default=None, repr=False)
    workspace: int = field(default=0, repr=False, compare=False)

    @property
    def kind(self) -> Hashable:
        """What stays the same when the size of the input or the precision changes."""
        return self.function, self.options, tuple(len(shape) for shape, *_ in self.tensors)

    @property
    def signature(self) -> Hashable:
        """All that determines which algorithm runs."""
        # Of an input that is enlarged, only the bytes of the output tell the size.
        return self.function, self.options, self.tensors, self.autocast, self.nbytes


@dataclass(frozen=True)
class Choice:
    """Which calls of a step run twice.

    Attributes:
        calls: all calls that may run twice, in the order of forward.
        again: the indices in ``calls`` of those that do, so that their output is not kept.
        kept: the bytes that the step keeps then; None if they are not known.
        flops: the arithmetic that backward repeats; a call may have to run more than once more.
        hold: the calls whose values backward holds from the first use to the last one, so that they run only once more.
        peak: the most bytes at once, as ``graph.Cost`` counts them; None if they are not known.
    """

    calls: tuple[Call, ...]
    again: frozenset[int]
    kept: int | None = None
    flops: int = 0
    hold: frozenset[int] = frozenset()
    peak: int | None = None

    def has(self, index: int, call: Call) -> bool:
        """Whether the call with this number is the one that was planned, for the same size or another one."""
        return index < len(self.calls) and self.calls[index].kind == call.kind

    @functools.cached_property
    def again_in_order(self) -> tuple[int, ...]:
        """``again`` in ascending order."""
        return tuple(sorted(self.again))

    @property
    def total_flops(self) -> int:
        """The arithmetic of all calls in one forward."""
        return sum(call.flops for call in self.calls)

    @property
    def repeated(self) -> float:
        """The repeated arithmetic as a share of ``total_flops``."""
        return self.flops / self.total_flops if self.total_flops else 0.0

    def __str__(self) -> str:
        return f"{len(self.again)} of {len(self.calls)} calls run twice, {self.repeated:.1%} of the arithmetic"
