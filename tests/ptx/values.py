"""Functions that translated blocks call by name, some of them imported from numpy, and the numpy types of values."""

import numpy as np
from numpy import absolute, exp2, fmax, fmin, full, log2, maximum, minimum, rint, sqrt, where  # noqa: F401

b, u1, u2, u4, u8 = np.bool_, np.uint8, np.uint16, np.uint32, np.uint64
i1, i2, i4, i8 = np.int8, np.int16, np.int32, np.int64
f2, f4, f8 = np.float16, np.float32, np.float64
NUMPY = {"b": b, "u1": u1, "u2": u2, "u4": u4, "u8": u8, "i1": i1, "i2": i2, "i4": i4, "i8": i8, "f4": f4, "f8": f8}
UNSIGNED = {0: "b", 1: "u1", 2: "u2", 4: "u4", 8: "u8"}
# The numpy type of each PTX type.  Halves, pairs of halves and tf32 are held as bits.
KINDS = {"pred": "b", "s8": "i1", "u8": "u1", "b8": "u1", "s16": "i2", "u16": "u2", "b16": "u2", "f16": "u2",
         "bf16": "u2", "s32": "i4", "u32": "u4", "b32": "u4", "f32": "f4", "f16x2": "u4", "bf16x2": "u4", "s16x2": "u4",
         "s64": "i8", "u64": "u8", "b64": "u8", "f64": "f8"}  # fmt: skip


def size_of(kind: str) -> int:
    return 0 if kind == "b" else int(kind[1])


def unsigned(kind: str) -> str:
    return UNSIGNED[size_of(kind)]


def merge(old, idx, new):
    """A copy of ``old`` with ``new`` at some lanes.  It is a copy because registers may share an array."""
    old = old.copy()
    old[idx] = new
    return old


def pack(n, small, large, *parts):
    """Packs adjacent parts into one number, with the first part in the lowest bits."""
    out = np.empty((n, len(parts)), small)
    for k, part in enumerate(parts):
        out[:, k] = part
    return out.view(large).reshape(n)


def parts_of(value, small):
    return np.ascontiguousarray(value)[:, None].view(small).T


def fma(x, y, z):
    """The product is exact in the next precision.  The sum is rounded twice, which differs in about 1 of 2**29 sums."""
    out = np.multiply(x, y, dtype={f4: f8, f8: np.longdouble}[x.dtype.type])
    return (out + z).astype(x.dtype)


def extreme(function, x, y):
    """A minimum or maximum, for which -0 is less than 0."""
    value, zero = function(x, y), (x == 0) & (y == 0)
    if not zero.any():
        return value
    return np.where(zero, x + y if function in (fmax, maximum) else -(-x - y), value)


def flushed(x):
    """Numbers too small for the usual exponents become zeros."""
    return np.where(np.abs(x) < f4(2.0**-126), np.copysign(f4(0), x), x)


def to_float(kind, bits):
    """fp32 from the bits of an fp16 or bf16."""
    if kind == "f16":
        return np.asarray(bits).view(f2).astype(f4)
    return (np.asarray(bits).astype(u4) << u4(16)).view(f4)


def from_float(kind, value):
    """The bits of the nearest fp16 or bf16."""
    value = np.asarray(value)
    if kind == "f16":
        bits, nan = value.astype(f2).view(u2), np.isnan(value)
        return np.where(nan, u2(0x7FFF), bits) if nan.any() else bits
    if value.dtype == f8:
        # The value is first rounded to an odd fp32, so that the second rounding knows whether bits were cut off.
        single = value.astype(f4)
        towards = single.view(u4) - (np.abs(single.astype(f8)) > np.abs(value)).astype(u4)
        exact = (single.astype(f8) == value) | ~np.isfinite(value)
        value = np.where(exact, single.view(u4), towards | u4(1)).view(f4)
    bits = value.view(u4)
    nearest = (bits + u4(0x7FFF) + (bits >> u4(16) & u4(1))) >> u4(16)
    return np.where(np.isnan(value), u2(0x7FFF), nearest.astype(u2))


def unordered(x, y):
    return np.isnan(x) if x is y else np.isnan(x) | np.isnan(y)


def to_integer(x, how, kind):
    """Converts with saturation; NaN becomes 0."""
    limits = np.iinfo(kind)
    whole = {"rni": np.rint, "rzi": np.trunc}[how](np.asarray(x).astype(f8))
    inside = (whole >= limits.min) & (whole < float(limits.max) + (limits.bits < 53))
    return np.where(inside, np.where(inside, whole, 0).astype(kind), np.where(whole < 0, limits.min, np.where(
        np.isnan(whole), 0, limits.max)).astype(kind))  # fmt: skip


def multiply_high(x, y, kind):
    bits = 8 * np.dtype(kind).itemsize
    product = np.asarray(x).astype(object) * np.asarray(y).astype(object)
    return (product >> bits).astype(kind)


def divide(x, y):
    """Divides and rounds towards zero.  A division by zero gives all ones, as on the hardware."""
    safe = np.where(y == 0, y.dtype.type(1), y)
    return np.where(y == 0, np.array(-1).astype(safe.dtype), (x - np.fmod(x, safe)) // safe)


def remainder(x, y):
    return np.where(y == 0, x, np.fmod(x, np.where(y == 0, y.dtype.type(1), y)))


def shift_left(x, by, kind):
    bits = 8 * np.dtype(kind).itemsize
    return np.where(by < bits, np.asarray(x) << np.minimum(by, bits - 1).astype(kind), kind(0))


def shift_right(x, by, kind):
    bits = 8 * np.dtype(kind).itemsize
    shifted = np.asarray(x) >> np.minimum(by, bits - 1).astype(kind)
    return shifted if np.issubdtype(kind, np.signedinteger) else np.where(by < bits, shifted, kind(0))


def funnel(low, high, by):
    """The upper half of 64 bits that are shifted to the left."""
    return (((high.astype(u8) << u8(32) | low.astype(u8)) << (by & u4(31)).astype(u8)) >> u8(32)).astype(u4)


def field(x, position, length, kind):
    """bfe: bits of a number.  A signed one extends the field's sign, or the number's where the field goes beyond it."""
    bits = 8 * np.dtype(kind).itemsize
    position, length = (np.asarray(v & u4(255)).astype(i8) for v in (position, length))
    inside = np.minimum(position + length, bits)
    up = np.clip(bits - inside, 0, bits - 1).astype(kind)
    down = np.clip(bits - inside + position, 0, bits - 1).astype(kind)
    out = (x << up) >> down
    if np.issubdtype(kind, np.signedinteger):
        # A field beyond the number holds its sign only.
        out = np.where(position >= bits, x >> kind(bits - 1), out)
        return np.where(length == 0, kind(0), out)
    return np.where((length == 0) | (position >= bits), kind(0), out)


def ones(x):
    """popc: how many of 32 bits are 1."""
    x = np.asarray(x).astype(u8)
    return sum(x >> u8(bit) & u8(1) for bit in range(32)).astype(u4)


def permute(x, y, selector):
    """prmt: each 4 bits of the selector choose a byte of y and x, or its sign."""
    both = (np.asarray(y).astype(u8) << u8(32)) | np.asarray(x).astype(u8)
    selector, out = np.asarray(selector).astype(u8), u8(0)
    for k in range(4):
        choice = (selector >> u8(4 * k)) & u8(15)
        byte = (both >> ((choice & u8(7)) * u8(8))) & u8(255)
        byte = np.where(choice & u8(8), np.where(byte & u8(128), u8(255), u8(0)), byte)
        out = out | (byte << u8(8 * k))
    return out.astype(u4)
