"""Triton's interpreter, made several times faster without a change to any value that it computes.

The interpreter spends most of its time on Python objects, not on arrays: it builds the type of every block anew, makes
new tensors for every launch, patches ``triton.language`` again, computes a check of integer overflows whose result it
discards, and passes each operator through a dozen calls.
``fast()`` changes only these parts.  The tests of the kernels, which compare with float64, run with it.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from unittest import mock

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def fast() -> contextlib.ExitStack:
    """Inside, kernels that run in the interpreter take a fraction of the time."""
    stack = contextlib.ExitStack()
    for change in (uncopied_arguments, patched_language, cached_types, quick_operators, without_unused_checks):
        stack.enter_context(change())
    return stack


@contextlib.contextmanager
def uncopied_arguments() -> Iterator[None]:
    """Inside, a launch works on its tensors, which are on the CPU already.

    The interpreter makes new tensors of the same memory.  The function that makes them refers to itself, so that the
    memory of every launch stays until the garbage collector looks, and a test may leave 20 GB.
    """

    def arguments(self, args, kwargs):
        tensors = [arg for arg in (*args, *kwargs.values()) if hasattr(arg, "data_ptr")]
        assert all(t.device.type == "cpu" for t in tensors)
        return list(args), kwargs

    def nothing(self, args, host_args, kwargs, host_kwargs):
        pass

    owner = interpreter.GridExecutor
    with mock.patch.object(owner, "_init_args_hst", arguments), mock.patch.object(owner, "_restore_args_dev", nothing):
        yield


class _Patches:
    """The attributes of ``triton.language`` that a launch replaces, found once, and set and restored quickly."""

    def __init__(self, patch: Callable) -> None:
        self.values: list[tuple[object, str, object]] = []
        found = self.values

        class Recording(interpreter._LangPatchScope):
            def set_attr(self, obj: object, name: str, value: object) -> None:
                found.append((obj, name, value))
                super().set_attr(obj, name, value)

        both_modules = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
        with mock.patch.object(interpreter, "_LangPatchScope", Recording):
            with mock.patch.object(interpreter, "_patch_attr", _patch_attr):
                scope = patch(both_modules)
            # Triton 3.6 converts arrays of one element in a way that numpy 2.4 forbids; later versions do it like this.
            scope.set_attr(tl.tensor, "__index__", lambda self: int(self.handle.data.item()))
        scope.restore()
        # A patch of an inherited attribute is removed at the end, because the class has no own value to restore.
        self.originals = [(obj, name, vars(obj).get(name, _MISSING)) for obj, name, _ in self.values]

    def apply(self) -> None:
        for obj, name, value in self.values:
            setattr(obj, name, value)

    def restore(self) -> None:
        for obj, name, original in self.originals:
            if original is _MISSING:
                if name in vars(obj):
                    delattr(obj, name)
            else:
                setattr(obj, name, original)


_MISSING = object()


def _patch_attr(obj, name, member, builder, scope) -> None:
    """Replaces the interpreter's ``_patch_attr`` without building a new dictionary of keywords for each call."""
    function = getattr(member, "__wrapped__", member)
    semantic = interpreter.interpreter_semantic

    def call(*args, **kwargs):
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    scope.set_attr(obj, name, quick(name, call) if obj is tl.tensor else call)


DTYPES = {"int32": np.int32, "int64": np.int64, "fp32": np.float32, "fp64": np.float64}
FLOATS, INTEGERS = ("fp32", "fp64"), ("int32", "int64")
ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
COMPARISONS = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal,
               "ne": np.not_equal}  # fmt: skip
LEAST, MOST = -(2**31), 2**31 - 1


def _handle(data: np.ndarray, dtype: tl.dtype) -> interpreter.TensorHandle:
    """A handle without the check that ``data`` fits ``dtype``."""
    handle = object.__new__(interpreter.TensorHandle)
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
    pairs = [*zip(of_a.sizes, of_b.sizes, strict=False)]
    if len(of_a.sizes) == len(of_b.sizes) and all(m == n or 1 in (m, n) for m, n in pairs):
        return tl.block_type(of_a.scalar, [max(pair) for pair in pairs])
    return None


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
    """The operator ``name`` of ``tl.tensor``, such as ``__add__`` or ``__radd__``, computed by one call of numpy.

    It computes the common cases itself: two operands of one dtype, or of two dtypes of integers, whose shapes broadcast
    as numpy's do; a tensor and a number; and a pointer plus an offset.  Every other case, and every error, is left to
    ``slow``, the operator of Triton.  Triton calls the same function of numpy on the same values, after a dozen calls
    that find that there is nothing to convert.
    """
    plain = name.strip("_")
    reflected = plain.startswith("r")
    plain = plain.removeprefix("r")
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


