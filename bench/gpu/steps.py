"""Whole training steps: the networks, the ways to run a step, and what is measured in a process of its own.

``test_steps.py`` starts these processes, one for each network, way and part::

    python -m bench.gpu.steps check "PlainConvUNet, 2x1x128x128x128 fp16 nhwc" aten --folder FOLDER
    python -m bench.gpu.steps time  "PlainConvUNet, 2x1x128x128x128 fp16 nhwc" aten --folder FOLDER

"check" compares logits and all gradients with those of eager mode in fp32 without TF32, which the way "eager" leaves in
the folder, and counts bytes.  "time" needs the GPU alone.  Both write a JSON file after each figure.
"""

import argparse
import contextlib
import gc
import importlib.util
import json
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from fusedseg.memory import allocator_peak
from fusedseg.unet import UNet
from tests.resnet import ResNet50
from tests.tools.precision import cudnn_set

from ..contenders import Treat, as_it_is, checkpointed, leaky, relu
from ..data import DTYPES, describe, memory_format_of
from ..harness import Missing, count_bytes, disagreement, lap, relative_error
from ..jobs import NetJob, net_tolerance, step_results
from ..networks import plain_unet, residual_unet, swin_unetr
from ..results import spread
from ..test_compiler import with_backend, with_budget
from .course import allocator_course
from .kinds import Launches, by_kind

# fp16 needs a scale of the loss.  It is static: the bench has no overflow, and a dynamic scale makes the host wait.
LOSS_SCALE = 1024.0


class Steps(NamedTuple):
    """How many steps are timed: until so many seconds have passed, but in these bounds."""

    seconds: float = 0.8
    warmup: int = 2
    least: int = 6
    most: int = 40


NNUNET = "dynamic_network_architectures"
# For full networks and for tiny ones, which run on a CPU.
FEATURES = {False: (32, 64, 128, 256, 320, 320), True: (4, 8, 16)}
BLOCKS = {False: (1, 3, 4, 6, 6, 6), True: (1, 2, 2)}
WIDTHS = {False: (64, 128, 256, 512, 1024), True: (8, 16, 32)}
# NVIDIA's results of MLPerf Training on H100 GPUs.  They are cited, not measured here.
RECORD_3D = "MLPerf Training 3.0 on H100 GPUs (cited): 14.1 ms a sample at batch 7, with optimizer"
RECORD_RESNET = "MLPerf Training 3.0 on H100 GPUs (cited): 7,009 images a second, with optimizer"


def plain(tiny: bool) -> nn.Module:
    return plain_unet(FEATURES[tiny])


def residual(tiny: bool) -> nn.Module:
    return residual_unet(FEATURES[tiny], BLOCKS[tiny])


def unet_of(norm_act: Callable[[int], Callable[[int], nn.Module]], tiny: bool) -> nn.Module:
    return UNet(3, 4, widths=WIDTHS[tiny], norm_act=norm_act(2), plain=True)


def fused_unet(tiny: bool) -> nn.Module:
    return UNet(3, 4, widths=WIDTHS[tiny])


def resnet50(tiny: bool) -> nn.Module:
    return ResNet50(width=8 if tiny else 64)


def swin(tiny: bool) -> nn.Module:
    return swin_unetr(12 if tiny else 48)


