"""Calls that the host makes in a training step, counted without a GPU: no kernel of this package is compiled or runs.

    python -m bench.gpu.host
    python -m bench.gpu.host checks

On a GPU the host looks at shapes, allocates and launches.  Here it does the same for tensors of the CPU.  Its choices
are those for an H100, and a driver stands in whose launches do nothing.  PyTorch's own kernels run on the CPU, so a
time would say nothing; calls are exact.  Counted are the calls of functions in Python and in C that code of this
package and generated code make.  What PyTorch calls around a compiled graph is counted apart, because it varies between
versions, and so are PyTorch's ops: those that the host calls, and not those that they call themselves.

With ``checks`` it prints what a later call of each function that launches kernels pays for the comparison of its first
call with PyTorch's ops (``ops/at_size.py``): this needs no GPU, so that its time can be measured.
"""

import contextlib
import json
import sys
import timeit
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import fusedseg
from fusedseg import _backend
from fusedseg._torch import format_of_cudnn
from fusedseg.activation import Activation
from fusedseg.functional import argmax_labels, max_pool, segmentation_sums, upsample
from fusedseg.kernels import launcher
from fusedseg.ops import at_size, concat
from fusedseg.ops.low_bit import graph as low_bit
from fusedseg.ops.norm import triton as norm_triton
from fusedseg.ops.norm.call import BackwardCall, Norm, Operands
from fusedseg.ops.registry import FAMILIES
from fusedseg.unet import UNet
from tests.tools.convolutions import strides_of_a_gpu

from ..contenders import relu
from ..networks import NNUNET, Network, plain_unet
from ..test_compiler import with_backend

ROOT = Path(__file__).parents[2]
# The files whose calls are ours, and the name that generated code has in place of a file.
OURS = (str(ROOT / "fusedseg"), str(ROOT / "kernels"), "<fusedseg compiler>")
TARGET = GPUTarget("cuda", 90, 32)
# The calls that are timed at once, and how often.
CALLS, ROUNDS = 2000, 150


class Driver:
    """What launchers ask Triton's driver for."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiled:
    """Stands for a compiled kernel, and counts its launches."""

    metadata = SimpleNamespace(target=TARGET)
    packed_metadata = function = 0
    launches = 0

    @classmethod
    def run(cls, *arguments: object) -> None:
        cls.launches += 1


@contextlib.contextmanager
def launching_nothing() -> Iterator[None]:
    """A context in which Triton's kernels serve all tensors, and a launch does nothing."""
    served = {(family, dtype, torch.device("cpu")): "" for family in FAMILIES
              for dtype in (torch.float16, torch.bfloat16, torch.float32)}  # fmt: skip
    before = dict(vars(driver))
    launcher.forget_plans()
    try:
        with (
            mock.patch.dict(_backend._reasons, served),
            mock.patch.object(_backend, "explain", return_value=("triton", "")),
            mock.patch.multiple(launcher, CompiledKernel=Compiled, _agrees=True, IN_PYTHON=False),
            mock.patch.object(launcher.Launcher, "_launch", return_value=Compiled()),
            strides_of_a_gpu(),
        ):
            driver.set_active(Driver())
            yield
    finally:
        vars(driver).update(before)
        launcher.forget_plans()


class Calls(NamedTuple):
    """The calls of functions in Python and in C that our code makes, PyTorch's calls in Python, the launches of our
    kernels, and PyTorch's ops; the loss is among them.
    """

    python: int
    c: int
    around: int
    launches: int
    ops: int = 0


def calls_of(run: Callable[[], Any]) -> Calls:
    """The calls of ``run`` in this thread, in which a CPU's backward runs too."""
    python = c = around = 0

    def seen(frame: FrameType, event: str, argument: object) -> None:
        nonlocal python, c, around
        # A GPU chooses the memory format of its convolutions without us.
        ours = frame.f_code.co_filename.startswith(OURS) and frame.f_code is not format_of_cudnn.__code__
        if event == "call":
            python += ours
            around += not ours
        elif event == "c_call":
            c += ours

    before = Compiled.launches
    sys.setprofile(seen)
    try:
        run()
    finally:
        sys.setprofile(None)
    return Calls(python, c, around, Compiled.launches - before)


