"""The contenders of the bench of ``conv_abn``, in the interpreter."""

import pytest
import torch

from bench.harness import count_bytes, relative_error
from bench.jobs import ReadingJob
from bench.test_conv_abn import CONTENDERS, Case, expected, make_data, module

CPU = torch.device("cpu")
CASES = {
    "3x3-rows": Case((2, 16, 6, 5), 8, 3, "fp32", True),
    "3x3-planes": Case((2, 16, 6, 5), 8, 3, "bf16"),
    "1x1x1-rows": Case((1, 16, 2, 4, 4), 8, 1, "fp16", True),
}
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2, "fp16": 2e-3}


def job_of(name: str, case: Case, data: dict) -> ReadingJob:
    return ReadingJob(module(name, case, CPU, data), data, CONTENDERS[name][1])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
# A compiled module runs the code of the eager module.
@pytest.mark.parametrize("name", [name for name in CONTENDERS if name != "compiled"])
def test_all_do_the_same(case, name, monkeypatch):
    if name == "ours-triton":
        pytest.importorskip("triton")
        import fusedseg

        monkeypatch.setattr(fusedseg, "backend", "triton")
    data = make_data(case, CPU)
    job = job_of(name, case, data)
    out = job.forward(job.prepare())
    results, reference = job.results(out, job.backward(out)), expected(case, data)
    assert list(results) == list(reference)
    for key, got in results.items():
        assert relative_error(got, reference[key]) < TOLERANCE[case.dtype], key


def test_the_input_belongs_to_the_layer_before():
    case = CASES["3x3-rows"]
    data = make_data(case, CPU)
    z, channels = data["dz"].nbytes, case.out_channels
    kept = {name: count_bytes(job_of(name, case, data), CPU)[0] for name in ("eager", "ours")}
    # Eager mode keeps y, z, mean and rstd; our op keeps z and rstd.
    assert kept == {"eager": 2 * z + 2 * 4 * channels, "ours": z + 4 * channels}
