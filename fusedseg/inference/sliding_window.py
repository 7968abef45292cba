"""Labels of a large image: class scores are summed over windows, and never held for the whole image."""

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain, combinations
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..ops.check import check_choice, check_dtype, check_positive, check_tensor
from ..ops.segmentation.positions import argmax_labels, labels_dtype
from ..progress import Progress
from .windows import Slices, Sums, Windows, importance, part

OP = "fusedseg.sliding_window_labels"
MODES = ("constant", "gaussian")
# What an image lacks that has so many dimensions less than roi asks for, and how to add it.
MISSING = {
    1: "no batch dimension (pass image[None]) or no channel dimension (pass image[:, None])",
    2: "no batch and channel dimensions (pass image[None, None])",
}
PADDING_MODES = ("constant", "reflect", "replicate", "circular")


def sliding_window_labels(
    model: Callable[[Tensor], Tensor],
    image: Tensor,
    roi: int | Sequence[int | None],
    overlap: float | Sequence[float] = 0.25,
    *,
    sw_batch_size: int = 1,
    mode: str = "constant",
    sigma_scale: float | Sequence[float] = 0.125,
    padding_mode: str = "constant",
    cval: float = 0.0,
    sw_device: torch.device | str | None = None,
    device: torch.device | str | None = None,
    regions: bool | Sequence[int] = False,
    mirror: Sequence[int] = (),
    progress: bool = False,
) -> Tensor:
    """Labels of an image that is larger than an input of the model, in overlapping windows.

    Equals MONAI's inferer, followed by an argmax::

        inferer = SlidingWindowInferer(roi, sw_batch_size, overlap, mode, ...)
        inferer(image, model).argmax(1)

    MONAI holds the sums of all classes for the whole image, divides them at the end, and takes the argmax.  Here a part
    of the image gets its labels after the last window that touches it, and the memory of its sums is given back.
    Windows, weights, dtypes, and the order in which predictions are added are those of MONAI, so that labels are equal
    even where two classes are almost equally likely.

    Args:
        model: a module or function that maps (n, C, *roi) to logits (n, K, *roi).  Call ``model.eval()`` before, if
            it has norms or dropout; its mode is not changed.  No graph is recorded.
        image: (N, C, *spatial), with one to three spatial dimensions; fp16, bf16, fp32 or fp64.
        roi: the size of a window: one number, or one for each axis.  None, or a number below 1, stands for the size of
            the image.
        overlap: the part of a window that the next one covers, at least 0 and below 1; one number, or one for each
            axis.
        sw_batch_size: the number of windows in one call of the model.
        mode: "constant", equal weights for all predictions; or "gaussian", less weight at the border of a window.
        sigma_scale: the standard deviation of the Gaussian as a part of the window; one number, or one for each axis.
        padding_mode, cval: how an image is padded that is smaller than a window, as in ``torch.nn.functional.pad``.
        sw_device: the device of the model, to which windows are copied; by default that of ``image``.
        device: the device of sums and labels; by default that of ``image``.
        regions: True, if classes may overlap: every class is predicted where its logit is above 0.  A sequence of K
            labels, nnU-Net's ``regions_class_order``, makes one label of each position: that of the last class that is
            predicted there, or 0.
        mirror: spatial axes along which windows are mirrored as well, in all combinations, as nnU-Net does; the model
            runs 2 ** len(mirror) times for each window, and its predictions are averaged.
        progress: whether to show a line on a terminal that says how many windows are done.

    Returns:
        Labels (N, *spatial) on ``device``, in uint8 for up to 256 classes, in int16 for up to 32768, else in int32; or
        truth values (N, K, *spatial) for ``regions=True``.  The first of equal classes wins.

    Sums have the dtype of the image, as in MONAI: half precision halves their bytes and rounds them after each window.
    Held at once are the predictions of one call of the model, and the sums of the positions that have been touched, and
    that a later window touches again.  With half of a window as overlap, these positions are half of a window along the
    first axis and the whole image along the others, and one row of windows more.  A longer first axis adds nothing.

    Raises:
        ValueError: a size, a shape or a choice does not fit; the model returns another resolution or number of classes.
        TypeError: ``image`` is not floating point; the model returns something else than one floating-point tensor.

    Source: Isensee et al., "nnU-Net", Nature Methods 2021 (Gaussian weights, mirroring).
    """
    _check_image(image)
    check_positive(OP, "sw_batch_size", sw_batch_size)
    check_choice(OP, "mode", mode, MODES)
    check_choice(OP, "padding_mode", padding_mode, PADDING_MODES)
    if cval != 0 and padding_mode != "constant":
        raise ValueError(f"{OP}: cval must be 0 for padding_mode {padding_mode!r}, got {cval}")
    sizes = _roi(roi, image)
    of_axes = _for_axes("overlap", overlap, image, "at least 0 and below 1", lambda o: 0 <= o < 1)
    sigmas = _for_axes("sigma_scale", sigma_scale, image, "above 0", lambda s: s > 0)
    axes = _mirrored_axes(mirror, image)
    regions = _labels_of_regions(regions)

    inner = image.shape[2:]
    image, before = _padded(image, sizes, padding_mode, cval)
    windows = Windows.of(tuple(image.shape[2:]), sizes, of_axes)
    target = torch.device(image.device if device is None else device)
    sw_device = torch.device(image.device if sw_device is None else sw_device)
    stds = tuple(size * s for size, s in zip(sizes, sigmas, strict=True)) if mode == "gaussian" else None
    weights = importance(sizes, stds, sw_device).to(image.dtype)
    found = _Labels((image.shape[0], *image.shape[2:]), target, regions)
    sums = [Sums(windows, weights, target, partial(found.write, n)) for n in range(image.shape[0])]

    jobs = [(n, window) for n in range(image.shape[0]) for window in windows.indices]
    with torch.no_grad(), Progress(OP) if progress else nullcontext() as shown:
        for i in range(0, len(jobs), sw_batch_size):
            batch = jobs[i : i + sw_batch_size]
            if shown is not None:
                shown.update(f"window {i + len(batch)} of {len(jobs)}")
            data = torch.cat([part(image[n : n + 1], windows.where(window)) for n, window in batch])
            predictions = _predicted(model, data.to(sw_device), axes)
            found.allocate(predictions.shape[1])
            for (n, window), prediction in zip(batch, predictions, strict=True):
                sums[n].add(window, prediction)
            # No variable holds predictions while the model runs again.
            del predictions, prediction
    crop = tuple(slice(a, a + size) for a, size in zip(before, inner, strict=True))
    return part(found.labels, crop).contiguous()


