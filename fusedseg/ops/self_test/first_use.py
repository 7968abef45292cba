"""Tests a family of kernels when it is to run for the first time on a kind of GPU, and warns if it fails.

A failure of any kind makes the family run on aten from then on: the kernel does not compile, it needs more shared
memory or registers than the GPU has, it cannot be launched, or wrong result.
"""

import threading
import time
import traceback
import warnings

import torch

from ... import _backend, _torch
from . import verdicts
from .checks import WrongResult, compare
from .verdicts import Environment, Verdict

MORE = "python -m fusedseg doctor --gpu"
REPORT = f"{MORE} --json fusedseg.json"
TEXT_LENGTH = 300

# The verdicts that this process knows, and the lock of its threads.
_known: dict[tuple[str, torch.dtype, Environment], Verdict] = {}
_deciding = threading.Lock()


def classify(error: BaseException) -> Verdict:
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
    return Verdict(kind, text if len(text) <= TEXT_LENGTH else text[: TEXT_LENGTH - 1] + "…")


def test_now(family: str, dtype: torch.dtype, device: torch.device) -> tuple[Verdict, str]:
    """Tests a family on a device: the verdict, and the traceback of a failure.

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
                    compare(family, dtype, device)
        # Compilers and drivers have exceptions of many classes.
        except Exception as error:
            failed.append((error, traceback.format_exc()))

    start = time.perf_counter()
    # The test waits for the device, which the user may have forbidden.
    forbids = torch.cuda.get_sync_debug_mode() if device.type == "cuda" else 0
    if forbids:
        torch.cuda.set_sync_debug_mode(0)
    try:
        thread = threading.Thread(target=run, name="fusedseg self-test", daemon=True)
        thread.start()
        thread.join()
    finally:
        if forbids:
            torch.cuda.set_sync_debug_mode(forbids)
    seconds = round(time.perf_counter() - start, 3)
    if not failed:
        return Verdict(seconds=seconds), ""
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
    of = verdicts.environment(device)
    key = (family, dtype, of)
    with _deciding:
        verdict = _known.get(key)
        known = verdict is not None
        if verdict is None:
            verdict = verdicts.read(verdicts.path_of(family, dtype, of), of)
        if verdict is None:
            if not can_test(device):
                return None
            verdict = _tested(family, dtype, device)
        _known[key] = verdict
    if not verdict.kind:
        return ""
    if not known:
        warnings.warn(message(family, dtype, of, verdict), RuntimeWarning, stacklevel=2)
    return f"the self-test of its {family} kernels in {short(dtype)} failed, {verdict.kind}: {verdict.text}"


def remembered(family: str, dtype: torch.dtype, device: torch.device) -> Verdict | None:
    """The verdict of an earlier test, of this process or another, or None."""
    of = verdicts.environment(device)
    return _known.get((family, dtype, of)) or verdicts.read(verdicts.path_of(family, dtype, of), of)


def record(family: str, dtype: torch.dtype, device: torch.device, verdict: Verdict) -> bool:
    """Replaces the verdict on disk, and returns whether it could be written."""
    of = verdicts.environment(device)
    return verdicts.write(verdicts.path_of(family, dtype, of), of, verdict)


def _tested(family: str, dtype: torch.dtype, device: torch.device) -> Verdict:
    of = verdicts.environment(device)
    try:
        verdict, _ = test_now(family, dtype, device)
    except torch.OutOfMemoryError:
        # The kernels run untested in this process, and the next process tests them.
        return Verdict()
    verdicts.write(verdicts.path_of(family, dtype, of), of, verdict)
    if verdict.kind and not answers(device):
        raise RuntimeError(
            f"{message(family, dtype, of, verdict)} The failure has left {device} unusable for this process: start "
            "the program again. It will not use these kernels."
        )
    return verdict


def answers(device: torch.device) -> bool:
    """Whether a device still computes.  After an illegal access every call of this process fails."""
    try:
        return torch.ones(2, device=device).sum().item() == 2
    except RuntimeError:
        return False


def short(dtype: torch.dtype) -> str:
    """The name of a dtype without the name of its package."""
    return str(dtype).removeprefix("torch.")


def message(family: str, dtype: torch.dtype, of: Environment, verdict: Verdict) -> str:
    """The warning about a failure: what failed, what happens now, how to see more, and what to attach to a report."""
    return (
        f"fusedseg: the Triton kernels of '{family}' in {short(dtype)} failed their self-test on {of.gpu} "
        f"({of.architecture}), {verdict.kind}: {verdict.text}. PyTorch's own ops take their place, so results are "
        f"right, and training is slower. `{MORE}` shows more and tests again. Please report this, and attach the file "
        f"that `{REPORT}` writes. FUSEDSEG_SELF_TEST=0 runs the kernels without this test."
    )


_backend.at_first_use(first_use)