class Case(NamedTuple):
    """A network, its input at full and at tiny size, and the ways that run it.

    ``static``: the parameters are fp16 and no autocast casts them; the optimizer has masters in fp32.  ``fused`` makes
    the network of this package's modules, with the same parameters in the same order.
    """

    name: str
    make: Callable[[bool], nn.Module]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtype: str
    channels_last: bool
    ways: tuple[str, ...] = ("eager", "compiled", "aten", "ours", "aten, graphs")
    package: str = ""
    classes: int = 3
    # Whether there is a class for each position instead of one for each sample.
    dense: bool = True
    static: bool = False
    fused: Callable[[bool], nn.Module] | None = None
    cited: str = ""

    def __str__(self) -> str:
        return f"{self.name}, {describe(self.shapes[False], self.dtype, self.channels_last)}{', static' * self.static}"

    def is_here(self) -> bool:
        return not self.package or importlib.util.find_spec(self.package) is not None

    def memory_format(self) -> torch.memory_format:
        return memory_format_of(len(self.shapes[False]), self.channels_last)

    def option(self) -> torch.memory_format | None:
        """The option ``memory_format`` of the backend: norms of volumes would copy to contiguous planes without it."""
        return torch.channels_last_3d if self.memory_format() == torch.channels_last_3d else None

    def network(self, tiny: bool, device: torch.device, fused: bool = False) -> nn.Module:
        """The network with the same parameters in every process."""
        torch.manual_seed(0)
        net = self.make(tiny)
        if fused:
            ours = self.fused(tiny)
            ours.load_state_dict(dict(zip(ours.state_dict(), net.state_dict().values(), strict=True)))
            net = ours
        return net.to(device, memory_format=self.memory_format())

    def data(self, tiny: bool, device: torch.device) -> tuple[Tensor, Tensor]:
        generator, shape = torch.Generator().manual_seed(1), self.shapes[tiny]
        # Of an image with one channel, ``contiguous`` leaves strides for which backward in eager mode makes copies.
        x = torch.randn(shape, generator=generator).to(device).to(memory_format=self.memory_format())
        size = (shape[0], *shape[2:]) if self.dense else (shape[0],)
        return x, torch.randint(self.classes, size, generator=generator).to(device)


SMALL, LARGE = (2, 1, 16, 16, 16), (2, 1, 128, 128, 128)
IMAGES = (8, 3, 512, 512), (2, 3, 32, 32)
EVERY_WAY = (
    "eager", "compiled", "aten", "ours", "aten, graphs", "budget 0.5", "checkpoint", "aten, budget 0.3", "aten, 8 bits",
    "aten, norms in convolutions",
)  # fmt: skip
# The most important ones come first.
CASES = [
    Case("PlainConvUNet", plain, (LARGE, SMALL), "fp16", True, (*EVERY_WAY, "ours, 8 bits"), NNUNET),
    Case("U-Net", partial(unet_of, relu), IMAGES, "bf16", True, EVERY_WAY, classes=4),
    Case(
        "PlainConvUNet",
        plain,
        ((7, *LARGE[1:]), SMALL),
        "fp16",
        True,
        package=NNUNET,
        static=True,
        cited=RECORD_3D,
    ),
    Case(
        "ResNet-50",
        resnet50,
        ((128, 3, 224, 224), (4, 3, 64, 64)),
        "bf16",
        True,
        classes=1000,
        dense=False,
        cited=RECORD_RESNET,
    ),
    Case("PlainConvUNet", plain, (LARGE, SMALL), "fp16", False, package=NNUNET),
    Case("ResidualEncoderUNet", residual, (LARGE, SMALL), "fp16", False, package=NNUNET),
    Case(
        "U-Net of LeakyReLU",
        partial(unet_of, leaky),
        IMAGES,
        "bf16",
        True,
        ("eager", "compiled", "fused"),
        classes=4,
        fused=fused_unet,
    ),
    Case("SwinUNETR", swin, ((2, 1, 96, 96, 96), (2, 1, 64, 32, 32)), "bf16", False, package="monai"),
]


def own(treat: Treat) -> Callable[[nn.Module, Case], nn.Module]:
    """A way that is the same for all cases."""
    return lambda net, case: treat(net)


def backend(codegen: str, **options: Any) -> Callable[[nn.Module, Case], nn.Module]:
    def make(net: nn.Module, case: Case) -> nn.Module:
        rows = {} if case.option() is None else {"memory_format": case.option()}
        return with_backend(codegen, **options, **rows)(net)

    return make


