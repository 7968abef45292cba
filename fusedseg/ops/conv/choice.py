"""Chooses the convolution in ``conv_abn``: Triton's kernel, whose epilogue computes the statistics, or the vendor's.

``"auto"`` takes the vendor's convolution, followed by our statistics kernel, unless Triton's kernel is known to be
faster.  ``could_win`` is the rule for shapes in which it can be faster; for these ``choose`` measures both once, at the
first call of a kind of convolution (see ``Kind``).  It compares their results, and takes Triton's kernel if they agree
and it needs at most ``MARGIN`` of the vendor's time.  This first call waits for the device, compiles Triton's kernel,
runs some thirty forwards, and needs the memory of one more output.  The vendor's convolution is taken without a
measurement while a CUDA graph is captured.  It is also taken if results must be the same in each run (``must_repeat``),
because a choice by time differs between runs, and if a measurement fails, which a warning says.

Other ops measure in the same way (``is_faster``): for 3x3x3 taps of few channels the vendor has a second rival, the
kernel of ``conv3d.py``, which takes part here in the vendor's place where it is faster.
"""

import functools
import math
import statistics
import warnings
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import _backend, _torch
from ..._torch import FakeTensor, is_listed
from ..check import HALF
from ..layout import layout_of
from .geometry import Geometry

# With more input channels, arithmetic limits a kernel of several taps, and then the vendors' libraries are faster.
MOST_CHANNELS = 128
# Fewer channels waste tensor cores, whose smallest step sums 16 products.
LEAST_CHANNELS = 16
MARGIN = 0.98
# The allowed relative difference of the results.  Both have rounding errors in y, which the normalisation amplifies.
AGREEMENT = {torch.float16: 5e-3, torch.bfloat16: 3e-2, torch.float32: 5e-3}
WARMUP, ROUNDS = 3, 10
# About a millisecond, in which the host queues a forward.
AHEAD_CYCLES = 2_000_000
# Networks have few kinds of convolutions.  The limit is for sizes that change with every batch.
MOST_RECORDS = 64


Results = Tensor | tuple[Tensor, ...]


class Unserved(Exception):
    """Raised by what may take the place of other ops if it does not compute a call, which is no failure."""


class Kind(NamedTuple):
    """The kind of a call.  Calls of equal kinds share a measurement.

    what: the op.
    benchmark: a setting of the user for the vendor's library.
    of: all else that the times depend on, by its names.
    """

    what: str
    device: str
    benchmark: bool
    of: tuple[tuple[str, Hashable], ...]


class Record(NamedTuple):
    """The seconds of one forward by each backend, and the relative difference of their results."""

    triton: float
    aten: float
    difference: float
    agree: bool

    @property
    def choice(self) -> str:
        return "triton" if self.agree and self.triton <= MARGIN * self.aten else "aten"


_records: dict[Kind, Record] = {}


def tf32_allowed() -> bool:
    """Whether a stock fp32 convolution may use TF32.

    It reads the settings ``fp32_precision``, which have replaced ``torch.backends.cudnn.allow_tf32`` in PyTorch 2.9.
    """
    # Typed Any, because type checkers do not see some of these settings.
    backends: Any = torch.backends
    if not hasattr(backends.cudnn, "conv"):
        return backends.cudnn.allow_tf32
    for setting in (backends.cudnn.conv.fp32_precision, backends.cudnn.fp32_precision, backends.fp32_precision):
        if setting != "none":
            return setting == "tf32"
    return False


def takes_tf32(x: Tensor) -> bool:
    """Whether Triton's kernel uses TF32 for ``x``."""
    return x.dtype == torch.float32 and tf32_allowed() and _backend.has_tf32(x.device)


def must_repeat() -> bool:
    """Whether results must be the same in each run, so that no choice may depend on a time."""
    return torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.deterministic


