"""``python -m fusedseg doctor``: versions, the backend of each device and why, and whether the kernels work here.

On a GPU the kernels are launched and compared with PyTorch; without one they are compiled for GPUs that are not there.
"""

import importlib
import platform
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from . import _backend
from .ops.layout import layout_of

# (shape, what it reaches): one that a program keeps on chip, one that several programs share
SHAPES = {"one launch": (2, 8, 16, 16), "split": (2, 8, 128, 128)}
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
TARGETS = ("sm_80", "sm_90")
# fp32 against fp64 over 32768 values a channel: sums lose a few of the 24 bits
TOLERANCE = 1e-5
SLOPE = 0.01
# stride, padding, dilation and groups
CONVOLUTION = ((1, 1), (1, 1), (1, 1), 1)


def versions() -> Iterator[str]:
    from . import __version__

    yield f"fusedseg   {__version__}"
    yield f"python     {platform.python_version()} on {platform.system()} {platform.machine()}"
    yield f"torch      {torch.__version__}"
    for name in ("triton", "numpy"):
        yield f"{name:<10} {_version(name)}"
    yield f"CUDA       {torch.version.cuda or 'not in this build of torch'}"
    yield f"ROCm       {torch.version.hip or 'not in this build of torch'}"


def _version(name: str) -> str:
    try:
        return importlib.import_module(name).__version__
    except ImportError as error:
        return f"not installed ({error})"


def devices() -> list[torch.device]:
    return [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]


def describe(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    properties = torch.cuda.get_device_properties(device)
    arch = getattr(properties, "gcnArchName", "") if torch.version.hip else f"sm_{properties.major}{properties.minor}"
    return f"{device} ({properties.name}, {arch})"


def _launch(
    x: torch.Tensor, w: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, dz: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Forward and backward straight from the launchers; ``x`` is left alone."""
    from .kernels.conv_abn import conv_abn_fwd
    from .kernels.norm_act import norm_act_fwd
    from .kernels.norm_act_bwd import norm_act_bwd

    act, z, of_conv = ("leaky_relu", SLOPE), torch.empty_like(x), torch.empty_like(x)
    layout, running = layout_of(x), (None, None, True, 0.1, 1e-5, act, None)
    _, rstd, kept = norm_act_fwd(x, z, layout, weight, bias, *running)
    dx, dweight, dbias = norm_act_bwd(dz, z, layout, weight, bias, rstd, kept, None, True, act, torch.float32)
    conv_abn_fwd(x, w, of_conv, layout, layout, CONVOLUTION, None, weight, bias, *running, False)
    return {"z": z, "dx": dx, "dweight": dweight, "dbias": dbias, "z of a convolution": of_conv}


def _eager(
    x: torch.Tensor, w: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, dz: torch.Tensor
) -> dict[str, torch.Tensor]:
    x, w, weight, bias = (t.double().requires_grad_() for t in (x, w, weight, bias))

    def norm_act(y: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.batch_norm(y, None, None, weight, bias, training=True, eps=1e-5)
        return torch.nn.functional.leaky_relu(y, SLOPE)

    z = norm_act(x)
    dx, dweight, dbias = torch.autograd.grad(z, (x, weight, bias), dz.double())
    of_conv = norm_act(torch.nn.functional.conv2d(x, w, padding=1)).detach()
    return {"z": z.detach(), "dx": dx, "dweight": dweight, "dbias": dbias, "z of a convolution": of_conv}


def _inputs(shape: tuple[int, ...], memory_format: torch.memory_format, device: torch.device) -> tuple:
    generator = torch.Generator().manual_seed(0)
    x, dz = (torch.randn(shape, generator=generator).to(device, memory_format=memory_format) for _ in range(2))
    weight = torch.linspace(0.5, 1.5, shape[1], device=device)
    bias = torch.linspace(-0.5, 0.5, shape[1], device=device)
    w = torch.randn(shape[1], shape[1], 3, 3, generator=generator).to(device)
    return x, w, weight, bias, dz


def run_kernels(device: torch.device) -> str:
    """Launches on a GPU and compares with eager float64; RuntimeError where they disagree."""
    worst = 0.0
    for path, shape in SHAPES.items():
        for name, memory_format in FORMATS.items():
            inputs = _inputs(shape, memory_format, device)
            expected = _eager(*inputs)
            with torch.cuda.device_of(inputs[0]):
                found = _launch(*inputs)
            for what, value in found.items():
                error = float((value - expected[what]).norm() / expected[what].norm())
                # "not <=" rather than ">": NaN is no agreement either
                if not error <= TOLERANCE:
                    raise RuntimeError(f"{what} is off by {error:.1e} ({name}, {path}, {shape})")
                worst = max(worst, error)
    return f"ran, and agree with eager float64 to {worst:.0e}"


def compile_kernels(target: str) -> str:
    from .kernels.dry_run import dry_run

    with dry_run(target) as launches:
        for shape in SHAPES.values():
            for memory_format in FORMATS.values():
                _launch(*_inputs(shape, memory_format, torch.device("cpu")))
    return f"{len({launch.name for launch in launches})} kernels compiled, not run"


def kernels() -> Iterator[tuple[str, Callable[[], str]]]:
    """What there is to try: (where, a function that returns what it saw or raises)."""
    gpus = devices()[1:]
    for gpu in gpus:
        yield str(gpu), partial(run_kernels, gpu)
    if not gpus:
        for target in TARGETS:
            yield target, partial(compile_kernels, target)


def untried() -> str | None:
    """Why the kernels are not tried, or None."""
    if not _backend._has_triton():
        return "triton is not installed: every op runs on aten"
    if _backend._interpreted():
        return "TRITON_INTERPRET is set, with which Triton interprets kernels and compiles none; unset it"
    return None


def doctor() -> int:
    """Prints the report.  Returns 0, or 1 where something does not work that would be used."""
    problems = 0
    for line in versions():
        print(line)
    print(f"\nbackend    fusedseg.backend is {_backend.get()!r}")
    served = set()
    for device in devices():
        backend, why = _backend.explain(device)
        served.add(backend)
        print(f"  {describe(device)}: {backend} ({why})")
    if _backend.get() == "triton" and "triton" not in served:
        problems += 1
        print("  PROBLEM: Triton was asked for, and no device here can be served by it")
    print("\nkernels")
    if reason := untried():
        print(f"  not tried: {reason}")
        return min(problems, 1)
    for where, attempt in kernels():
        start = time.perf_counter()
        try:
            seen = attempt()
        # whatever a compiler or a driver raises is what is to be reported
        except Exception as error:
            problems += 1
            message = next(iter(str(error).strip().splitlines()), "")
            seen = f"PROBLEM: {type(error).__name__}: {message}"
        print(f"  {where}: {seen} ({time.perf_counter() - start:.1f} s)")
    return min(problems, 1)