@contextlib.contextmanager
def patched_language() -> Iterator[None]:
    """Inside, a launch replaces the functions of ``triton.language`` once, from a list.

    Triton's interpreter replaces them again for each launch, and whenever one kernel function calls another.
    """
    patch = interpreter._patch_lang
    patches: _Patches | None = None
    patched = False
    nothing = interpreter._LangPatchScope()

    class Outermost:
        def restore(self) -> None:
            nonlocal patched
            patched = False
            patches.restore()

    def patch_outermost(fn):
        nonlocal patched, patches
        if patched:
            return nothing
        if patches is None:
            patches = _Patches(patch)
        patches.apply()
        patched = True
        return Outermost()

    with mock.patch.object(interpreter, "_patch_lang", patch_outermost):
        yield


@contextlib.contextmanager
def cached_types() -> Iterator[None]:
    """Inside, the types of blocks, and the attributes that tensors copy from them, are built once for each shape."""
    blocks: dict[tuple, dict] = {}
    tensors: dict[tuple, dict] = {}
    others: dict[tuple, tl.block_type] = {}
    dtypes: dict[str, object] = {}
    block_init, tensor_init, np_dtype = tl.block_type.__init__, tl.tensor.__init__, interpreter._get_np_dtype
    block_to_ir, block_equal = tl.block_type.to_ir, tl.block_type.__eq__

    def init_block(self, element_ty, shape):
        values = shape.values if isinstance(shape, tl.core.tuple) else shape
        if not isinstance(values, (list, tuple)) or not isinstance(element_ty, tl.dtype):
            block_init(self, element_ty, shape)
            return
        key = (element_ty.name, *[s.value if isinstance(s, tl.constexpr) else s for s in values])
        known = blocks.get(key)
        if known is None:
            block_init(self, element_ty, shape)
            known = blocks[key] = {name: value for name, value in vars(self).items() if name != "element_ty"}
            known["key"], known["sizes"] = key, key[1:]
        self.__dict__.update(known)
        self.element_ty = element_ty

    def init_tensor(self, handle, of):
        sizes = of.sizes if of.is_block() else ()
        known = tensors.get(sizes)
        if known is None:
            tensor_init(self, handle, of)
            known = tensors[sizes] = {name: vars(self)[name] for name in vars(self) if name in ("shape", "numel")}
        self.__dict__.update(known)
        self.handle, self.type, self.dtype = handle, of, of.scalar

    def with_element_ty(self, scalar_ty):
        key = self.key, scalar_ty.name
        if key not in others:
            others[key] = tl.block_type(scalar_ty, self.shape)
        return others[key]

    def np_dtype_of(dtype):
        name = dtype.name
        if name not in dtypes:
            dtypes[name] = np_dtype(dtype)
        return dtypes[name]

    def same_block(self, other):
        # The name of a pointer type does not contain its address space.
        if isinstance(other, tl.block_type) and not self.element_ty.is_ptr():
            return self.key == other.key
        return block_equal(self, other)

    def to_ir(self, builder):
        return self if builder is interpreter.interpreter_builder else block_to_ir(self, builder)

    changes = {"__init__": init_block, "__eq__": same_block, "to_ir": to_ir, "with_element_ty": with_element_ty}
    with (
        mock.patch.multiple(tl.block_type, **changes),
        mock.patch.object(tl.tensor, "__init__", init_tensor),
        mock.patch.object(interpreter, "_get_np_dtype", np_dtype_of),
    ):
        yield


@contextlib.contextmanager
def quick_operators() -> Iterator[None]:
    """Inside, operands of equal dtype and shape are not cast or broadcast, and a type quickly equals itself."""
    cast, broadcast = TritonSemantic.cast, TritonSemantic.broadcast_impl_value
    computation_type, equal = TritonSemantic.computation_type_impl, tl.dtype.__eq__
    computed: dict[tuple, tl.dtype] = {}

    def cast_if_needed(self, value, dst_ty, *args, **kwargs):
        source, target = value.type.scalar, dst_ty.scalar
        if source.name == target.name and not source.is_ptr():
            return value
        return cast(self, value, dst_ty, *args, **kwargs)

    def broadcast_if_needed(self, lhs, rhs):
        a, b = lhs.type, rhs.type
        if a.is_block():
            if b.is_block() and a.sizes == b.sizes:
                return lhs, rhs
        elif not b.is_block():
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    def computation_type_of(self, a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod):
        key = a_ty.name, a_is_scalar, b_ty.name, b_is_scalar, div_or_mod
        if key not in computed:
            computed[key] = computation_type(self, a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod)
        return computed[key]

    def same_dtype(self, other):
        if self is other:
            return True
        return self.name == other.name if type(other) is tl.dtype else equal(self, other)

    changes = {"cast": cast_if_needed, "broadcast_impl_value": broadcast_if_needed}
    changes |= {"computation_type_impl": computation_type_of}
    with mock.patch.multiple(TritonSemantic, **changes), mock.patch.object(tl.dtype, "__eq__", same_dtype):
        yield


@contextlib.contextmanager
def without_unused_checks() -> Iterator[None]:
    """Inside, integer operations are not checked for overflow.

    The interpreter always computes the check, but asserts its result only in debugged kernels; no test has one.
    """
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    with mock.patch.object(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False)):
        yield
