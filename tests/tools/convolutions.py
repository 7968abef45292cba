"""Convolutions of a CPU whose results have the strides that a GPU gives them.

Half precision is computed in fp32 and rounded once, as a GPU does.  A CPU without such products takes far longer.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, get_kernel

from fusedseg._torch import convolutions_of_a_gpu, format_of_cudnn
from fusedseg.ops.check import HALF

NAMES = ("convolution", "convolution_backward")


@contextlib.contextmanager
def strides_of_a_gpu() -> Iterator[None]:
    """A CPU computes in channels_last what oneDNN does: bf16 with AVX-512, fp16 on the newest CPUs, and small volumes
    with more than one thread.  Other results are contiguous, and so a graph would lack what is to be tested in it."""
    forward, backward = (get_kernel(f"aten::{name}", "CPU") for name in NAMES)

    def computed(kernel: Any, keys: Any, x: Tensor, arguments: tuple[Any, ...]) -> Any:
        if x.dtype not in HALF:
            return kernel.call_boxed(keys, *arguments)
        return kernel.call_boxed(keys, *(a.float() if isinstance(a, Tensor) else a for a in arguments))

    def convolution(keys: Any, *arguments: Any) -> Tensor:
        x, weight = arguments[:2]
        return computed(forward, keys, x, arguments).to(x.dtype, memory_format=format_of_cudnn(x, weight))

    def convolution_backward(keys: Any, *arguments: Any) -> tuple[Tensor | None, ...]:
        _, x, weight = arguments[:3]
        dx, dw, db = computed(backward, keys, x, arguments)
        formats = (format_of_cudnn(x, weight),) * 2 + (torch.contiguous_format,)
        results = zip((dx, dw, db), formats, strict=True)
        return tuple(None if t is None else t.to(x.dtype, memory_format=fmt) for t, fmt in results)

    library = Library("aten", "IMPL")
    try:
        for name, function in zip(NAMES, (convolution, convolution_backward), strict=True):
            library.impl(name, function, "CPU", with_keyset=True)
        with convolutions_of_a_gpu():
            yield
    finally:
        library._destroy()