def ops_of(run: Callable[[], Any]) -> int:
    """The ops of PyTorch that are called in ``run``, and not by another op."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    ops = [event for event in profiler.events() if event.name.startswith("aten::")]
    return sum(event.cpu_parent is None or not event.cpu_parent.name.startswith("aten::") for event in ops)


def unet() -> nn.Module:
    return UNet(3, 4, widths=(8, 16, 32), norm_act=relu(2), plain=True)


# Small networks whose largest norms take the two launches of large ones.
NETWORKS = {
    "PlainConvUNet": Network(lambda: plain_unet((8, 16, 32)), (2, 1, 32, 32, 32), NNUNET),
    "U-Net": Network(unet, (2, 3, 128, 128)),
}


def count_step(network: Network) -> dict[str, Calls]:
    """The calls of forward and backward of a compiled network under autocast, in channels_last."""
    torch.manual_seed(0)
    rows = torch.channels_last_3d if len(network.shape) == 5 else torch.channels_last
    net = network.make().to(memory_format=rows)
    options = {"memory_format": rows} if len(network.shape) == 5 else {}
    run = with_backend("aten", **options)(net)
    x = torch.randn(network.shape).to(memory_format=rows)

    def forward() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return run(x).float().square().mean()

    # The first step compiles, and the second one keeps the launches.
    for _ in range(2):
        forward().backward()
    losses: list[Tensor] = []
    halves: dict[str, Callable[[], Any]] = {
        "forward": lambda: losses.append(forward()),
        "backward": lambda: losses.pop().backward(),
    }
    calls = {half: calls_of(run_half) for half, run_half in halves.items()}
    net.zero_grad()
    return {half: calls[half]._replace(ops=ops_of(run_half)) for half, run_half in halves.items()}


def count_module(make: Callable[[], nn.Module]) -> dict[str, Calls]:
    """The calls of forward and backward of a module in eager mode."""
    module, dz = make(), torch.ones(2, 16, 8, 8)

    def run() -> dict[str, Calls]:
        x, found = torch.randn(2, 16, 8, 8, requires_grad=True).clone(), []
        calls = calls_of(lambda: found.append(module(x)))
        return {"forward": calls, "backward": calls_of(lambda: found.pop().backward(dz))}

    run()
    return run()


def count() -> dict[str, dict[str, Calls]]:
    with launching_nothing():
        found = {"InPlaceABN": count_module(lambda: fusedseg.InPlaceABN(16))}
        for name, network in NETWORKS.items():
            if network.is_here():
                found[name] = count_step(network)
    return found


def call_every_family() -> None:
    """Calls every function that launches kernels of a family with a check."""
    x, rows = (torch.randn(2, 8, 24, 24, requires_grad=True) for _ in range(2))
    rows = rows.to(memory_format=torch.channels_last)
    vector, labels = torch.ones(8), torch.zeros(2, 24, 24, dtype=torch.long)
    given, norm = Operands(x.detach(), vector, vector), Norm("input", Activation("relu", 0.0))
    _, stats = norm_triton.forward(given, norm, None, None)
    norm_triton.recompute(given, stats, norm, None)
    norm_triton.backward(BackwardCall(x.detach(), given, stats, norm, None, (True, True, True, False, False)))
    norm_triton.moments(x.detach())
    loss = max_pool(x, 3, 2, 1).sum() + upsample(rows, scale_factor=2.0).sum()
    (loss + segmentation_sums(x, labels).overlap.sum()).backward()
    argmax_labels(x.detach())
    codes = low_bit.pack(x.detach(), None, 8, "", 5)
    low_bit.unpack(codes, None, 8, "", x.shape, x.stride())
    low_bit.kink_of(x.detach(), vector, vector, vector, vector, False)
    concat.concat([rows.detach(), rows.detach()], 1, [None, vector])


def cost_of_checks() -> dict[str, dict[str, float]]:
    """The calls in Python, and the microseconds, that a later call of each function takes for its check."""
    first: dict[str, tuple[at_size.checked, tuple[Any, ...]]] = {}

    def seen(check: at_size.checked, key: object, kernels: Callable[..., Any], call: tuple[Any, ...]) -> Any:
        first[f"{check.family}: {kernels.__name__.removeprefix('_launch_')}"] = check, call
        return kernels(*call)

    with launching_nothing(), mock.patch.object(at_size, "_first", seen):
        call_every_family()
    rows = {}
    for name, (check, call) in first.items():

        def bare(*given: Any) -> None:
            pass

        run = at_size.checked(check.family, check.results, check.kind)(bare)
        at_size._checks.pop().seen.add(check.kind(*call))
        # The two are timed in turns, so that a slow second of the machine counts for both or for none.
        timers = [timeit.Timer(lambda f=f, call=call: f(*call)) for f in (run, bare)]
        rounds = ([timer.timeit(CALLS) for timer in timers] for _ in range(ROUNDS))
        of_run, of_bare = map(min, zip(*rounds, strict=True))
        calls = calls_of(lambda run=run, call=call: run(*call)).python - calls_of(lambda call=call: bare(*call)).python
        rows[name] = {"calls": calls, "µs": round((of_run - of_bare) / CALLS * 1e6, 2)}
    return rows


def main() -> None:
    if sys.argv[1:] == ["checks"]:
        print(json.dumps(cost_of_checks(), indent=1, ensure_ascii=False))
        return
    rows = {f"{name}, {half}": calls._asdict() for name, halves in count().items() for half, calls in halves.items()}
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
