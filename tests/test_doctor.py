"""``python -m fusedseg doctor``."""

import re

import pytest
import torch

import fusedseg
from fusedseg import doctor
from fusedseg.__main__ import main

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="describes a machine without a GPU")


@pytest.fixture
def without_interpreter(monkeypatch):
    """As outside the tests, where kernels are compiled; what compiling does is stood in for."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(doctor, "compile_kernels", lambda target: f"8 kernels compiled for {target}")


def test_versions_backend_and_kernels_are_reported(without_interpreter, capsys):
    pytest.importorskip("triton")
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert re.search(rf"^fusedseg +{re.escape(fusedseg.__version__)}$", out, re.MULTILINE)
    assert re.search(rf"^torch +{re.escape(torch.__version__)}$", out, re.MULTILINE)
    assert "  cpu: aten ('auto' takes Triton on GPUs only, and this is cpu)" in out
    for target in ("sm_80", "sm_90"):
        assert f"  {target}: 8 kernels compiled for {target}" in out


def test_a_kernel_that_does_not_compile_is_a_problem(without_interpreter, monkeypatch, capsys):
    pytest.importorskip("triton")

    def fails(target):
        raise RuntimeError("ptxas died\nat great length")

    monkeypatch.setattr(doctor, "compile_kernels", fails)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "sm_90: PROBLEM: RuntimeError: ptxas died (" in out


def test_asking_for_triton_where_nothing_serves_it_is_a_problem(without_interpreter, monkeypatch, capsys):
    monkeypatch.setattr(fusedseg, "backend", "triton")
    assert main(["doctor"]) == 1
    assert "PROBLEM: Triton was asked for" in capsys.readouterr().out


def test_without_triton_kernels_are_not_tried(without_interpreter, monkeypatch, capsys):
    monkeypatch.setattr(doctor._backend, "_has_triton", lambda: False)
    assert main(["doctor"]) == 0
    assert "not tried: triton is not installed: every op runs on aten" in capsys.readouterr().out


def test_under_the_interpreter_kernels_are_not_tried(monkeypatch, capsys):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert main(["doctor"]) == 0
    assert "not tried: TRITON_INTERPRET is set" in capsys.readouterr().out


def test_kernels_that_disagree_are_a_problem(monkeypatch):
    """The comparison itself, on the CPU, with a launch that is wrong by one part in a thousand."""
    monkeypatch.setattr(doctor, "_launch", lambda *inputs: {k: v * 1.001 for k, v in doctor._eager(*inputs).items()})
    with pytest.raises(RuntimeError, match=r"is off by 1\.0e-03 \(contiguous, one launch"):
        doctor.run_kernels(torch.device("cpu"))


@pytest.mark.parametrize(("argv", "message"), [([], "required: command"), (["doktor"], "invalid choice: 'doktor'")])
def test_command_line_errors(argv, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    assert message in capsys.readouterr().err