class _Labels:
    """Writes the labels of finished cells.

    labels: (N, *spatial), or (N, K, *spatial) for truth values; it exists after the first call of ``allocate``.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device, regions: bool | Sequence[int]) -> None:
        self.shape, self.device, self.regions = shape, device, regions
        self.classes = 0
        self.labels: Tensor

    def allocate(self, K: int) -> None:
        """Prepares for K classes, which every prediction must have."""
        if self.classes:
            if self.classes != K:
                raise ValueError(
                    f"{OP}: model must return the same number of classes for every window, got {K} after {self.classes}"
                )
            return
        self.classes = K
        N, *spatial = self.shape
        channels, dtype = [], labels_dtype(K)
        if self.regions is True:
            channels, dtype = [K], torch.bool
        elif self.regions is not False:
            if len(self.regions) != K:
                raise ValueError(f"{OP}: regions must have {K} labels, one for each class, got {len(self.regions)}")
            dtype = labels_dtype(max(self.regions) + 1)
        self.labels = torch.empty(N, *channels, *spatial, dtype=dtype, device=self.device)

    def write(self, n: int, where: Slices, logits: Tensor) -> None:
        part(self.labels[n], where).copy_(labels_of(logits[None], self.regions)[0])


def labels_of(logits: Tensor, regions: bool | Sequence[int]) -> Tensor:
    """Labels (N, *spatial) of logits (N, K, *spatial), or truth values (N, K, *spatial) for ``regions=True``."""
    if regions is False:
        return argmax_labels(logits)
    if regions is True:
        return logits > 0
    labels = torch.zeros_like(logits[:, 0], dtype=labels_dtype(max(regions) + 1))
    for k, label in enumerate(regions):
        labels.masked_fill_(logits[:, k] > 0, label)
    return labels


def _predicted(model: Callable[[Tensor], Tensor], data: Tensor, axes: list[tuple[int, ...]]) -> Tensor:
    """The prediction of windows, or the mean of those of all mirrored windows."""
    try:
        prediction = _checked(model(data), data)
    except Exception as error:
        # Python 3.10 has no notes.
        if sys.version_info >= (3, 11):
            error.add_note(
                f"{OP}: the model was called with windows (n, C, *roi) = {tuple(data.shape)}; if image has no batch "
                "dimension, pass image[None]"
            )
        raise
    if axes:
        prediction = prediction.clone()
        for flipped in axes:
            prediction += _checked(model(data.flip(flipped)), data).flip(flipped)
        prediction /= len(axes) + 1
    return prediction


def _checked(prediction: object, data: Tensor) -> Tensor:
    if not isinstance(prediction, Tensor):
        raise TypeError(
            f"{OP}: model must return one tensor, got {type(prediction).__name__}; wrap a model of several outputs in "
            "a function that returns the one to predict from"
        )
    if not prediction.is_floating_point():
        raise TypeError(f"{OP}: model must return floating-point logits, got {prediction.dtype}")
    expected = (data.shape[0], prediction.shape[1] if prediction.dim() > 1 else "K", *data.shape[2:])
    if tuple(prediction.shape) != expected:
        raise ValueError(
            f"{OP}: model must return (n, K, *roi), one vector of logits for each position, which for windows "
            f"{tuple(data.shape)} is {expected}, got {tuple(prediction.shape)}"
        )
    return prediction


def _check_image(image: object) -> None:
    check_tensor(OP, image, "image")
    assert isinstance(image, Tensor)
    check_dtype(OP, "image", image.dtype)
    if not 3 <= image.dim() <= 5 or not image.numel():
        raise ValueError(
            f"{OP}: image must have shape (N, C, *spatial) with one to three spatial dimensions and at least one "
            f"value, got {tuple(image.shape)}"
        )


def _labels_of_regions(regions: bool | Sequence[int]) -> bool | Sequence[int]:
    if isinstance(regions, bool):
        return regions
    labels = _values(regions)
    if labels is None or not all(_is_integer(label) and label >= 0 for label in labels):
        raise ValueError(f"{OP}: regions must be True, False, or labels of at least 0, got {regions!r}")
    return tuple(map(int, labels))


def _values(given: Any) -> tuple[Any, ...] | None:
    """The values of a sequence, which may be an array of NumPy; None for a single value, such as a number."""
    try:
        return tuple(given)
    except TypeError:
        return None


def _is_integer(value: object) -> bool:
    """Whether the value is an integer of Python or NumPy, and no truth value."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _read(image: Tensor) -> str:
    """How an image is read, for errors about one value for each axis."""
    return f"image (N, C, *spatial) = {tuple(image.shape)}"


