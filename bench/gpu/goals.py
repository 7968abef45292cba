"""Goals for an H100 or H200.  Each goal is a bound for one figure of a run's results.  T is one activation tensor.

A goal in milliseconds is of one GPU, and judged on that GPU only.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..results import COPY, COPY_PASSES, PASSES, CaseResults, Files


class Absent(Exception):
    """A figure was not measured; the message says why."""


class Goal(NamedTuple):
    """``figure`` of ``case`` in ``<stem>.json`` must be at most ``bound``, or with ``at_least`` no less than it.

    ``gpu`` is a part of the GPU's name if the goal is of one GPU.
    """

    what: str
    figure: str
    value: Callable[[CaseResults], float]
    stem: str
    case: str
    bound: float
    at_least: bool = False
    gpu: str = ""


class Verdict(NamedTuple):
    """The measured value of a goal.  If it was not measured, ``value`` is None and ``why`` gives the reason."""

    goal: Goal
    value: float | None
    why: str = ""

    @property
    def met(self) -> bool:
        if self.value is None:
            return False
        return self.value >= self.goal.bound if self.goal.at_least else self.value <= self.goal.bound


def contender(case: CaseResults, name: str) -> Mapping[str, Any]:
    """The results of a contender; raises ``Absent`` if it has none."""
    found = case["contenders"].get(name)
    if found is None:
        raise Absent(f"{name} did not run")
    if reason := found.get("missing") or found.get("refused"):
        raise Absent(f"{name}: {reason}")
    return found


def milliseconds(case: CaseResults, name: str, part: str) -> float:
    found = contender(case, name).get(part)
    if found is None:
        raise Absent(f"{name}: {part} was not timed")
    return found["median_ms"]


def time_to(rival: str, part: str = "step", ours: str = "ours") -> tuple[str, Callable[[CaseResults], float]]:
    """Figure and function: our time of a part, divided by the rival's."""

    def value(case: CaseResults) -> float:
        return milliseconds(case, ours, part) / milliseconds(case, rival, part)

    return f"{part} / {rival}", value


def time_to_copy(part: str) -> tuple[str, Callable[[CaseResults], float]]:
    def value(case: CaseResults) -> float:
        return milliseconds(case, "ours", part) / milliseconds(case, COPY, "forward")

    return f"{part} / copy of T", value


def device_time(name: str) -> tuple[str, Callable[[CaseResults], float]]:
    """Figure and function: the milliseconds of all kernels of a step."""

    def value(case: CaseResults) -> float:
        found = contender(case, name).get("kernels")
        if found is None:
            raise Absent(f"{name}: no profile")
        return found["ms"]

    return f"ms of kernels, {name}", value


def time_of_sample(name: str) -> tuple[str, Callable[[CaseResults], float]]:
    """Figure and function: milliseconds a sample of a step with optimizer; cuDNN tries its algorithms."""

    def value(case: CaseResults) -> float:
        found = contender(case, name).get("benchmark", {}).get("optimizer")
        if found is None:
            raise Absent(f"{name}: no step with optimizer was timed")
        return found["median_ms"] / case["samples"]

    return f"ms a sample, {name}", value


def bandwidth(part: str) -> tuple[str, Callable[[CaseResults], float]]:
    """Figure and function: our bandwidth, counted on the fewest passes that suffice, divided by a copy's."""

    def value(case: CaseResults) -> float:
        passes = PASSES[part] / COPY_PASSES
        return passes * milliseconds(case, COPY, "forward") / milliseconds(case, "ours", part)

    return f"{part}: bandwidth on {PASSES[part]} passes / copy's", value


def tensors_at_the_peak() -> tuple[str, Callable[[CaseResults], float]]:
    """Figure and function: the peak in T.  A step needs x, over which z is written, and dx; dz exists before it."""

    def value(case: CaseResults) -> float:
        return contender(case, "ours")["peak_bytes"] / case["tensor_bytes"]

    return "peak of a step, in T", value


