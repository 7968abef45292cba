"""Operators of Triton's interpreter on operands that need no conversion, computed by one call of numpy.

``quick(name, slow)`` is an operator of ``tl.tensor``.  It computes the common cases itself: two operands of one dtype,
whose shapes broadcast as numpy's do; a tensor and a number; and a pointer plus an offset.  Every other case, and every
error, is left to ``slow``, the operator of Triton.  The interpreter calls the same functions of numpy on the same
values, after a dozen calls that find that there is nothing to convert.
"""

from collections.abc import Callable

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

DTYPES = {"int32": np.int32, "int64": np.int64, "fp32": np.float32, "fp64": np.float64}
FLOATS, INTEGERS = ("fp32", "fp64"), ("int32", "int64")
ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
COMPARISONS = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal,
               "ne": np.not_equal}  # fmt: skip
LEAST, MOST = -(2**31), 2**31 - 1

_broadcast: dict[tuple, tl.dtype | None] = {}


def _handle(data: np.ndarray, dtype: tl.dtype) -> TensorHandle:
    """A handle without the check that ``data`` fits ``dtype``."""
    handle = object.__new__(TensorHandle)
    handle.data, handle.dtype, handle.attr = data, dtype, {}
    return handle


def _common_type(a: tl.tensor, b: tl.tensor) -> tl.dtype | None:
    """The type of ``a`` in the shape of ``a`` and ``b`` together; None where numpy and Triton may differ."""
    of_a, of_b = a.type, b.type
    if not of_b.is_block():
        return of_a
    if not of_a.is_block():
        return of_b.with_element_ty(of_a)
    if of_a.sizes == of_b.sizes:
        return of_a
    key = of_a.sizes, of_b.sizes, of_a.scalar.name
    if of_a.scalar.is_ptr() or key not in _broadcast:
        found = None
        pairs = [*zip(of_a.sizes, of_b.sizes, strict=False)]
        if len(of_a.sizes) == len(of_b.sizes) and all(m == n or 1 in (m, n) for m, n in pairs):
            found = tl.block_type(of_a.scalar, [max(pair) for pair in pairs])
        if of_a.scalar.is_ptr():
            return found
        _broadcast[key] = found
    return _broadcast[key]


def _constant(number: object, name: str) -> np.ndarray | None:
    """A number in the dtype of the tensor that it is combined with, if Triton takes that dtype."""
    if name in FLOATS and type(number) in (int, float):
        return np.array([number], DTYPES[name])
    if name in INTEGERS and type(number) is int and LEAST <= number <= MOST:
        return np.array([number], DTYPES[name])
    return None


def _plus_offset(pointer: tl.tensor, offset: object) -> tl.tensor | None:
    if type(offset) is not tl.tensor or offset.dtype.name not in INTEGERS:
        return None
    of = _common_type(pointer, offset)
    if of is None:
        return None
    nbytes = max(1, pointer.dtype.element_ty.primitive_bitwidth // 8)
    data = pointer.handle.data + nbytes * offset.handle.data.astype(np.uint64)
    return tl.tensor(_handle(data, pointer.handle.dtype), of)


def quick(name: str, slow: Callable) -> Callable:
    """The operator ``name`` of ``tl.tensor``, such as ``__add__`` or ``__radd__``."""
    plain = name.strip("_")
    reflected = plain not in COMPARISONS and plain.startswith("r")
    plain = plain.removeprefix("r") if reflected else plain
    function = ARITHMETIC.get(plain) or COMPARISONS.get(plain)
    if function is None:
        return slow
    compares = plain in COMPARISONS

    def operator(a: tl.tensor, b: object) -> tl.tensor:
        other = b.value if type(b) is tl.constexpr else b
        dtype = a.dtype.name
        if dtype not in DTYPES:
            found = _plus_offset(a, other) if plain == "add" and a.dtype.is_ptr() else None
            return slow(a, b) if found is None else found
        if type(other) is tl.tensor:
            of = _common_type(a, other) if other.dtype.name == dtype else None
            data = other.handle.data
        else:
            of, data = a.type, _constant(other, dtype)
        if of is None or data is None:
            return slow(a, b)
        result = function(data, a.handle.data) if reflected else function(a.handle.data, data)
        if compares:
            of = of.with_element_ty(tl.int1) if of.is_block() else tl.int1
        return tl.tensor(_handle(result, of.scalar), of)

    return operator
