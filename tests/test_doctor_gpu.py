"""``fusedseg doctor --gpu``.  A script takes the place of the worker, or the worker runs on the CPU."""

import json
import re
import sys
import time

import pytest
import torch

from fusedseg import _backend
from fusedseg.__main__ import main
from fusedseg.compiler.settings import OPTIONAL
from fusedseg.doctor import gpu, report
from fusedseg.ops.registry import FAMILIES
from fusedseg.ops.self_test import first_use

CPU = torch.device("cpu")
ALL = ",".join(OPTIONAL)
JOBS = [gpu.Job("cpu", family, "float16") for family in ("norm", "pool", "conv")]
# Does every job as its place in HOW says: "fails", or "dies", or "hangs", or "leaves" after the result.
SCRIPT = """
import json, os, sys, time
print("a library says something, and {not json")
for device, family, dtype, without in json.loads(sys.argv[1]):
    how = HOW.get(family, "passes")
    if how == "casts" or how == "several":
        right = without.count(",") if how == "several" else "casts" in without
        how = "passes" if right else "fails"
    if how == "dies":
        print("an illegal access", file=sys.stderr, flush=True)
        os.kill(os.getpid(), 11)
    if how == "hangs":
        time.sleep(60)
    found = {"kind": "", "text": "", "seconds": 0.5}
    if how in ("fails", "leaves"):
        found = {"kind": "launch failed", "text": "RuntimeError: Triton Error", "seconds": 0.5}
    print(json.dumps(found), flush=True)
    if how == "leaves":
        break
"""


@pytest.fixture
def workers(monkeypatch):
    """Sets how each family's job goes."""

    def become(**how):
        monkeypatch.setattr(gpu, "WORKER", (sys.executable, "-c", f"HOW = {how}\n{SCRIPT}"))

    become()
    return become


def outcomes(seconds=30.0):
    return list(gpu.run(JOBS, seconds))


@pytest.mark.parametrize(
    ("how", "failed", "said"),
    [
        ({}, [], "cpu norm float16: passed (0.5 s)"),
        ({"pool": "dies"}, ["pool"], "cpu pool float16: PROBLEM: process died: exit status -11: an illegal access"),
        # The worker leaves after a failure that has made the GPU unusable for its process, and another one follows.
        ({"norm": "leaves"}, ["norm"], "cpu norm float16: PROBLEM: launch failed: RuntimeError: Triton Error"),
    ],
    ids=["passes", "dies", "leaves"],
)
def test_every_job_has_an_outcome(workers, how, failed, said):
    workers(**how)
    found = outcomes()
    assert [of.job for of in found] == JOBS
    assert [of.job.family for of in found if of.failed] == failed
    assert said in map(str, found)


def test_a_kernel_that_hangs_ends_with_the_time(workers):
    workers(pool="hangs")
    start = time.monotonic()
    found = outcomes(1.0)
    assert time.monotonic() - start < 20
    assert [of.job for of in found] == JOBS
    assert [of.late for of in found] == [False, True, True]
    assert "not tried, because no time was left: 1 seconds were over" in str(found[-1])


@pytest.fixture
def on_a_gpu(monkeypatch, workers):
    """A machine with two GPUs of one model."""
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Card")
    monkeypatch.setattr(_backend, "architecture", lambda device: "sm_90")

    class Properties:
        name, total_memory, multi_processor_count = "Card", 80 * 2**30, 132

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    return workers


