"""``fusedseg doctor`` prints versions, the backend of each device with its reason, and whether the kernels work here.

Compiling the kernels takes long, so only ``--compile`` does it.  With a GPU, every kernel is then also launched and
compared with PyTorch in float64.  Without a GPU, every kernel is compiled for the architectures in ``TARGETS``.
"""

import importlib
import platform
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from . import _backend
from .cli import Progress
from .ops.layout import layout_of
from .ops.segmentation.spec import Spec, sizes_of

# Two shapes that take different launches: one program keeps a channel on chip, or several programs share it.
SHAPES = {"one launch": (2, 8, 16, 16), "split": (2, 8, 128, 128)}
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
TARGETS = ("sm_80", "sm_90")
# The kernels sum 32768 values per channel in fp32, which loses a few of the 24 bits.
TOLERANCE = 1e-5
SLOPE, EPS = 0.01, 1e-5
ACT = ("leaky_relu", SLOPE)
# A norm in training without running statistics and without kept channels.
NORM: dict[str, Any] = {"running_mean": None, "running_var": None, "training": True, "momentum": 0.1, "eps": EPS,
                        "act": ACT, "kept": None}  # fmt: skip
# The stride, padding, dilation and groups of the convolution.
CONVOLUTION = ((1, 1), (1, 1), (1, 1), 1)
POOL = ((2, 2), (0, 0), (1, 1), 1)
# A number of classes that do not fit in one tile.
MANY_CLASSES = 512


class Inputs(NamedTuple):
    """Inputs of the launches.

    x: the input of every op.  w: the weight of the convolution.  weight, bias: the parameters of the norm.
    dz, dpooled: the gradients of the results of the norm and of the pool.
    """

    x: Tensor
    w: Tensor
    weight: Tensor
    bias: Tensor
    dz: Tensor
    dpooled: Tensor


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


