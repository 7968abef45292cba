"""The bench of ``conv_abn``: its jobs, what it refuses, and its tables, in the interpreter."""

import json
from functools import partial

import pytest
import torch
from torch import nn

from bench.contenders import CONTENDERS, CONV_CONTENDERS, conv_contenders, unet
from bench.gpu.conv_kernels import KERNELS, TRITON, VENDOR, VENDOR_STATS, Choice, KernelSection, TritonJob
from bench.gpu.test_conv_kernels import expected_of_kernels, run_kernels
from bench.harness import Result, Timing, compete, count_bytes, relative_error
from bench.jobs import ConvJob, InferenceJob
from bench.results import Section
from bench.test_conv_abn import (
    Case,
    expected,
    expected_in_inference,
    make_data,
    module,
)

CPU = torch.device("cpu")
CASES = {
    "3x3-rows": Case((2, 16, 6, 5), 8, 3, "fp32", True),
    "3x3-planes": Case((2, 16, 6, 5), 8, 3, "bf16"),
    "1x1x1-rows": Case((1, 16, 2, 4, 4), 8, 1, "fp16", True),
}
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2, "fp16": 2e-3}
EACH = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
# A compiled module runs the code of the eager module.
UNCOMPILED = [name for name in CONV_CONTENDERS if name not in ("compiled", "aggressive")]


def job_of(kind: type[ConvJob], name: str, case: Case, data: dict) -> ConvJob:
    return kind(module(name, case, CPU, data), data, CONV_CONTENDERS[name][1])


@EACH
@pytest.mark.parametrize("name", UNCOMPILED)
def test_all_do_the_same(case, name, monkeypatch):
    if name == "ours-triton":
        pytest.importorskip("triton")
        import fusedseg

        monkeypatch.setattr(fusedseg, "backend", "triton")
    data = make_data(case, CPU)
    inference = job_of(InferenceJob, name, case, data)
    z = inference.forward(inference.prepare())
    assert not z.requires_grad
    assert relative_error(z, expected_in_inference(case, data)["z"]) < TOLERANCE[case.dtype]
    if name == "folded":
        return
    job = job_of(ConvJob, name, case, data)
    out = job.forward(job.prepare())
    results, reference = job.results(out, job.backward(out)), expected(case, data)
    assert list(results) == list(reference)
    for key, got in results.items():
        assert relative_error(got, reference[key]) < TOLERANCE[case.dtype], key


def test_the_input_belongs_to_the_layer_before():
    case = CASES["3x3-rows"]
    data = make_data(case, CPU)
    z, channels = data["dz"].nbytes, case.out_channels
    kept = {name: count_bytes(job_of(ConvJob, name, case, data), CPU)[0] for name in ("eager", "ours")}
    # Eager mode keeps y, z, mean and rstd; our op keeps z and rstd.
    assert kept == {"eager": 2 * z + 2 * 4 * channels, "ours": z + 4 * channels}


def test_who_competes():
    assert {"ours-triton", "ours-aten"}.isdisjoint(conv_contenders("cpu", inference=False))
    assert set(conv_contenders("cuda", inference=False)) == set(CONV_CONTENDERS) - {"folded", "aggressive"}
    assert set(conv_contenders("cuda", inference=True)) == set(CONV_CONTENDERS) - {"aggressive"}


@EACH
def test_kernels_agree(case, monkeypatch):
    pytest.importorskip("triton")
    import fusedseg

    monkeypatch.setattr(fusedseg, "backend", "triton")
    results, flops, choice = run_kernels(case, CPU)
    assert {name: r.refused for name, r in results.items()} == dict.fromkeys(KERNELS, "")
    assert {"y", "mean", "var"} == set(results[VENDOR_STATS].errors) == set(results[TRITON].errors)
    assert flops == 2 * 16 * 8 * case.kernel ** (len(case.shape) - 2) * torch.Size(case.shape).numel() // 16
    # Measurements are made only on a GPU.
    assert choice.name == "aten"


def test_wrong_statistics_are_refused():
    pytest.importorskip("triton")
    case = CASES["3x3-rows"]
    data = make_data(case, CPU)

    class Shifted(TritonJob):
        def forward(self, prepared):
            y = super().forward(prepared)
            self.partial[1] += 0.1
            return y

    results = compete(
        {
            name: partial(job, data["x"], data["conv_weight"], case.geometry)
            for name, job in {**KERNELS, TRITON: Shifted}.items()
        },
        {"": lambda: expected_of_kernels(case, data)},
        dict.fromkeys(("y", "mean", "var"), 1e-5),
        Timing(CPU, 0.0),
        baseline=VENDOR,
    )
    assert results[TRITON].refused.startswith("mean off by ")
    assert results[TRITON].step == []
    assert results[VENDOR_STATS].refused == ""


def times(seconds: float) -> Result:
    return Result(*([seconds] * 5 for _ in range(3)), kept=2**20, peak=2**20)


def test_table_of_kernels():
    section = KernelSection("kernels")
    section.cases["a"] = {VENDOR: times(8e-3), VENDOR_STATS: times(10e-3), TRITON: times(5e-3)}
    section.cases["b"] = {VENDOR: times(8e-3), VENDOR_STATS: times(10e-3), TRITON: Result(refused="y off")}
    section.flops.update(a=4 * 10**12, b=10**12)
    section.choices.update(a=Choice("triton", "measured"), b=Choice("aten", "rule"))
    title, header, row, *rest = section.lines()
    assert title == "kernels"
    numbers = ["4000.0", "8.000", "10.000", "5.000", "500", "800", "1.60", "0.80", "0.50"]
    assert row.split() == ["a", *numbers, "triton", "measured"]
    assert len({len(line) for line in (header, row)}) == 1
    assert [line.split()[-1] for line in rest[:2]] == ["0.50", "0.50"]
    assert rest[2:] == [f"refused: {TRITON}, b: y off"]
    found = json.loads(json.dumps(section.to_json()))
    assert found["a"]["tflops"] == {VENDOR: pytest.approx(500), TRITON: pytest.approx(800)}
    assert found["a"]["auto"] == {"name": "triton", "why": "measured"}
    assert set(found["a"]["contenders"][TRITON]) == {"forward", "errors"}
    assert "tflops" not in found["b"]
    assert found["b"]["contenders"][TRITON]["refused"] == "y off"


def test_table_of_inference_has_one_part():
    section = Section("inference", parts=("forward",), counts=("peak",))
    section.cases["a"] = {"eager": times(2e-3), "ours": times(1e-3), "folded": times(4e-3)}
    _, header, row, *_ = section.lines()
    assert header.endswith("ours/folded")
    assert row.split() == ["a", "2.00", "1.00", "0.50", "0.25"]
    assert set(section.to_json()["a"]["contenders"]["ours"]) == {"forward", "peak_bytes", "errors"}


def test_unet_of_ours_is_the_default_and_of_others_stock():
    from fusedseg.unet import UNet

    widths = (4, 8)
    nets = {name: unet(name, 1, 2, widths=widths) for name in CONTENDERS if name != "inplace_abn"}
    assert str(nets["ours"]) == str(UNet(1, 2, widths=widths))
    shapes = [value.shape for value in nets["ours"].state_dict().values()]
    for name, net in nets.items():
        assert [value.shape for value in net.state_dict().values()] == shapes
        if name != "ours":
            convolutions = [child for child in net.modules() if isinstance(child, nn.Conv2d)]
            assert {type(child) for child in convolutions} == {nn.Conv2d}
