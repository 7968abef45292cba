"""Measures the machine itself, before our code is judged.

The figures are bandwidth, the vendor's convolutions, and how much of a tensor a second pass finds in the L2 cache.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedseg.ops.layout import layout_of

from .. import harness
from ..contenders import SLOPE
from ..data import Source, describe
from ..harness import FLUSH_BYTES, Probe, Timing, copy_of, interleave
from ..results import markdown, spread

SECONDS = {"cpu": 0.2, "cuda": 0.3}
MIB = 2**20
SIZES = {"cpu": (1, 16, 64), "cuda": (4, 16, 32, 64, 256, 1024, 4096)}
# ((batch, spatial size), channels in and out)
CONVOLUTIONS = {
    "cpu": [((2, (32, 32)), (32, 64)), ((1, (8, 16, 16)), (32,))],
    "cuda": [((8, (128, 128)), (32, 64, 128, 256, 512)), ((2, (32, 64, 64)), (32, 64, 128, 256, 512))],
}
# Sizes in MiB of the tensors of `test_second_pass_finds_the_first_in_l2`.
REUSED = (4, 8, 16, 24, 32, 40, 48, 64, 96, 128, 256)


@pytest.fixture(autouse=True)
def _not_in_a_rehearsal():
    if harness.rehearsal:
        pytest.skip("a rehearsal")


@pytest.fixture
def record(report, device):
    """A function that writes the results of one measurement to the report, and prints them as a table."""

    def write(name: str, results: Mapping[str, Any], head: list[str], rows: list[list[str]]) -> None:
        measured.setdefault(report.directory, {})[name] = results
        report.notes.append("\n".join([name, "", *markdown(head, rows)]))
        report.write("machine", measured[report.directory], "What the machine can do")

    return write


# The results of all measurements so far, by folder.
measured: dict[Any, dict[str, Any]] = {}


def timed_alone(jobs: Mapping[str, Any], device: torch.device, part: str = "forward") -> dict[str, dict[str, float]]:
    """Medians and spread of a part of each job; on a GPU, kernels are timed without their launches."""
    results = interleave(jobs, Timing(device, SECONDS[device.type] * len(jobs), ahead=device.type == "cuda"))
    return {name: spread(getattr(result, part)) for name, result in results.items()}


def test_bandwidth(device, record):
    """Torch's copies, reads and writes, in GB/s over all bytes that move."""
    moved, results, rows = {"copy": 2, "read": 1, "write": 1}, {}, []
    for size in SIZES[device.type]:
        source = torch.empty(size * MIB // 2, dtype=torch.bfloat16, device=device).normal_()
        target = torch.empty_like(source)
        jobs = {"copy": copy_of(source), "read": Probe(source.sum), "write": Probe(partial(target.fill_, 1.0))}
        times = timed_alone(jobs, device)
        for name, time in times.items():
            time["gb_per_s"] = moved[name] * source.nbytes / 1e6 / time["median_ms"]
        results[f"{size} MiB"] = times
        rows.append([f"{size} MiB", *(f"{times[name]['gb_per_s']:.0f}" for name in moved)])
    record("bandwidth", results, ["bf16 tensor, GB/s", *moved], rows)


def test_vendor_convolutions(device, record):
    """TFLOP/s of the vendor's convolution in bf16 and channels_last: forward, gradients of the input and the weight."""
    results, rows = {}, []
    names = ("forward", "dx", "dw")
    for (batch, size), widths in CONVOLUTIONS[device.type]:
        for C in widths:
            dims, source = len(size), Source(device)
            shape = (batch, C, *size)
            x, dy = (source.normal(shape, "bf16", True) for _ in range(2))
            w = source.normal((C, C, *[3] * dims), "bf16", True, std=(C * 3**dims) ** -0.5)
            each = dict.fromkeys(("stride", "padding", "dilation"), [1] * dims)
            geometry = {**each, "transposed": False, "output_padding": [0] * dims, "groups": 1}

            def backward(mask: list[bool], x=x, dy=dy, w=w, geometry=geometry) -> Any:
                return torch.ops.aten.convolution_backward(dy, x, w, None, **geometry, output_mask=mask)

            jobs = {
                "forward": Probe(partial(torch.convolution, x, w, None, **geometry)),
                "dx": Probe(partial(backward, [True, False, False])),
                "dw": Probe(partial(backward, [False, True, False])),
            }
            times = timed_alone(jobs, device)
            operations = 2 * x.numel() * w[0].numel()
            for time in times.values():
                time["tflops"] = operations / 1e9 / time["median_ms"]
            case = f"{describe(shape, 'bf16', True)}, {'x'.join('3' * dims)} to {C}"
            results[case] = times
            rows.append([case, *(f"{times[name]['tflops']:.2f}" for name in names)])
    record("vendor convolutions", results, ["TFLOP/s", *names], rows)


def test_second_pass_finds_the_first_in_l2(device, record):
    """Times the applying pass, which walks backwards, right after the reducing pass and after a flush of the cache."""
    if device.type != "cuda":
        pytest.skip("needs --device cuda")
    from fusedseg.kernels.norm_act import norm_act_fwd
    from fusedseg.kernels.norm_stats import norm_stats

    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
    results, rows = {}, []
    for channels_last in (False, True):
        for size in REUSED:
            side = 128
            x = Source(device).normal((size * MIB // (64 * side * side * 2), 64, side, side), "bf16", channels_last)
            z, layout = torch.empty_like(x), layout_of(x)

            def apply(partial_sums: Tensor, x=x, z=z, layout=layout) -> Any:
                absent = dict.fromkeys(("weight", "bias", "running_mean", "running_var", "kept"))
                options = {"training": True, "momentum": 0.1, "eps": 1e-5, "act": ("leaky_relu", SLOPE)}
                return norm_act_fwd(x, z, layout, **absent, **options, partial=partial_sums)

            def cold(x=x, layout=layout) -> Tensor:
                sums = norm_stats(x, layout)
                flush.zero_()
                return sums

            jobs = {"warm": Probe(partial(norm_stats, x, layout), apply), "cold": Probe(cold, apply)}
            times = timed_alone(jobs, device, "backward")
            warm, late = (times[name]["median_ms"] for name in ("warm", "cold"))
            # The saved time as bytes, at the speed of the cold pass, which reads and writes.
            reused = (1 - warm / late) * 2 * x.nbytes
            case = describe(tuple(x.shape), "bf16", channels_last)
            results[case] = {**times, "reused_bytes": reused}
            milliseconds = (f"{1e3 * ms:.1f}" for ms in (warm, late))
            rows.append([case, f"{x.nbytes / MIB:.0f}", *milliseconds, f"{reused / MIB:.1f}"])
    head = ["second pass", "MiB", "right after, µs", "after a flush, µs", "saved, as MiB at that speed"]
    record("second pass", results, head, rows)
