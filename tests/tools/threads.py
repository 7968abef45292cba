"""How many threads torch computes with, and functions in threads of their own."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def in_threads(*functions: Callable[[], Any]) -> list[Any]:
    """The results of functions that run at once, each in a thread of its own; raises what one of them raises."""
    barrier = threading.Barrier(len(functions))

    def run(function: Callable[[], Any]) -> Any:
        barrier.wait()
        return function()

    with ThreadPoolExecutor(len(functions)) as pool:
        return list(pool.map(run, functions))