def _inputs(shape: tuple[int, ...], memory_format: torch.memory_format, device: torch.device) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    half = (*shape[:2], *(size // 2 for size in shape[2:]))
    x, dz, dpooled = (
        torch.randn(size, generator=generator).to(device, memory_format=memory_format) for size in (shape, shape, half)
    )
    weight = torch.linspace(0.5, 1.5, shape[1], device=device)
    bias = torch.linspace(-0.5, 0.5, shape[1], device=device)
    w = torch.randn(shape[1], shape[1], 3, 3, generator=generator).to(device)
    return Inputs(x, w, weight, bias, dz, dpooled)


def _norm_act(inputs: Inputs) -> dict[str, Tensor]:
    """Runs forward and backward through the launchers.  No check writes to ``inputs``."""
    from .kernels.norm_act import norm_act_fwd
    from .kernels.norm_act_bwd import norm_act_bwd

    x, _, weight, bias, dz, _ = inputs
    z, layout = torch.empty_like(x), layout_of(x)
    _, rstd, xhat_kept = norm_act_fwd(x, z, layout, weight=weight, bias=bias, **NORM)
    dx, dweight, dbias = norm_act_bwd(
        dz, z, layout, weight=weight, bias=bias, rstd=rstd, xhat_kept=xhat_kept,
        kept=None, training=True, act=ACT, dparam_dtype=torch.float32,
    )  # fmt: skip
    return {"z": z, "dx": dx, "dweight": dweight, "dbias": dbias}


def _conv_abn(inputs: Inputs) -> dict[str, Tensor]:
    from .kernels.conv_abn import conv_abn_fwd

    x, w, weight, bias, _, _ = inputs
    z, layout = torch.empty_like(x), layout_of(x)
    conv_abn_fwd(
        x, w, z, x_layout=layout, layout=layout, geometry=CONVOLUTION, conv_bias=None,
        weight=weight, bias=bias, **NORM, tf32=False,
    )  # fmt: skip
    return {"z": z}


def _max_pool(inputs: Inputs) -> dict[str, Tensor]:
    from .kernels.max_pool import max_pool_bwd, max_pool_fwd

    x, dpooled = inputs.x, inputs.dpooled
    layout = layout_of(x)
    assert layout is not None
    z, dx = torch.empty_like(dpooled), torch.empty_like(x)
    codes = torch.empty_like(z, dtype=torch.uint8)
    max_pool_fwd(x, z, codes, layout.rows, (2, 2), POOL)
    max_pool_bwd(dpooled, codes, dx, layout.rows, (2, 2), POOL)
    return {"z": z, "dx": dx}


def _logits(inputs: Inputs) -> dict[str, tuple[Tensor, Tensor]]:
    """Logits and labels: the input itself, and the input as MANY_CLASSES classes."""
    many = (inputs.x.shape[0], MANY_CLASSES, -1)
    pairs = {"few": (inputs.x, inputs.dz), "many": (inputs.x.reshape(many), inputs.dz.reshape(many))}
    return {name: (x, dz.argmax(1).short()) for name, (x, dz) in pairs.items()}


def _segmentation_sums(inputs: Inputs) -> dict[str, Tensor]:
    """The gradient is that of the sum of all sums."""
    from .kernels.segmentation_sums import segmentation_sums_bwd, segmentation_sums_fwd

    found: dict[str, Tensor] = {}
    for name, (x, labels) in _logits(inputs).items():
        sizes, spec, dx = sizes_of(x), Spec("softmax", "smoothed"), torch.empty_like(x)
        sums = segmentation_sums_fwd(x, labels, None, sizes, spec)
        segmentation_sums_bwd(torch.ones_like(sums), x, labels, None, dx, sizes, spec)
        found |= {f"sums of {name} classes": sums, f"dx of {name} classes": dx}
    return found


def _segmentation_sums_float64(inputs: Inputs) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, (x, labels) in _logits(inputs).items():
        leaf = x.detach().double().requires_grad_()
        logits, p = leaf.flatten(2), leaf.flatten(2).softmax(1)
        y = torch.zeros_like(p).scatter_(1, labels.flatten(1)[:, None].long(), 1)
        nll = -logits.log_softmax(1)
        sums = torch.stack([(p * y).sum(2), p.sum(2), y.sum(2), (nll * y).sum(2), nll.sum(2)])
        (dx,) = torch.autograd.grad(sums.sum(), leaf)
        found |= {f"sums of {name} classes": sums.detach(), f"dx of {name} classes": dx}
    return found


def _normalised(y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.leaky_relu(F.batch_norm(y, None, None, weight, bias, training=True, eps=EPS), SLOPE)


def _norm_act_float64(inputs: Inputs) -> dict[str, Tensor]:
    leaves = [t.double().requires_grad_() for t in (inputs.x, inputs.weight, inputs.bias)]
    z = _normalised(*leaves)
    dx, dweight, dbias = torch.autograd.grad(z, leaves, inputs.dz.double())
    return {"z": z.detach(), "dx": dx, "dweight": dweight, "dbias": dbias}


def _conv_abn_float64(inputs: Inputs) -> dict[str, Tensor]:
    x, w, weight, bias = (t.double() for t in inputs[:4])
    return {"z": _normalised(F.conv2d(x, w, padding=1), weight, bias)}


def _max_pool_float64(inputs: Inputs) -> dict[str, Tensor]:
    x = inputs.x.double().requires_grad_()
    z = F.max_pool2d(x, 2)
    (dx,) = torch.autograd.grad(z, x, inputs.dpooled.double())
    return {"z": z.detach(), "dx": dx}


Run = Callable[[Inputs], dict[str, Tensor]]
# For each file of kernels, a function that launches its kernels and a function that computes the same results in
# PyTorch.  Together the checks launch every kernel.
CHECKS: dict[str, tuple[Run, Run]] = {
    "norm_act": (_norm_act, _norm_act_float64),
    "conv_abn": (_conv_abn, _conv_abn_float64),
    "max_pool": (_max_pool, _max_pool_float64),
    "segmentation_sums": (_segmentation_sums, _segmentation_sums_float64),
}


def run_kernels(name: str, device: torch.device) -> str:
    """Launches the kernels of a check, and raises RuntimeError if they disagree with float64."""
    launch, reference = CHECKS[name]
    worst = 0.0
    for path, shape in SHAPES.items():
        for memory_format, value in FORMATS.items():
            inputs = _inputs(shape, value, device)
            expected = reference(inputs)
            with torch.cuda.device_of(inputs.x):
                found = launch(inputs)
            for what, result in found.items():
                error = float((result - expected[what]).norm() / expected[what].norm())
                # The condition is `not <=` instead of `>`, because NaN is no agreement either.
                if not error <= TOLERANCE:
                    raise RuntimeError(f"{what} is off by {error:.1e} ({memory_format}, {path}, {shape})")
                worst = max(worst, error)
    return f"ran, and agrees with float64 {f'to {worst:.0e}' if worst else 'exactly'}"


def compile_kernels(name: str, target: str) -> str:
    from .kernels.dry_run import dry_run

    with dry_run(target) as launches:
        for shape in SHAPES.values():
            for memory_format in FORMATS.values():
                CHECKS[name][0](_inputs(shape, memory_format, torch.device("cpu")))
    count = len({launch.name for launch in launches})
    return f"{count} kernel{'s' if count > 1 else ''} compiled, not run"


def kernels() -> Iterator[tuple[str, Callable[[], str]]]:
    """Yields (device or target and check, a function that returns its finding or raises) for each check to run."""
    gpus = devices()[1:]
    for gpu in gpus:
        for name in CHECKS:
            yield f"{gpu} {name}", partial(run_kernels, name, gpu)
    if not gpus:
        for target in TARGETS:
            for name in CHECKS:
                yield f"{target} {name}", partial(compile_kernels, name, target)


def untried(compiles: bool) -> str | None:
    """The reason why the kernels are not tried, or None.  ``compiles`` says whether the user asked for it."""
    if not _backend._has_triton():
        return "triton is not installed, so PyTorch computes every op"
    if _backend._interpreted():
        return "TRITON_INTERPRET is set, with which Triton interprets kernels and compiles none; unset it"
    if not compiles:
        return "compiling them takes minutes the first time; `fusedseg doctor --compile` does it"
    return None


def verdict(problems: int, reason: str | None) -> str:
    """One sentence that says whether all is well.  ``reason`` says why the kernels were not tried, or is None."""
    if problems:
        return f"Something is wrong: see {'the lines' if problems > 1 else 'the line'} with PROBLEM above."
    if reason is not None:
        return f"Nothing is wrong, but the kernels were not tried: {reason}."
    if len(devices()) > 1:
        return "All is well: every kernel ran on every GPU and agrees with PyTorch in float64."
    return (
        f"All is well: there is no GPU here, so PyTorch computes every op, and the kernels compile for "
        f"{' and '.join(TARGETS)}."
    )


def doctor(compiles: bool = False) -> int:
    """Prints the report.  Returns 1 if something does not work that fusedseg would use here, otherwise 0.

    ``compiles`` says whether to compile the kernels, and on a GPU to run them.
    """
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
    reason = untried(compiles)
    if reason is not None:
        print(f"  not tried: {reason}")
    for where, attempt in () if reason is not None else kernels():
        start = time.perf_counter()
        try:
            with Progress(f"  {where}"):
                seen = attempt()
        # The report shows every error of a compiler or a driver, whatever its class.
        except Exception as error:
            problems += 1
            message = next(iter(str(error).strip().splitlines()), "")
            seen = f"PROBLEM: {type(error).__name__}: {message}"
        print(f"  {where}: {seen} ({time.perf_counter() - start:.1f} s)")
    print(f"\n{verdict(problems, reason)}")
    return min(problems, 1)
