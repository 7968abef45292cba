"""The README's table: whole training steps at full size, from ``steps.json`` of a run.

``bench.report`` prints it with the other tables of whole steps, at the end of ``pytest bench/`` too, and writes it into
the README.  ``tests/bench/test_front.py`` compares the README with the results of the repository.
"""

from collections.abc import Mapping

from .results import CaseResults, figure, markdown

GIBIBYTE = 2**30
HEAD = "peak GiB, step ms, samples a second"
# The cases of ``bench/gpu/steps.py``, and what the table calls them.
NETWORKS = {
    "PlainConvUNet, 2x1x128x128x128 fp16 nhwc": "nnU-Net's PlainConvUNet, 2×1×128³ fp16, channels_last_3d",
    "PlainConvUNet, 2x1x128x128x128 fp16 nchw": "PlainConvUNet, the same, contiguous",
    "U-Net, 8x3x512x512 bf16 nhwc": "2D U-Net, 8×3×512² bf16, channels_last",
    "ResNet-50, 128x3x224x224 bf16 nhwc": "ResNet-50, 128×3×224² bf16, channels_last",
}
WAYS = {
    "eager": "eager mode",
    "compiled": "`torch.compile`",
    "budget 0.5": "`torch.compile`, `activation_memory_budget` 0.5",
    "checkpoint": "checkpoints of each block",
    "ours": '**fusedseg**, `"codegen": "inductor"`',
    "aten": "**fusedseg** (`aten`)",
}
NOT_MEASURED = "not measured"


# MLPerf Training v3.0, medians of all logs of a DGX H100: its 8 GPUs train 565.4 volumes and 56,074 images a second.
LOGS = "https://github.com/mlcommons/training_results_v3.0/tree/main/NVIDIA/results/dgxh100_ngc23.04_mxnet"
RECORD = f"NVIDIA's [MLPerf result]({LOGS}), with optimizer (cited)"
RECORDS = {
    "PlainConvUNet, 2x1x128x128x128 fp16 nhwc": 565.4 / 8,
    "ResNet-50, 128x3x224x224 bf16 nhwc": 56_074 / 8,
}


def front_lines(cases: Mapping[str, CaseResults], runs: Mapping[str, str]) -> list[str]:
    """A row for each way and a column for each network; nothing if none of the networks was measured.

    runs: what is said of each run, by its number.  Figures of another run than the last one have its number.
    """
    here = [name for name in NETWORKS if name in cases]
    if not here:
        return []
    last = max(map(int, runs), default=0)
    rows = [[title, *(cell(cases[name], way, last) for name in here)] for way, title in WAYS.items()]
    if any(name in RECORDS for name in here):
        rows.append([RECORD, *(rate_of(RECORDS[name]) if name in RECORDS else "–" for name in here)])
    table = markdown([HEAD, *(NETWORKS[name] for name in here)], rows)
    if not runs:
        return table
    legend = [f"{mark_of(int(run), last)} {text}" for run, text in runs.items() if int(run) != last]
    return [*table, "", f"Without a number: run {last}, {runs[str(last)]}. {'. '.join(legend)}."]


def mark_of(run: int, last: int) -> str:
    """The number of a run as a superscript; nothing for the last run."""
    return "" if run == last else "⁰¹²³⁴⁵⁶⁷⁸⁹"[run]


def cell(case: CaseResults, way: str, last: int) -> str:
    """The peak, the time and the rate of a way, as far as they were measured, and the run."""
    peak, step = figure(case, way, "peak_bytes"), figure(case, way, "step")
    if peak is None:
        return NOT_MEASURED
    time = NOT_MEASURED if step is None else f"{step:.1f}, {rate_of(1e3 * case['samples'] / step)}"
    return f"{peak / GIBIBYTE:.2f}, {time} {mark_of(case['contenders'][way].get('run', last), last)}".rstrip()


def rate_of(samples: float) -> str:
    return f"{samples:.1f}" if samples < 100 else f"{samples:,.0f}"