# As in ``test_compiler.py``, "compiled" is torch.compile, and "ours" the backend with Inductor.
WAYS: dict[str, Callable[[nn.Module, Case], nn.Module]] = {
    "eager": own(as_it_is),
    "compiled": own(with_budget(1.0)),
    "aten": backend("aten"),
    "ours": backend("inductor"),
    "fused": own(as_it_is),
    "budget 0.5": own(with_budget(0.5)),
    "checkpoint": own(checkpointed),
    "aten, budget 0.3": backend("aten", budget=0.3),
    "aten, graphs": backend("aten", cudagraphs=True),
    "aten, 8 bits": backend("aten", bits=8),
    "ours, 8 bits": backend("inductor", bits=8),
    "aten, norms in convolutions": backend("aten", fused_convolutions=True),
}
# Every case runs these ways before any case runs another one.
FIRST = ("eager", "compiled", "aten", "ours", "aten, graphs", "fused")
# On a CPU a C++ compiler takes minutes for each of these.
OF_INDUCTOR = ("compiled", "ours", "budget 0.5", "ours, 8 bits")


class StepJob(NetJob):
    """A step in fp32, or under autocast to ``dtype``; of a network in half precision without autocast.

    The loss is scaled for fp16, and the results are those without the scale.
    """

    def __init__(self, net: nn.Module, data: tuple[Tensor, Tensor], dtype: str = "fp32", static: bool = False) -> None:
        super().__init__(net, *data, autocast=dtype != "fp32" and not static)
        self.dtype = DTYPES[dtype]
        self.scale = LOSS_SCALE if dtype == "fp16" else 1.0

    def forward(self, prepared: Tensor) -> Tensor:
        with torch.autocast(prepared.device.type, self.dtype, enabled=self.autocast):
            return self.net(prepared)

    def loss(self, out: Tensor) -> Tensor:
        return F.cross_entropy(out.float(), self.target) * self.scale

    def results(self, out: Tensor, grads: tuple[Tensor, ...]) -> dict[str, Tensor]:
        gradients = torch.cat([grad.flatten().float() for grad in grads]) / self.scale
        return {"logits": out.detach().float(), "gradients": gradients}


class Training(NamedTuple):
    """A job whose backward ends with a step of SGD with Nesterov's momentum, as nnU-Net trains.

    The learning rate is zero: the work is the same, and the weights stay.  If ``masters``, the parameters are copies of
    fp32 masters, whose gradients have no scale.
    """

    job: StepJob
    optimizer: torch.optim.Optimizer
    masters: list[Tensor]

    def prepare(self) -> Tensor:
        return self.job.prepare()

    def forward(self, prepared: Tensor) -> Tensor:
        return self.job.forward(prepared)

    def backward(self, out: Tensor) -> tuple[Tensor, ...]:
        self.job.loss(out).backward()
        # Networks of other packages have parameters that a step does not use.
        used = [k for k, param in enumerate(self.job.params) if param.grad is not None]
        params = [self.job.params[k] for k in used]
        masters = [self.masters[k] for k in used] if self.masters else []
        if masters:
            for master in masters:
                master.grad = torch.empty_like(master) if master.grad is None else master.grad
            grads = [master.grad for master in masters]
            torch._foreach_copy_(grads, [param.grad for param in params])
            torch._foreach_mul_(grads, 1 / self.job.scale)
        self.optimizer.step()
        if masters:
            with torch.no_grad():
                torch._foreach_copy_(params, masters)
        for param in params:
            param.grad = None
        return ()


def training(job: StepJob, static: bool) -> Training:
    masters = [param.detach().float().clone() for param in job.params] if static else []
    sgd = torch.optim.SGD(masters or job.params, lr=0.0, momentum=0.99, nesterov=True, weight_decay=3e-5)
    return Training(job, sgd, masters)


def job_of(case: Case, way: str, tiny: bool, device: torch.device) -> StepJob:
    net, (x, target) = case.network(tiny, device, fused=way == "fused"), case.data(tiny, device)
    if case.static:
        net, x = net.half(), x.half()
    return StepJob(WAYS[way](net, case), (x, target), case.dtype, case.static)


def file_of(folder: Path, case: Case, way: str, part: str) -> Path:
    return folder / f"{re.sub('[^A-Za-z0-9]+', '-', f'{case} {way}')}.{part}.json"


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


