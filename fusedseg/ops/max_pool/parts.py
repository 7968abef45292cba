"""Parts of the tensors of a max-pool on aten ops, which stay in a CPU's cache."""

from collections.abc import Iterator

from torch import Tensor

from .windows import Pool

CHUNK_BYTES = 2**21
# Chunks of channels_last tensors are larger, because fewer chunks are faster there than smaller ones.
ROWS_CHUNK_BYTES = 2**22


def parts(
    x: Tensor, z: Tensor, rows: bool, pool: Pool, split: bool
) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...], Pool]]:
    """Parts of x, each with the part of z that depends on it alone, and the pool from one to the other.

    A part is a range of samples and channels that is dense in memory.  In channels_last it may be a range of the first
    spatial dimension if ``split`` is True.  Such parts of x overlap if windows do.
    """
    everything = slice(None)
    if x.device.type != "cpu":
        yield (everything,), (everything,), pool
        return
    N, C, count = *x.shape[:2], z.shape[2]
    nbytes = ROWS_CHUNK_BYTES if rows else CHUNK_BYTES
    planes = max(1, nbytes // (x.element_size() * x[0, 0].numel()))
    samples, channels = max(1, planes // C), C if rows else min(planes, C)
    if rows and samples == 1 and split:
        of_row = x.element_size() * pool.stride[0] * x[0, :, 0].numel()
        ranges = list(_ranges(x.shape[2], count, pool, max(1, nbytes // of_row)))
        for n in range(N):
            one = slice(n, n + 1)
            for of_x, of_z, inner in ranges:
                yield (one, everything, of_x), (one, everything, of_z), inner
        return
    for n in range(0, N, samples):
        for c in range(0, C, channels):
            part = slice(n, n + samples), slice(c, c + channels)
            yield part, part, pool


def _ranges(size: int, count: int, pool: Pool, step: int) -> Iterator[tuple[slice, slice, Pool]]:
    """Ranges of the first spatial dimension of x, of the windows inside them, and the pool of each range.

    aten pads both ends of a range, so only the first range may have padding.  There is one range for all windows if
    that is not possible.
    """
    (k, *_), (s, *_), (p, *others), (d, *_), ceil_mode = pool
    reach = (k - 1) * d + 1
    if p and (p >= s or ceil_mode or (count - 1) * s - p + reach > size):
        step = count
    inner = pool._replace(padding=(0, *others))
    for o in range(0, count, step):
        last = o + step >= count
        end = size if last else (o + step - 1) * s - p + reach
        yield slice(max(0, o * s - p), end), slice(o, o + step), inner if o else pool
