"""The bytes over a step, as PyTorch's allocators hand them out."""

from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import Any

import torch

from fusedseg.memory.meter import course_on_cpu


def allocator_course(step: Callable[[], Any], device: torch.device | str = "cpu") -> list[int]:
    """The bytes that the allocator had handed out after each allocation and each release in ``step()``, in order.

    They are those beyond the bytes before the step, and come from the same sources as ``fusedseg.memory``'s
    ``allocator_peak``.  On CUDA the order is that of the host, which runs ahead of the GPU, as the allocator does.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return course_on_cpu(step)
    torch.cuda.synchronize(device)
    # Traces without the stacks of Python.
    torch.cuda.memory._record_memory_history("all", context=None, device=device, clear_history=True)
    try:
        step()
        torch.cuda.synchronize(device)
        traces = torch.cuda.memory._snapshot(device)["device_traces"]
    finally:
        torch.cuda.memory._record_memory_history(None, device=device)
    index = torch.cuda.current_device() if device.index is None else device.index
    return course_of_trace(traces[index])


def course_of_trace(trace: Iterable[Mapping[str, Any]]) -> list[int]:
    """The bytes handed out after each event of a trace of PyTorch's CUDA allocator."""
    # A release is requested and then completed, later if another stream reads the memory.
    signs = {"alloc": 1, "free_completed": -1}
    return list(accumulate(signs[event["action"]] * event["size"] for event in trace if event["action"] in signs))