class Run(NamedTuple):
    """What a process measures."""

    case: Case
    way: str
    tiny: bool
    device: torch.device
    folder: Path

    def reference(self) -> Path:
        return file_of(self.folder, self.case, "eager", "reference").with_suffix(".pt")

    def save(self, part: str, found: dict[str, Any]) -> None:
        """Replaces the file at once, because the process may be ended at any time."""
        path = file_of(self.folder, self.case, self.way, part)
        path.with_suffix(".new").write_text(json.dumps(found))
        path.with_suffix(".new").replace(path)


@contextlib.contextmanager
def trying_algorithms() -> Iterator[None]:
    """cuDNN tries its algorithms at each new shape, and takes the fastest one."""
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = False


def again(call: Callable[[], Any]) -> Any:
    """Processes that are checked at the same time share the memory, so each tries again for a minute."""
    for seconds in (2, 4, 8, 16, 32):
        with contextlib.suppress(torch.OutOfMemoryError):
            return call()
        # Outside of the handler, because the error holds the tensors of the call.
        gc.collect()
        torch.cuda.empty_cache()
        time.sleep(seconds)
    return call()


def make_reference(run: Run) -> dict[str, float]:
    """Leaves what the other ways are compared with in the folder; returns the operations of a step's products."""
    exact = StepJob(run.case.network(run.tiny, run.device), run.case.data(run.tiny, run.device))
    with cudnn_set("allow_tf32", False), FlopCounterMode(display=False) as counter:
        found = step_results(exact)
    job = job_of(run.case, "eager", run.tiny, run.device)
    eager = step_results(job)
    errors = {key: relative_error(eager[key], found[key].double()) for key in found}
    content = {"exact": found, "eager": eager["gradients"], "errors": errors}
    torch.save(content, run.reference())
    return {"flop": counter.get_total_flops(), "parameters": sum(param.numel() for param in job.params)}


def check(run: Run) -> None:
    found: dict[str, Any] = {}
    if run.way == "eager":
        found["case"] = again(lambda: make_reference(run))
    reference = torch.load(run.reference(), map_location=run.device)
    start = time.perf_counter()
    job = job_of(run.case, run.way, run.tiny, run.device)
    results = again(lambda: step_results(job))
    found["first_step_s"] = time.perf_counter() - start
    # Eager mode in half precision: some of its kernels add in another order in each run.
    found["difference"] = relative_error(results["gradients"], reference["eager"].double())
    found["errors"] = {key: relative_error(got, reference["exact"][key].double()) for key, got in results.items()}
    found["refused"] = disagreement(found["errors"], reference["errors"], net_tolerance(True))
    del results, reference
    run.save("check", found)
    if not found["refused"]:
        found |= again(lambda: bytes_of(job, run.device))
        run.save("check", found)
        try:
            found["course"] = again(lambda: course_of(job, run.device))
        except RuntimeError:
            # A version of PyTorch may have no trace.  The bytes hold without it, and the log has the rest.
            traceback.print_exc()
    run.save("check", found)


def bytes_of(job: StepJob, device: torch.device) -> dict[str, int]:
    """Kept and peak bytes of a step, without parameters and input.  On CUDA, the allocator's."""
    if device.type != "cuda":
        kept, peak, _ = count_bytes(job, device)
        return {"kept_bytes": kept, "peak_bytes": peak}
    # A compiled step differs from the first one.
    job.backward(job.forward(job.prepare()))
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    out = job.forward(job.prepare())
    kept = torch.cuda.memory_allocated(device) - before
    del out
    peak = allocator_peak(lambda: job.backward(job.forward(job.prepare())), device)
    return {"kept_bytes": kept, "peak_bytes": peak, "reserved_bytes": torch.cuda.max_memory_reserved(device)}


