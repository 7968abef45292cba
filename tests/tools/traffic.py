"""Counts the bytes that Triton kernels load and store in the interpreter, by argument, and checks every address.

    with traffic() as moved:
        norm_act_fwd(x, ...)
    moved.loaded("norm_stats_kernel", "x_ptr") / x.nbytes      passes over x
    moved.total / x.nbytes                                         all bytes, in units of x

Lanes that are masked off do not count.  An access outside every argument, or an access that begins in one argument and
ends in another one, raises an error before it is made.  An atomic operation raises an error too, because results must
not depend on the order of programs.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator
from unittest import mock

import numpy as np
import torch
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder


class Moved:
    """Bytes moved, by (kernel, argument).  Arguments at the same address count under the name of the first argument."""

    def __init__(self) -> None:
        self.loads: Counter[tuple[str, str]] = Counter()
        self.stores: Counter[tuple[str, str]] = Counter()
        self.launches: list[str] = []

    @staticmethod
    def _sum(counter: Counter, kernel: str | None, arguments: tuple[str, ...]) -> int:
        return sum(
            nbytes
            for (of, name), nbytes in counter.items()
            if kernel in (None, of) and (not arguments or name in arguments)
        )

    def loaded(self, kernel: str | None = None, *arguments: str) -> int:
        """Bytes that a kernel (None: all kernels) loads from the named arguments (no name: all arguments)."""
        return self._sum(self.loads, kernel, arguments)

    def stored(self, kernel: str | None = None, *arguments: str) -> int:
        return self._sum(self.stores, kernel, arguments)

    @property
    def total(self) -> int:
        return self.loaded() + self.stored()


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of the first byte that the elements of a tensor occupy, and of the byte after the last one."""
    if not tensor.numel():
        return tensor.data_ptr(), tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


class _Counting:
    """Holds the launch that is running, and the bytes counted so far."""

    def __init__(self) -> None:
        self.moved = Moved()
        self.kernel = ""
        self.extents: dict[str, tuple[int, int]] = {}

    def launch(self, kernel: str, arguments: dict) -> None:
        self.kernel = kernel
        self.moved.launches.append(kernel)
        self.extents = {name: extent(arg) for name, arg in arguments.items() if isinstance(arg, torch.Tensor)}

    def touch(self, counter: Counter, ptrs: np.ndarray, mask: np.ndarray, itemsize: int) -> None:
        addresses = ptrs[mask if mask.shape == ptrs.shape else np.broadcast_to(mask, ptrs.shape)]
        if not addresses.size:
            return
        first, last = int(addresses.min()), int(addresses.max()) + itemsize
        for name, (start, stop) in self.extents.items():
            if start <= first and last <= stop:
                counter[self.kernel, name] += addresses.size * itemsize
                return
        outside = {name: max(start - first, last - stop) for name, (start, stop) in self.extents.items()}
        nearest = min(outside, key=outside.__getitem__)
        raise IndexError(f"{self.kernel} touches memory up to {outside[nearest]} bytes outside {nearest}")


def checked(device):
    """In the interpreter, every access must lie inside its argument; yields what was moved.  A GPU is not watched."""
    return traffic() if device.type == "cpu" else contextlib.nullcontext()


@contextlib.contextmanager
def traffic() -> Iterator[Moved]:
    counting = _Counting()
    call = GridExecutor.__call__
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def counted_call(self, *args, **kwargs):
        counting.launch(self.fn.__name__, dict(zip(self.arg_names, args, strict=False)) | kwargs)
        return call(self, *args, **kwargs)

    def counted_load(self, ptrs, mask, *args, **kwargs):
        counting.touch(counting.moved.loads, ptrs.data, mask.data, element_bytes(ptrs))
        return load(self, ptrs, mask, *args, **kwargs)

    def counted_store(self, ptrs, value, mask, *args, **kwargs):
        counting.touch(counting.moved.stores, ptrs.data, mask.data, element_bytes(ptrs))
        return store(self, ptrs, value, mask, *args, **kwargs)

    def element_bytes(ptrs) -> int:
        return max(1, ptrs.get_element_ty().primitive_bitwidth // 8)

    def refuse_atomic(self, *args, **kwargs):
        raise AssertionError(f"{counting.kernel} uses an atomic operation")

    changes = {
        "create_masked_load": counted_load,
        "create_masked_store": counted_store,
        "create_atomic_rmw": refuse_atomic,
        "create_atomic_cas": refuse_atomic,
    }
    with mock.patch.object(GridExecutor, "__call__", counted_call), mock.patch.multiple(InterpreterBuilder, **changes):
        yield counting.moved
