"""The benches' harness: the results that it refuses, the bytes that it counts, and the times that it reports."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from bench import harness
from bench.contenders import Compiled, compiled
from bench.harness import Missing, Result, Timing, compete, disagreement
from bench.jobs import LayerJob
from bench.results import PARTS, Report, commit

TOLERANCE = dict.fromkeys(("z", "dx", "dweight", "dbias"), 1e-4)


def make_data() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(2, 4, 16, 16, requires_grad=True)
    return {"x": x, "dz": torch.randn_like(x), "weight": torch.rand(4) + 0.5, "bias": torch.randn(4)}


def layer(slope: float) -> nn.Module:
    return nn.Sequential(nn.BatchNorm2d(4), nn.LeakyReLU(slope, inplace=True))


def expected(data: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    exact = {name: value.detach().double() for name, value in data.items()}
    exact["x"].requires_grad_()
    job = LayerJob(layer(0.01).double(), exact)
    out = job.forward(job.prepare())
    return job.results(out, job.backward(out))


def built(name: str, data: dict[str, torch.Tensor]) -> LayerJob:
    if name == "absent":
        raise Missing("not installed")
    return LayerJob(layer(0.02 if name == "wrong" else 0.01), data)


def test_wrong_contenders_are_refused_and_absent_ones_named():
    data = make_data()
    results = compete(
        ("eager", "wrong", "absent"),
        lambda name: built(name, data),
        lambda: expected(data),
        TOLERANCE,
        Timing(torch.device("cpu"), 0.0),
    )
    assert results["wrong"].refused.startswith("z off by ")
    assert results["wrong"].step == []
    assert results["absent"].missing == "not installed"
    eager = results["eager"]
    assert eager.refused == eager.missing == ""
    assert len(eager.step) == len(eager.forward) == len(eager.backward) == 5
    assert all(
        step >= forward + backward
        for step, forward, backward in zip(eager.step, eager.forward, eager.backward, strict=True)
    )
    # Kept are x, z, mean and rstd; the parameters are not counted.
    assert eager.kept == 2 * data["x"].nbytes + 2 * 4 * 4
    # Alive are x, z, and in backward the gradients of the activation's input and of x.
    assert eager.peak >= 4 * data["x"].nbytes


def test_a_compiler_that_fails_is_absent_with_its_own_reason(monkeypatch):
    """Dynamo's error only said "backend='backend' raised:"."""

    def fails(graph, inputs):
        raise RuntimeError("no C++ compiler\nand more")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", fails)
    with pytest.raises(Missing, match=r"^torch\.compile failed: RuntimeError: no C\+\+ compiler$"):
        compiled(nn.Linear(2, 2))(torch.ones(1, 2))


@pytest.mark.parametrize("problem", ["not here", "not for BFloat16"])
def test_a_layer_of_another_package_may_be_absent_or_refuse(problem, monkeypatch):
    from bench.test_norm_act import NormCase, inplace_abn

    class InPlaceABN(nn.Module):
        def __init__(self, channels: int, **options) -> None:
            super().__init__()

        def forward(self, x):
            raise RuntimeError(f"{problem}\nand more")

    package = None if problem == "not here" else SimpleNamespace(InPlaceABN=InPlaceABN)
    monkeypatch.setitem(sys.modules, "inplace_abn", package)
    with pytest.raises(Missing, match=rf"{problem}[^\n]*$"):
        inplace_abn(NormCase("batch", (1, 2, 4, 4), "bf16"))(torch.ones(1, 2, 4, 4))


def test_a_full_memory_is_no_failure_of_the_compiler():
    """Processes that share a GPU try again; as ``Missing`` it ended the contender."""

    def fails(graph, inputs):
        def run(*args):
            raise torch.OutOfMemoryError("CUDA out of memory")

        return run

    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        Compiled(nn.Linear(2, 2), fails)(torch.ones(1, 2))


def test_nan_is_refused():
    assert disagreement({"z": float("nan")}, {}, TOLERANCE) == "z off by nan > 1.0e-04"


def test_twice_eagers_own_error_is_allowed():
    assert disagreement({"z": 3e-4}, {"z": 2e-4}, TOLERANCE) == ""
    assert disagreement({"z": 5e-4}, {"z": 2e-4}, TOLERANCE) == "z off by 5.0e-04 > 4.0e-04"


def test_json_has_bytes_a_second_of_the_fewest_passes(tmp_path):
    ours = Result([3e-3] * 5, [5e-3] * 5, [8e-3] * 5, kept=7)
    copy = Result([2e-3] * 5, [0.0] * 5, [2e-3] * 5)
    report = Report(torch.device("cpu"), tmp_path)
    report.add("norms", "title", "a", {"ours": ours, "copy": copy}, tensor_bytes=10**9)
    found = json.loads((tmp_path / "norms.json").read_text())["results"]["a"]
    assert found["tensor_bytes"] == 10**9
    ours, copy = (found["contenders"][name] for name in ("ours", "copy"))
    assert {part: ours[part]["gb_per_s"] for part in PARTS} == pytest.approx(dict.fromkeys(PARTS, 1e3))
    assert ours["kept_bytes"] == 7
    # Only a GPU reports the memory that was reserved on the device.
    assert "reserved_bytes" not in ours
    assert copy == {"forward": {"median_ms": 2, "p20_ms": 2, "p80_ms": 2, "gb_per_s": 1e3}, "errors": {}}


def test_a_case_with_wrong_results_fails_and_stays_in_the_file(tmp_path):
    report = Report(torch.device("cpu"), tmp_path)
    with pytest.raises(pytest.fail.Exception, match="wrong: z off"):
        report.add("norms", "title", "a", {"eager": Result(step=[1.0] * 5), "wrong": Result(refused="z off")})
    with pytest.raises(pytest.skip.Exception, match="absent: not installed"):
        report.add("norms", "title", "b", {"absent": Result(missing="not installed")})
    found = json.loads((tmp_path / "norms.json").read_text())["results"]
    assert found["a"]["contenders"]["wrong"]["refused"] == "z off"
    assert found.keys() == {"a", "b"}


def test_a_rehearsal_takes_the_first_steps_alone(monkeypatch):
    monkeypatch.setattr(harness, "rehearsal", True)
    data, steps, backward = make_data(), [], LayerJob.backward
    monkeypatch.setattr(LayerJob, "backward", lambda job, out: steps.append(1) or backward(job, out))

    def refuse():
        raise AssertionError("nothing is compared")

    timing = Timing(torch.device("cpu"), 1.0)
    results = compete(("eager", "absent"), lambda name: built(name, data), refuse, TOLERANCE, timing)
    assert {name: r.missing for name, r in results.items()} == {"eager": "a rehearsal", "absent": "not installed"}
    assert len(steps) == 1


def test_a_copy_without_its_history_is_told_its_commit(monkeypatch):
    monkeypatch.setattr("bench.results.run", lambda *command: "unknown")
    assert commit() == "unknown"
    monkeypatch.setenv("BENCH_COMMIT", "abc1234")
    assert commit() == "abc1234"
    monkeypatch.setattr("bench.results.run", lambda *command: "fed4321" if "rev-parse" in command else " M a.py")
    assert commit() == "fed4321 with changes"