def goals() -> list[Goal]:
    found: list[Goal] = []

    def add(what: str, stem: str, case: str, *figures: tuple, at_least: bool = False, gpu: str = "") -> None:
        found.extend(Goal(what, *figure, stem, case, bound, at_least, gpu) for figure, bound in figures)

    for dtype in ("bf16", "fp16"):
        for layout in ("nchw", "nhwc"):
            large = "norm_act", f"batch 8x64x512x512 {dtype} {layout}"
            what = "BN + LeakyReLU forward, large"
            add(what, *large, (bandwidth("forward"), 0.90), at_least=True)
            if dtype == "fp16":
                add(what, *large, (time_to("eager", "forward"), 0.60))
            elif layout == "nchw":
                add(what, *large, (time_to("eager", "forward"), 0.15))
            add(what, *large, (time_to("compiled", "forward"), 0.95))
            what = "BN + LeakyReLU backward, large"
            add(what, *large, (bandwidth("backward"), 0.88), at_least=True)
            add(what, *large, (time_to("eager", "backward"), 0.65), (time_to("compiled", "backward"), 0.95))
            # One temporary tensor would make it 3.
            add(what, *large, (tensors_at_the_peak(), 2.1))
    for size in ("8x512x32x32", "8x256x16x16"):
        for layout in ("nchw", "nhwc"):
            small = "norm_act", f"batch {size} bf16 {layout}"
            add("BN + LeakyReLU, small", *small, (time_to_copy("forward"), 1.25), (time_to_copy("backward"), 1.9))
    for layout, bound in (("nchw", 0.40), ("nhwc", 0.30)):
        volume = "norm_act", f"instance 2x32x128x128x128 fp16 {layout}"
        add("InstanceNorm + LeakyReLU, 3D", *volume, (time_to("eager"), bound))

    for case, bound in (
        ("8x64x512x512 bf16 nhwc, 1x1 to 64", 0.85),
        ("8x64x512x512 bf16 nchw, 1x1 to 64", 0.85),
        ("8x512x64x64 bf16 nhwc, 1x1 to 256", 0.85),
        ("8x64x512x512 bf16 nhwc, 3x3 to 64", 0.98),
        ("8x128x256x256 bf16 nhwc, 3x3 to 128", 0.98),
    ):
        add("conv + BN + act forward", "conv_abn", case, (time_to("ours-aten", "forward", "ours-triton"), bound))
        add("… under auto", "conv_abn", case, (time_to("ours-aten", "forward"), 1.02))
    for layout in ("nchw", "nhwc"):
        pool = "max_pool", f"8x64x512x512 fp16 {layout} window 2 stride 2"
        add("max-pool 2×2, forward + backward", *pool, (time_to("eager"), 0.65), (time_to("compiled"), 1.0))

    volume = "steps", "PlainConvUNet, 2x1x128x128x128 fp16 nhwc"
    image = "steps", "U-Net, 8x3x512x512 bf16 nhwc"
    resnet = "steps", "ResNet-50, 128x3x224x224 bf16 nhwc"
    add("PlainConvUNet, a step", *volume, (time_to("compiled"), 0.95), (time_to("eager"), 0.75))
    add("2D U-Net, a step", *image, (time_to("compiled"), 0.95), (time_to("eager"), 0.82))
    fused = "steps", "U-Net of LeakyReLU, 8x3x512x512 bf16 nhwc"
    times = (time_to("compiled", ours="fused"), 0.95), (time_to("eager", ours="fused"), 0.82)
    add("2D U-Net of our modules, a step", *fused, *times)
    add("ResNet-50, a step", *resnet, (time_to("compiled"), 0.90))
    # Both codegens.
    for name in ("aten", "ours"):
        for what, case, bound in (
            ("PlainConvUNet, device time", volume, 27.0),
            ("2D U-Net, device time", image, 26.0),
            ("ResNet-50, device time", resnet, 19.0),
        ):
            add(what, *case, (device_time(name), bound), gpu="H100")
        batch = "steps", "PlainConvUNet, 7x1x128x128x128 fp16 nhwc, static"
        add("PlainConvUNet, MLPerf's record (cited)", *batch, (time_of_sample(name), 14.1), gpu="H100")
        # 7,009 images a second.
        add("ResNet-50, MLPerf's record (cited)", *resnet, (time_of_sample(name), 0.1427), gpu="H100")
    return found


def judge(files: Files) -> list[Verdict]:
    """The verdict on every goal of this GPU, from the files that ``bench.results.load`` read."""
    verdicts = []
    gpus = " ".join(content["machine"].get("gpu", "") for content in files.values())
    for goal in goals():
        if goal.gpu not in gpus:
            continue
        try:
            case = files.get(goal.stem, {}).get("results", {}).get(goal.case)
            if case is None:
                raise Absent(f"{goal.stem}.json has no such case" if goal.stem in files else f"no {goal.stem}.json")
            verdicts.append(Verdict(goal, goal.value(case)))
        except Absent as reason:
            verdicts.append(Verdict(goal, None, str(reason)))
    return verdicts
