"""Functions of Triton's interpreter on operands that need no conversion, computed by one call of numpy.

``quick(name, slow)`` is an operator of ``tl.tensor``, and ``FUNCTIONS`` holds functions of ``triton.language``.  They
compute the common cases themselves: two operands of one dtype, or of two dtypes of integers, whose shapes broadcast as
numpy's do; a tensor and a number; a pointer plus an offset; a new axis; and a block that moves with a mask of its own
shape.  Every other case, and every error, is left to ``slow``, the function of Triton.  The interpreter calls the same
functions of numpy on the same values, after a dozen calls that find that there is nothing to convert.
"""

import inspect
from collections.abc import Callable

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, interpreter_builder

DTYPES = {"int32": np.int32, "int64": np.int64, "fp32": np.float32, "fp64": np.float64}
FLOATS, INTEGERS = ("fp32", "fp64"), ("int32", "int64")
ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
COMPARISONS = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal,
               "ne": np.not_equal}  # fmt: skip
# Functions of the interpreter's builder, and the dtypes that both operands may have.
BUILT = {
    **dict.fromkeys(("and", "or", "xor"), ("int1", *INTEGERS)),
    **dict.fromkeys(("floordiv", "mod"), INTEGERS),
    "truediv": FLOATS,
}
BUILDERS = {"floordiv": "create_sdiv", "mod": "create_srem", "truediv": "create_fdiv"}
LEAST, MOST = -(2**31), 2**31 - 1
# The interpreter ignores the arguments that follow the pointers, the mask, and what else is moved.
_POLICY = {
    name: (None,) * (len(inspect.signature(getattr(InterpreterBuilder, name)).parameters) - 4)
    for name in ("create_masked_load", "create_masked_store")
}
_HINTS = {"cache_modifier", "eviction_policy"}
_KNOWN_HINTS = {"", ".ca", ".cg", ".cs", "evict_first", "evict_last"}
_ZEROS = ("0", "0.0")
_WHOLE = slice(None)

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


def _value(operand: object) -> object:
    return operand.value if type(operand) is tl.constexpr else operand


def quick(name: str, slow: Callable) -> Callable:
    """The operator ``name`` of ``tl.tensor``, such as ``__add__`` or ``__radd__``."""
    if name == "__getitem__":
        return _new_axes(slow)
    plain = name.strip("_")
    reflected = plain not in COMPARISONS and plain not in BUILT and plain.startswith("r")
    plain = plain.removeprefix("r") if reflected else plain
    if plain in BUILT:
        return _built(BUILT[plain], BUILDERS.get(plain, f"create_{plain}"), reflected, slow)
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
            name = other.dtype.name
            of = _common_type(a, other) if name == dtype or (name in INTEGERS and dtype in INTEGERS) else None
            data = other.handle.data
            if name != dtype and of is not None:
                of = of.with_element_ty(tl.int64) if of.is_block() else tl.int64
        else:
            of, data = a.type, _constant(other, dtype)
        if of is None or data is None:
            return slow(a, b)
        result = function(data, a.handle.data) if reflected else function(a.handle.data, data)
        if compares:
            of = of.with_element_ty(tl.int1) if of.is_block() else tl.int1
        return tl.tensor(_handle(result, of.scalar), of)

    return operator


def _built(dtypes: tuple[str, ...], function: str, reflected: bool, slow: Callable) -> Callable:
    """An operator that a function of the interpreter's builder computes, on operands of one dtype."""

    def operator(a: tl.tensor, b: object) -> tl.tensor:
        other, dtype = _value(b), a.dtype
        if dtype.name not in dtypes:
            return slow(a, b)
        if type(other) is tl.tensor:
            of = _common_type(a, other) if other.dtype.name == dtype.name else None
            handle = other.handle
        else:
            data = _constant(other, dtype.name)
            of, handle = (None, None) if data is None else (a.type, _handle(data, dtype))
        if of is None:
            return slow(a, b)
        handles = (handle, a.handle) if reflected else (a.handle, handle)
        return tl.tensor(getattr(interpreter_builder, function)(*handles), of)

    return operator


def _new_axes(slow: Callable) -> Callable:
    """``x[:, None]``"""

    def operator(a: tl.tensor, slices: object) -> tl.tensor:
        if type(slices) is not tuple or not a.type.is_block():
            return slow(a, slices)
        if not all(at is None or (type(at) is slice and at == _WHOLE) for at in slices):
            return slow(a, slices)
        if len(slices) - slices.count(None) > len(a.type.sizes):
            return slow(a, slices)
        data = a.handle.data[slices]
        return tl.tensor(_handle(data, a.dtype), tl.block_type(a.dtype, [*data.shape]))

    return operator