def unfit(x: Tensor, positions: int) -> str:
    """The reason why Triton's kernel cannot serve ``x``; "" if it can."""
    if x.dtype not in (*HALF, torch.float32):
        return f"x must be float16, bfloat16 or float32, got {x.dtype}"
    if max(positions, x.shape[1:].numel()) >= 2**31:
        return f"a sample or the output's positions must be fewer than 2**31, got {positions}"
    # This comes last, because it may test the kernel.
    reason = _backend.why_not(x, "conv")
    return reason and f"a tensor on {x.device} cannot be served: {reason}"


def could_win(x: Tensor, w: Tensor, geometry: Geometry) -> bool:
    """The rule for shapes in which Triton's kernel can be faster.

    The kernel needs tensor cores, no groups, and enough channels for the tensor cores.  x must load in wide vectors:
    in channels_last it always does, and if contiguous for a kernel of one tap.  With several taps there must be few
    channels, because otherwise memory takes too small a share of the time.
    """
    layout = layout_of(x)
    if layout is None:
        return False
    pointwise = w[0, 0].numel() == 1
    aligned = pointwise and set(geometry.stride) == {1} and set(geometry.padding) == {0} and layout.S % 16 == 0
    return (
        (x.dtype in HALF or takes_tf32(x))
        and geometry.groups == 1
        and w.shape[1] >= LEAST_CHANNELS
        and w.shape[1] * x.element_size() % 16 == 0
        and (layout.rows or aligned)
        and (pointwise or w.shape[1] <= MOST_CHANNELS)
    )


@functools.cache
def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def kind_of(what: str, x: Tensor, **of: Hashable) -> Kind:
    return Kind(what, device_name(x.device), torch.backends.cudnn.benchmark, tuple(of.items()))


