"""Labels of logits that nnU-Net would resample as a whole, from slabs along the first axis.

nnU-Net's ``resample_data_or_seg_to_shape`` resamples each class in float64, rounds it to the dtype of the logits, and
takes the argmax.  ``SlabLabels`` forms the same products and sums in the same order, for as many planes as are known,
and keeps the best class so far.  So its labels are equal, even where the rounded logits of two classes are.

Positions of scikit-image and SciPy, for n values and m results: c = (i + 1/2) n / m - 1/2, not below 0 or above n - 1.
Linear: (1 - f) x[floor(c)] + (1 - (1 - f)) x[floor(c) + 1] with f = c - floor(c).  Nearest: x[floor(c + 1/2)].
A value of three axes is a sum of eight products ((x w0) w1) w2, in which the last axis varies fastest.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops.segmentation.positions import labels_dtype


class Tap(NamedTuple):
    """One position that each result along an axis reads, and its weight.  None: all in their order, or weights of 1."""

    positions: Tensor | None
    weight: Tensor | None


class ResampledAxis(NamedTuple):
    """One axis: its size after the resampling, and the taps whose sum is a result."""

    after: int
    taps: tuple[Tap, ...]

    @classmethod
    def of(cls, before: int, after: int, *, linear: bool) -> "ResampledAxis":
        if before == after:
            return cls(after, (Tap(None, None),))
        at = (torch.arange(after, dtype=torch.float64) + 0.5) * (before / after) - 0.5
        at = at.clamp_(0, before - 1)
        if not linear:
            return cls(after, (Tap((at + 0.5).floor_().long(), None),))
        low = at.floor()
        first = 1 - (at - low)
        next_one = (low + 1).clamp_(max=before - 1)
        return cls(after, (Tap(low.long(), first), Tap(next_one.long(), 1 - first)))

    def to(self, device: torch.device) -> "ResampledAxis":
        taps = tuple(Tap(*(t if t is None else t.to(device) for t in tap)) for tap in self.taps)
        return self._replace(taps=taps)

    def reads(self) -> list[tuple[int, int]]:
        """The first and the last position that each result reads."""
        read = [range(self.after) if t.positions is None else t.positions.tolist() for t in self.taps]
        return [(min(of_one), max(of_one)) for of_one in zip(*read, strict=True)]

    def part(self, first: int, end: int, offset: int) -> "ResampledAxis":
        """The axis for the results from ``first`` to ``end``, of values that begin at ``offset``."""
        if self.taps[0].positions is None:
            return self
        taps = tuple(
            Tap(positions[first:end] - offset, weight if weight is None else weight[first:end])
            for positions, weight in self.taps
            if positions is not None
        )
        return self._replace(taps=taps)


def axes_of(
    resample: functools.partial, shape: tuple[int, ...], properties: dict, spacings: tuple[Any, Any]
) -> tuple[ResampledAxis, ...]:
    """The axes of nnU-Net's resampling function ``configuration_manager.resampling_fn_probabilities``.

    Args:
        resample: the function, with the keywords of the plans.
        shape: the sizes of the logits.
        properties: of the case, as nnU-Net's preprocessing returns them.
        spacings: of the logits and of the labels.
    """
    from nnunetv2.preprocessing.resampling import default_resampling

    name, options = resample.func.__name__, {"order": 3, "order_z": 0, **resample.keywords}
    if name == "no_resampling_hack":
        return tuple(ResampledAxis.of(n, n, linear=True) for n in shape)
    if name != "resample_data_or_seg_to_shape" or (options["order"], options["order_z"]) != (1, 0):
        raise ValueError(
            "fusedseg: the plans must resample logits by resample_data_or_seg_to_shape with order 1 and order_z 0, "
            f"nnU-Net's default, or by no_resampling_hack, got {name} with {dict(resample.keywords)}; predict with "
            "nnUNetv2_predict"
        )
    target = tuple(properties["shape_after_cropping_and_before_resampling"])
    threshold = options.get("separate_z_anisotropy_threshold", default_resampling.ANISO_THRESHOLD)
    separate, lowest = default_resampling.determine_do_sep_z_and_axis(
        options.get("force_separate_z", False), *spacings, threshold
    )
    axes = zip(shape, target, strict=True)
    return tuple(ResampledAxis.of(n, int(m), linear=not (separate and a == lowest)) for a, (n, m) in enumerate(axes))


class SlabLabels:
    """Labels of logits (K, X, Y, Z) that come in slabs along X.

    Held are the slab, one plane of the one before, and the resampled values of one class for a few planes.

    Args:
        axes: how each axis is resampled.
        classes: the number of classes K.
        device: that of the logits and the labels.
        regions: None, or the label of each class where classes overlap; the last class that is present wins.
    """

    # The resampled values that are formed at once: few on a CPU, where they stay in its cache.
    BLOCK = 2**17
    BLOCK_GPU = 2**22

    def __init__(
        self,
        axes: tuple[ResampledAxis, ...],
        classes: int,
        device: torch.device,
        regions: list[int] | None = None,
    ) -> None:
        self.first, self.reads = axes[0], axes[0].reads()
        self.others = tuple(axis.to(device) for axis in axes[1:])
        self.classes, self.regions = classes, regions
        dtype = labels_dtype(classes if regions is None else max(regions) + 1)
        self.labels = torch.zeros([axis.after for axis in axes], dtype=dtype, device=device)
        per_plane = self.labels[0].numel()
        self.block = max(1, (self.BLOCK if device.type == "cpu" else self.BLOCK_GPU) // per_plane)
        # How many planes of labels are written, how many of logits have come, and the last of these.
        self.done = self.come = 0
        self.held: Tensor | None = None

    def add(self, slab: Tensor) -> None:
        """Takes the next planes of the logits, and writes all labels that read no later ones."""
        start, self.come = self.come, self.come + slab.shape[1]
        ready = self.done
        while ready < self.first.after and self.reads[ready][1] < self.come:
            ready += 1
        for first in range(self.done, ready, self.block):
            end = min(first + self.block, ready)
            low, high = self.reads[first][0], self.reads[end - 1][1] + 1
            # A result that reads the last plane of one slab reads the first plane of the next one too.
            before = self.held if low < start else None
            now = slab[:, max(low - start, 0) : high - start]
            axes = (self.first.part(first, end, low).to(slab.device), *self.others)
            self._write(self.labels[first:end], before, now, axes)
        self.done = ready
        self.held = slab[:, -1:].clone()

    def _write(self, labels: Tensor, before: Tensor | None, now: Tensor, axes: tuple[ResampledAxis, ...]) -> None:
        """Writes labels of the planes ``before``, if any, and ``now``."""
        best: Tensor | None = None
        for k in range(self.classes):
            planes = now[k] if before is None else torch.cat([before[k], now[k]])
            values = _resampled(planes, axes)
            if self.regions is not None:
                # Not values > 0: the sigmoid of the least positive numbers is rounded to 1/2.
                labels.masked_fill_(values.float().sigmoid() > 0.5, self.regions[k])
            elif best is None:
                best = values
            else:
                # The first of equal classes wins.
                labels.masked_fill_(values > best, k)
                best = torch.maximum(best, values)


def _resampled(planes: Tensor, axes: tuple[ResampledAxis, ...]) -> Tensor:
    """Planes (X, Y, Z) in half precision, resampled along all axes."""
    if all(tap.weight is None for axis in axes for tap in axis.taps):
        return _read(_read(_read(planes, 0, axes[0].taps[0]), 1, axes[1].taps[0]), 2, axes[2].taps[0])
    total: Tensor | None = None
    planes = planes.double()
    # A product of three and its sum are separate operations, because a fused one would round once and not twice.
    for x in axes[0].taps:
        of_x = _read(planes, 0, x)
        for y in axes[1].taps:
            of_y = _read(of_x, 1, y)
            for z in axes[2].taps:
                term = _read(of_y, 2, z)
                # The last axis that is interpolated gives a tensor of its own.
                total = term if total is None else total + term
    assert total is not None
    return _rounded(total)


def _read(x: Tensor, axis: int, tap: Tap) -> Tensor:
    if tap.positions is not None:
        x = x.index_select(axis, tap.positions)
    if tap.weight is not None:
        x = x * tap.weight.view([-1 if a == axis else 1 for a in range(x.dim())])
    return x


def _rounded(x: Tensor) -> Tensor:
    """float64 to half precision as NumPy rounds, once.  PyTorch would round to fp32 first, and then a second time.

    Where fp32 is not exact, its last bit is set to 1: the number then lies on the same side of every midpoint.
    """
    near = x.float()
    error = x - near.double()
    even = near.view(torch.int32) & 1 == 0
    towards = torch.where(error > 0, torch.inf, -torch.inf).to(near.dtype)
    return torch.where((error != 0) & even, near.nextafter(towards), near).half()