def _sizes(operand: object) -> tuple[int, ...] | None:
    """The shape of a block; () for a single value in a tensor, None for anything else."""
    if type(operand) is not tl.tensor:
        return None
    return operand.type.sizes if operand.type.is_block() else ()


def _mask_of(pointer: tl.tensor, mask: object) -> TensorHandle | None:
    """The mask if it has the shape of the pointers; for no mask, one that is true everywhere."""
    if mask is None:
        return _handle(np.ones(pointer.handle.data.shape, bool), tl.int1)
    return mask.handle if _sizes(mask) == _sizes(pointer) and mask.dtype.name == "int1" else None


def _moves_plainly(pointer: object, hints: dict[str, object]) -> bool:
    """Whether these are pointers to a dtype that memory holds as it is, and nothing special is asked for."""
    if type(pointer) is not tl.tensor or not pointer.dtype.is_ptr():
        return False
    element = pointer.dtype.element_ty
    if element.is_ptr() or element.name == "int1":
        return False
    return all(name in _HINTS and _value(hint) in _KNOWN_HINTS for name, hint in hints.items())


def _filling(pointer: tl.tensor, number: object) -> tuple[bool, TensorHandle | None]:
    """Whether what a load returns where its mask is false is a number that needs no rounding, and that number.

    Without a number, the interpreter returns zero there.
    """
    if number is None or (type(number) in (int, float) and repr(number) in _ZEROS):
        return True, None
    element = pointer.dtype.element_ty
    if element.name not in FLOATS or type(number) is not float or float(np.float32(number)) != number:
        return False, None
    return True, _handle(np.full(pointer.handle.data.shape, number, DTYPES[element.name]), element)


def _load(slow: Callable) -> Callable:
    def load(pointer: object, mask: object = None, other: object = None, **hints: object) -> tl.tensor:
        given, number = _value(mask), _value(other)
        handle = _mask_of(pointer, given) if _moves_plainly(pointer, hints) else None
        if handle is None or (given is None and number is not None):
            return slow(pointer, mask, other, **hints)
        exact, filling = _filling(pointer, number)
        if not exact:
            return slow(pointer, mask, other, **hints)
        found = interpreter_builder.create_masked_load(pointer.handle, handle, filling, *_POLICY["create_masked_load"])
        element = pointer.dtype.element_ty
        return tl.tensor(found, pointer.type.with_element_ty(element) if pointer.type.is_block() else element)

    return load


def _store(slow: Callable) -> Callable:
    def store(pointer: object, value: object, mask: object = None, **hints: object) -> object:
        if _moves_plainly(pointer, hints) and _sizes(value) == _sizes(pointer) and not pointer.dtype.is_const():
            handle = _mask_of(pointer, _value(mask)) if value.dtype.name == pointer.dtype.element_ty.name else None
            if handle is not None:
                policy = _POLICY["create_masked_store"]
                return interpreter_builder.create_masked_store(pointer.handle, value.handle, handle, *policy)
        return slow(pointer, value, mask, **hints)

    return store


def _where(slow: Callable) -> Callable:
    def where(condition: object, x: object, y: object) -> tl.tensor:
        a, b = _value(x), _value(y)
        first, sizes = a if type(a) is tl.tensor else b, _sizes(condition)
        if sizes is None or condition.dtype.name != "int1" or type(first) is not tl.tensor:
            return slow(condition, x, y)
        dtype = first.dtype
        handles = [_chosen(operand, dtype, sizes) for operand in (a, b)]
        if dtype.is_ptr() or any(handle is None for handle in handles):
            return slow(condition, x, y)
        found = interpreter_builder.create_select(condition.handle, *handles)
        return tl.tensor(found, condition.type.with_element_ty(dtype) if sizes else dtype)

    return where


def _chosen(operand: object, dtype: tl.dtype, sizes: tuple[int, ...]) -> TensorHandle | None:
    """An operand of ``where`` that has the dtype and the shape of the result, or is one value."""
    if type(operand) is not tl.tensor:
        data = _constant(operand, dtype.name)
        return None if data is None else _handle(data, dtype)
    return operand.handle if operand.dtype.name == dtype.name and _sizes(operand) in ((), sizes) else None


# Functions of ``triton.language``, each made from Triton's own.
FUNCTIONS = {"load": _load, "store": _store, "where": _where}
