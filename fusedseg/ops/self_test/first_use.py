"""Tests a family of kernels when it is to run for the first time on a kind of GPU, and warns if it fails.

A failure of any kind makes the family run on aten in this process: the kernel does not compile, it needs more shared
memory or registers than the GPU has, it cannot be launched, or its result is wrong.  Every process tests for itself;
Triton keeps the compiled kernels on disk.
"""

import functools
import threading
import time
import traceback
import warnings
from typing import NamedTuple

import torch

from ... import _backend, _torch
from ..ahead import compile_kernels
from ..registry import FAMILIES

MORE = "python -m fusedseg doctor --gpu"
REPORT = f"{MORE} --json fusedseg.json"
TEXT_LENGTH = 300
ATEN = "PyTorch's own ops take their place"


class WrongResult(Exception):
    """A kernel ran, and its result is not that of its reference."""


class SelfTestResult(NamedTuple):
    """The result of a self-test: ``kind`` of failure and ``text`` of the error, both "" if the test has passed."""

    kind: str = ""
    text: str = ""
    seconds: float = 0.0


# The results that this process knows, for a family, a dtype and a model of GPU, and the lock of its threads.
_known: dict[tuple[str, torch.dtype, str], SelfTestResult] = {}
_deciding = threading.Lock()


def compile_first(family: str, dtype: torch.dtype, device: torch.device) -> None:
    """Compiles the kernels of a self-test in threads, before the test launches them one after the other."""
    if FAMILIES[family].compiles:
        compile_kernels(lambda _: list(FAMILIES[family].self_test(dtype, device)), (), device)


def compare(family: str, dtype: torch.dtype, device: torch.device) -> float:
    """Runs the self-test of a family, and returns the largest relative error of a result.

    Raises:
        WrongResult: a result is off by more than its tolerance.
    """
    results = list(FAMILIES[family].self_test(dtype, device))
    # The results come to the host together, so that it waits for the device once.
    expected = [of.expected.to(of.found.device) for of in results]
    errors = [(of.found.double() - right).norm() / right.norm() for of, right in zip(results, expected, strict=True)]
    for of, error in zip(results, torch.stack(errors).tolist(), strict=True):
        # The condition is `not <=` instead of `>`, because NaN is no agreement either.
        if not error <= of.tolerance:
            raise WrongResult(f"{of.what} is off by {error:.1e} of its size, and {of.tolerance:.0e} is allowed")
    return max(errors).item()


@functools.cache
def model_of(device: torch.device) -> str:
    """The name and the architecture of a GPU.  GPUs of one model share their results."""
    if device.type != "cuda":
        return str(device)
    return f"{torch.cuda.get_device_name(device)} ({_backend.architecture(device)})"


def classify(error: BaseException) -> SelfTestResult:
    """The kind of a failure, and the first lines of its error."""
    names = {cls.__name__ for cls in type(error).__mro__}
    text = " ".join(str(error).split())
    if isinstance(error, WrongResult):
        kind = "wrong result"
    elif "OutOfResources" in names:
        kind = "out of the GPU's resources"
    elif names & {"CompilationError", "PTXASError"} or "PassManager" in text:
        kind = "compilation failed"
    elif "Triton Error" in text or "CUDA error" in text or "HIP error" in text:
        kind = "launch failed"
    else:
        kind = "error"
    error_name = "" if isinstance(error, WrongResult) else f"{type(error).__name__}: "
    text = error_name + text
    return SelfTestResult(kind, text if len(text) <= TEXT_LENGTH else text[: TEXT_LENGTH - 1] + "…")


def test_now(family: str, dtype: torch.dtype, device: torch.device) -> tuple[SelfTestResult, str]:
    """Tests a family on a device: the result, and the traceback of a failure.

    The test runs in a thread and on a stream of its own.  So the caller's modes, hooks, autocast and streams do not
    affect it, and it does not wait for a collective that the caller has queued.

    Raises:
        torch.OutOfMemoryError: there is no memory for the test, which says nothing about the kernels.
    """
    failed: list[tuple[BaseException, str]] = []

    def run() -> None:
        try:
            with torch.no_grad():
                if device.type != "cuda":
                    compare(family, dtype, device)
                    return
                with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
                    compile_first(family, dtype, device)
                    compare(family, dtype, device)
        # Compilers and drivers have exceptions of many classes.
        except Exception as error:
            failed.append((error, traceback.format_exc()))

    start = time.perf_counter()
    with _backend.may_wait(device):
        thread = threading.Thread(target=run, name="fusedseg self-test", daemon=True)
        thread.start()
        thread.join()
    seconds = round(time.perf_counter() - start, 3)
    if not failed:
        return SelfTestResult(seconds=seconds), ""
    error, trace = failed[0]
    if isinstance(error, torch.OutOfMemoryError):
        raise error
    return classify(error)._replace(seconds=seconds), trace


def can_test(device: torch.device) -> bool:
    """Whether a test may run now: no graph is captured or traced, and no transform of ``torch.func`` is active."""
    if torch.compiler.is_compiling() or _torch.are_functorch_transforms_active():
        return False
    if device.type != "cuda":
        return True
    with torch.cuda.device(device):
        return not torch.cuda.is_current_stream_capturing()


def first_use(family: str, dtype: torch.dtype, device: torch.device) -> str | None:
    """The reason why a family of kernels must not run on a device, "" if it may, or None if it cannot be tested now."""
    key = (family, dtype, model_of(device))
    with _deciding:
        result = _known.get(key)
        if result is None:
            if not can_test(device):
                return None
            result = _known[key] = _tested(family, dtype, device)
    if not result.kind:
        return ""
    return f"the self-test of its {family} kernels in {short(dtype)} failed, {result.kind}: {result.text}"


def _tested(family: str, dtype: torch.dtype, device: torch.device) -> SelfTestResult:
    try:
        result, _ = test_now(family, dtype, device)
    except torch.OutOfMemoryError:
        # The kernels run untested in this process, and the next process tests them.
        return SelfTestResult()
    if result.kind and not answers(device):
        raise RuntimeError(
            f"{message(family, dtype, device, result)} The failure has left {device} unusable for this process: start "
            "the program again with FUSEDSEG_BACKEND=aten, which uses none of these kernels."
        )
    if result.kind:
        warnings.warn(message(family, dtype, device, result), RuntimeWarning, stacklevel=3)
    return result


def answers(device: torch.device) -> bool:
    """Whether a device still computes.  After an illegal access every call of this process fails."""
    try:
        # A graph's kernels are listed by a call on fake tensors, which have no values.
        with _torch.no_dispatch_modes():
            return torch.ones(2, device=device).sum().item() == 2
    except RuntimeError:
        return False


def short(dtype: torch.dtype) -> str:
    """The name of a dtype without the name of its package."""
    return str(dtype).removeprefix("torch.")


def message(family: str, dtype: torch.dtype, device: torch.device, result: SelfTestResult) -> str:
    """The warning about a failure: what failed, what happens now, how to see more, and what to attach to a report."""
    instead = FAMILIES[family].instead
    what = "calls" if instead else "Triton kernels"
    return (
        f"fusedseg: the {what} of '{family}' in {short(dtype)} failed their self-test on "
        f"{model_of(device)}, {result.kind}: {result.text}. {instead or ATEN}, so results are right, and "
        f"training is slower. `{MORE}` shows more and tests again. Please report this, and attach the file "
        f"that `{REPORT}` writes. FUSEDSEG_SELF_TEST=0 runs the kernels without this test."
    )


_backend.at_first_use(first_use)