def kind_of_conv_abn(x: Tensor, w: Tensor, geometry: Geometry, training: bool) -> Kind:
    layout, shape = layout_of(x), geometry.output_shape(x.shape, w.shape)
    return kind_of(
        "conv_abn",
        x,
        dtype=x.dtype,
        training=training,
        channels_last=layout is not None and layout.rows,
        weight=tuple(w.shape),
        geometry=geometry,
        log2_positions=(shape.numel() // shape[1] - 1).bit_length(),
        tf32=takes_tf32(x),
    )


def choose(
    op: str,
    conv_backend: str,
    x: Tensor,
    w: Tensor,
    geometry: Geometry,
    training: bool,
    forward: Callable[[str], Tensor],
) -> str:
    """Chooses "triton" or "aten".  It runs ``forward`` with both if they must be measured.

    Raises:
        RuntimeError: ``conv_backend="triton"``, and the kernel cannot serve ``x``, or its result was found to be wrong
            on this device.
    """
    # In eager mode on a CPU there is no choice, and this finds that out quickly.
    if conv_backend == "aten" or isinstance(x, FakeTensor) or (conv_backend == "auto" and not _backend.use_triton(x)):
        return "aten"
    shape = geometry.output_shape(x.shape, w.shape)
    if not shape.numel():
        return "aten"
    positions = shape.numel() // shape[1]
    if conv_backend == "triton":
        if reason := unfit(x, positions):
            raise RuntimeError(f"{op}: conv_backend is 'triton', but {reason}")
    elif not could_win(x, w, geometry) or must_repeat() or unfit(x, positions):
        return "aten"
    kind = kind_of_conv_abn(x, w, geometry, training)
    record = recorded(kind, x, forward)
    if record is None:
        return "triton" if conv_backend == "triton" else "aten"
    if conv_backend == "auto":
        return record.choice
    if not record.agree:
        raise RuntimeError(
            f"{op}: conv_backend is 'triton', but on this device its result differs from the vendor's by a relative "
            f"{record.difference:.1e}, for {kind}; please report it, and use 'auto' or 'aten'"
        )
    return "triton"


def is_faster(what: str, x: Tensor, run: Callable[[str], Results], **of: Hashable) -> bool:
    """Whether what may take the place of other ops is right and faster for such a call (``recorded``).

    It is not taken where results must be the same in each run.
    """
    if must_repeat():
        return False
    record = recorded(kind_of(what, x, **of), x, run)
    return record is not None and record.choice == "triton"


def recorded(kind: Kind, x: Tensor, run: Callable[[str], Results]) -> Record | None:
    """The measurement of a kind of call, which is made at its first call; ``run`` computes it by "triton" or "aten".

    "aten" stands for the ops that run without a choice, and "triton" for what may take their place.

    It is None if nothing can be measured now: on a CPU, while a CUDA graph is captured, or if the result is not finite.
    Nothing more is measured either when there are ``MOST_RECORDS`` of an op.
    """
    record = _records.get(kind)
    if record is not None or not x.is_cuda:
        return record
    if sum(known.what == kind.what for known in _records) >= MOST_RECORDS:
        return None
    if is_listed(x):
        # A measurement launches the kernel.
        run("triton")
        return None
    # Events belong to the current device, which may not be that of x.
    with torch.cuda.device_of(x):
        if torch.cuda.is_current_stream_capturing():
            return None
        record = _measured(kind, x.dtype, run)
    if math.isnan(record.difference):
        # A result that is not finite says nothing about the next batch, so it is not recorded.
        return None
    _records[kind] = record
    return record


def _measured(kind: Kind, dtype: torch.dtype, run: Callable[[str], Results]) -> Record:
    """``measure`` on the current device.  Where it fails, the vendor's convolution is the faster one."""
    try:
        return measure(dtype, run, cuda_seconds)
    except Unserved:
        return Record(math.inf, 0.0, 0.0, agree=True)
    # Triton's errors have no common class, and a measurement needs more memory than a step.
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        warnings.warn(
            "fusedseg: the first call of a convolution compares Triton's kernel with the vendor's, and that failed. "
            f"So the vendor's is taken. {type(error).__name__}: {text} ({kind})",
            RuntimeWarning,
            stacklevel=2,
        )
        # Who asks for Triton's kernel gets it, or its error.
        return Record(math.inf, 0.0, math.inf, agree=True)


def _several(results: Results) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else results


def measure(
    dtype: torch.dtype, forward: Callable[[str], Results], seconds: Callable[[Callable[[], Any]], float]
) -> Record:
    """Runs both backends in turn, and returns the medians of their times, and of several results the worst difference.

    If a result of the vendor's is not finite, nothing is timed, and the difference is NaN.
    """

    def norm(t: Tensor) -> float:
        # The norm is computed in float32 without a copy of t.
        return torch.linalg.vector_norm(t.detach(), dtype=torch.float32).item()

    expected = _several(forward("aten"))
    sizes = [norm(t) for t in expected]
    if not all(map(math.isfinite, sizes)):
        return Record(math.nan, math.nan, math.nan, False)
    # If a result is zero, as with a zero weight of the norm, the absolute difference counts.
    differences = [
        norm(found.detach().sub_(wanted)) / (size or 1.0)
        for found, wanted, size in zip(_several(forward("triton")), expected, sizes, strict=True)
    ]
    del expected
    difference = math.inf if any(map(math.isnan, differences)) else max(differences)
    times: dict[str, list[float]] = {"triton": [], "aten": []}
    for round_ in range(WARMUP + ROUNDS):
        for name, taken in times.items():
            spent = seconds(partial(forward, name))
            if round_ >= WARMUP:
                taken.append(spent)
    triton, aten = (statistics.median(times[name]) for name in ("triton", "aten"))
    return Record(triton, aten, difference, difference <= AGREEMENT[dtype])


def cuda_seconds(run: Callable[[], Any]) -> float:
    """The seconds that the current device takes for ``run``.

    The device sleeps until the host has queued the kernels, because in training too the host is ahead of the device.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    _torch.cuda_sleep(AHEAD_CYCLES)
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3