def test_the_report_can_be_attached(on_a_gpu, tmp_path, capsys):
    path = tmp_path / "fusedseg.json"
    assert main(["doctor", "--gpu", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    jobs = [(name, dtype) for name, family in FAMILIES.items() for dtype in gpu.TESTED if dtype in family.dtypes]
    for family, dtype in jobs:
        assert f"  cuda:0 {family} {first_use.short(dtype)}: passed (0.5 s)\n" in out
    # The other GPU is of the same model.
    assert "cuda:1 norm" not in out
    assert "  cuda:0 (Card, sm_90): triton (a GPU (sm_90), and triton is installed)" in out
    assert "All is well: every kernel that was tried agrees with PyTorch in float64.\n" in out
    assert out.endswith(f"The report is in {path}: please attach it when you report a problem.\n")
    content = json.loads(path.read_text())
    assert any(line.startswith("torch ") for line in content["versions"])
    (card,) = content["gpus"]
    assert (card["gpu"], card["architecture"], card["multiprocessors"]) == ("Card", "sm_90", 132)
    assert len(content["jobs"]) == len(jobs) + 1
    assert "  cuda:0 network float16: passed (0.5 s)\n" in out


def test_kernels_for_hopper_are_tested_on_hopper_alone(on_a_gpu, monkeypatch, capsys):
    assert main(["doctor", "--gpu"]) == 0
    assert "cuda:0 conv3d float16: passed" in capsys.readouterr().out
    monkeypatch.setattr(_backend, "architecture", lambda device: "sm_80")
    assert main(["doctor", "--gpu"]) == 0
    assert "conv3d" not in capsys.readouterr().out


def test_a_failure_is_a_problem(on_a_gpu, capsys):
    on_a_gpu(norm="fails")
    assert main(["doctor", "--gpu"]) == 1
    out = capsys.readouterr().out
    assert "  cuda:0 norm bfloat16: PROBLEM: launch failed: RuntimeError: Triton Error\n" in out
    assert out.splitlines()[-1].startswith("Something is wrong: see the lines with PROBLEM above.")


@pytest.mark.parametrize(
    ("how", "advice"),
    [
        ("casts", "It is right without casts: set FUSEDSEG_WITHOUT=casts, and please report it"),
        ("several", f"It is right without {ALL}: set FUSEDSEG_WITHOUT={ALL}, and please report it"),
        ("fails", f"It is so without {ALL} too"),
        # Each try has a process of its own then.
        ("dies", f"It is so without {ALL} too"),
    ],
)
def test_what_to_leave_out_is_found(on_a_gpu, capsys, how, advice):
    on_a_gpu(network=how)
    assert main(["doctor", "--gpu"]) == 1
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "network" in line)
    assert line.startswith("  cuda:0 network float16: PROBLEM: ")
    assert line.endswith(advice)


def test_what_is_left_out_already_stays_so(on_a_gpu, monkeypatch, capsys):
    monkeypatch.setenv("FUSEDSEG_WITHOUT", "zeros")
    on_a_gpu(network="casts")
    assert main(["doctor", "--gpu"]) == 1
    assert "set FUSEDSEG_WITHOUT=casts,zeros, and" in capsys.readouterr().out
    monkeypatch.setenv("FUSEDSEG_WITHOUT", "casts")
    assert main(["doctor", "--gpu"]) == 0


@pytest.mark.parametrize("options", [[], ["--gpu"]], ids=["all", "gpu"])
def test_a_wrong_name_to_leave_out_is_refused(on_a_gpu, monkeypatch, capsys, options):
    """It ended in a traceback, after all kernels had been tested."""
    monkeypatch.setenv("FUSEDSEG_WITHOUT", "casts,replay")
    assert main(["doctor", *options]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("fusedseg doctor: environment variable FUSEDSEG_WITHOUT must have names with commas")
    assert printed.err.endswith("zeros; got 'replay'\n")
    assert not printed.out


def test_a_gpu_that_fusedseg_does_not_use_is_tested_too(on_a_gpu, monkeypatch, capsys):
    monkeypatch.setattr(_backend, "architecture", lambda device: "gfx1100")
    assert main(["doctor", "--gpu"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("Every kernel that was tried is right here, but fusedseg does not use them: gfx1100 has")


def test_no_report_is_overwritten(on_a_gpu, tmp_path, capsys):
    path = tmp_path / "fusedseg.json"
    path.write_text("mine")
    assert main(["doctor", "--gpu", "--json", str(path)]) == 2
    assert capsys.readouterr().err == (f"fusedseg doctor: {path} exists: choose another path, or pass --overwrite\n")
    assert path.read_text() == "mine"
    assert main(["doctor", "--gpu", "--json", str(path), "--overwrite"]) == 0
    assert json.loads(path.read_text())["jobs"]
    assert main(["doctor", "--gpu", "--json", str(tmp_path / "none" / "a.json")]) == 2
    assert "there is no folder" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="describes a machine without a GPU")
def test_without_a_gpu_it_says_so_in_one_sentence(capsys):
    assert main(["doctor", "--gpu"]) == 2
    assert capsys.readouterr() == ("", "fusedseg doctor: --gpu: torch sees no GPU here\n")


def test_the_worker_prints_each_result(capsys):
    pytest.importorskip("triton")
    gpu.worker([gpu.Job("cpu", "pool", "float32"), gpu.Job("cpu", "pool", "int32")])
    passed, failed = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert passed["kind"] == ""
    # An error has its traceback.
    assert failed["kind"]
    assert "Traceback" in failed["traceback"]


def test_the_worker_leaves_a_gpu_that_does_not_answer(monkeypatch, capsys):
    pytest.importorskip("triton")
    monkeypatch.setattr(first_use, "answers", lambda device: False)
    gpu.worker([gpu.Job("cpu", "pool", "int32"), gpu.Job("cpu", "pool", "float32")])
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_the_plain_report_names_every_gpu(on_a_gpu, monkeypatch, capsys):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"cuda:1 \(Card, sm_90\): triton", out)
    assert report.devices()[1:] == [torch.device("cuda", 0), torch.device("cuda", 1)]