def _roi(roi: int | Sequence[int | None], image: Tensor) -> tuple[int, ...]:
    spatial = image.shape[2:]
    several = _values(roi)
    given: tuple[Any, ...] = (roi,) * len(spatial) if several is None else several
    missing = len(given) - len(spatial)
    if missing in MISSING:
        raise ValueError(
            f"{OP}: image must have shape (N, C, *spatial) with {len(given)} spatial dimensions for roi {roi!r}, "
            f"got {tuple(image.shape)}, which has {MISSING[missing]}"
        )
    if missing or not all(size is None or _is_integer(size) for size in given):
        raise ValueError(
            f"{OP}: roi must be one integer, or {len(spatial)} integers, one for each axis, got {roi!r} "
            f"for {_read(image)}"
        )
    return tuple(n if size is None or size < 1 else int(size) for size, n in zip(given, spatial, strict=True))


def _for_axes(
    name: str, value: float | Sequence[float], image: Tensor, text: str, fits: Callable[[float], bool]
) -> tuple[float, ...]:
    """One number for each axis."""
    dims = image.dim() - 2
    several = _values(value)
    given: tuple[Any, ...] = (value,) * dims if several is None else several
    if len(given) != dims or not all(isinstance(one, Real) and fits(float(one)) for one in given):
        raise ValueError(f"{OP}: {name} must be one number {text}, or {dims} of them, got {value!r} for {_read(image)}")
    return given


def _mirrored_axes(mirror: Sequence[int], image: Tensor) -> list[tuple[int, ...]]:
    """Every set of axes of a window that is mirrored, in the order of nnU-Net."""
    dims, given = image.dim() - 2, _values(mirror)
    if given is None or len(set(given)) != len(given) or not all(axis in range(dims) for axis in given):
        raise ValueError(
            f"{OP}: mirror must have different axes from 0 to {dims - 1}, got {mirror!r} for {_read(image)}"
        )
    axes = [int(axis) + 2 for axis in given]
    sets: Iterable[tuple[int, ...]] = chain.from_iterable(combinations(axes, i + 1) for i in range(len(axes)))
    return list(sets)


def _padded(image: Tensor, roi: tuple[int, ...], mode: str, cval: float) -> tuple[Tensor, tuple[int, ...]]:
    """The image with at least the sizes of a window, and the number of added positions before it along each axis."""
    missing = [max(size - n, 0) for size, n in zip(roi, image.shape[2:], strict=True)]
    before = tuple(n // 2 for n in missing)
    if any(missing):
        pads = [(b, n - b) for b, n in zip(before, missing, strict=True)]
        image = F.pad(image, list(chain.from_iterable(reversed(pads))), mode, cval)
    return image, before