def course_of(job: StepJob, device: torch.device) -> tuple[list[int], list[int]]:
    """The bytes over a step, in forward and in loss and backward, beyond those before it."""
    made: list[Tensor] = []
    forward = allocator_course(lambda: made.append(job.forward(job.prepare())), device)
    backward = allocator_course(lambda: job.backward(made.pop()), device)
    before = forward[-1] if forward else 0
    return thinned(forward), thinned([before + nbytes for nbytes in backward])


def thinned(course: list[int], most: int = 200) -> list[int]:
    """At most so many values, each the largest one of its part of a course."""
    length = -(-len(course) // most)
    return [max(course[start : start + length]) for start in range(0, len(course), max(length, 1))]


def laps(job: Any, device: torch.device, steps: Steps) -> dict[str, dict[str, float]]:
    """Times steps that follow each other, without a flush of the cache, as in training."""
    for _ in range(steps.warmup):
        lap(job, device)
    gc.collect()
    gc.disable()
    rows, begin = [], time.perf_counter()
    while len(rows) < steps.least or (time.perf_counter() - begin < steps.seconds and len(rows) < steps.most):
        rows.append(lap(job, device))
    gc.enable()
    names = ("forward", "backward", "step", "host")
    return {name: spread(list(column)) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def kernels_of(job: StepJob, device: torch.device) -> dict[str, Any]:
    """The device time of one step by kind of kernel, and the longest kernels."""
    with profile(activities=[ProfilerActivity.CPU if device.type == "cpu" else ProfilerActivity.CUDA]) as profiler:
        lap(job, device)
    found: dict[str, Launches] = {}
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            before = found.get(event.name, Launches(event.name, 0, 0.0))
            found[event.name] = Launches(event.name, before.count + 1, before.milliseconds + event.device_time / 1e3)
    longest = sorted(found.values(), key=lambda kernel: -kernel.milliseconds)
    return {
        "ms": sum(kernel.milliseconds for kernel in longest),
        "launches": sum(kernel.count for kernel in longest),
        "kinds": by_kind(longest),
        "longest": [[kernel.name[:100], kernel.count, round(kernel.milliseconds, 3)] for kernel in longest[:8]],
    }


def measure_times(run: Run) -> None:
    """Times with ``cudnn.benchmark`` off, the kernels, and times with it on; nnU-Net trains with it on."""
    job = job_of(run.case, run.way, run.tiny, run.device)
    trained = training(job, run.case.static)
    steps = Steps(0.0, 0, 2) if run.tiny else Steps()
    found: dict[str, Any] = {}
    found |= laps(job, run.device, steps)
    run.save("time", found)
    found["optimizer"] = laps(trained, run.device, steps)["step"]
    run.save("time", found)
    found["kernels"] = kernels_of(job, run.device)
    run.save("time", found)
    with trying_algorithms():
        found["benchmark"] = laps(job, run.device, steps)
        run.save("time", found)
        found["benchmark"]["optimizer"] = laps(trained, run.device, steps)["step"]
        run.save("time", found)


PARTS: dict[str, Callable[[Run], None]] = {"check": check, "time": measure_times}


def measure(part: str, run: Run) -> None:
    """Runs a part, and writes why if it cannot run."""
    try:
        PARTS[part](run)
    except (Missing, torch.OutOfMemoryError) as reason:
        run.save(part, {"missing": str(reason).partition("\n")[0]})
    except Exception as error:
        # The log of the process has the rest.
        traceback.print_exc()
        run.save(part, {"missing": f"{type(error).__name__}: {error}".partition("\n")[0][:300]})


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m bench.gpu.steps", description=__doc__.partition("\n")[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("case", choices=[str(case) for case in CASES])
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("--folder", type=Path, required=True, help="for the JSON files")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a network that a CPU computes at once")
    parser.add_argument("--wait", action="store_true", help="wait for a line of input before the GPU is touched")
    given = parser.parse_args(argv)
    if given.wait:
        sys.stdin.readline()
    case = next(case for case in CASES if str(case) == given.case)
    measure(given.part, Run(case, given.way, given.tiny, torch.device(given.device), given.folder))


if __name__ == "__main__":
    main()
