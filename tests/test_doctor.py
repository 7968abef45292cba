"""The command ``fusedseg doctor``."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fusedseg
from fusedseg import _backend
from fusedseg.__main__ import main
from fusedseg.doctor import report as doctor
from fusedseg.ops.self_test import checks
from tests.tools import warm

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="describes a machine without a GPU")


@pytest.fixture
def without_interpreter(monkeypatch):
    """Behaves as outside the tests, where kernels are compiled; a stand-in replaces the compiler."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(doctor, "compile_kernels", lambda name, target: f"2 kernels compiled for {target}")


def test_versions_backend_and_kernels_are_reported(without_interpreter, capsys):
    pytest.importorskip("triton")
    assert main(["doctor", "--compile"]) == 0
    out = capsys.readouterr().out
    assert re.search(rf"^fusedseg +{re.escape(fusedseg.__version__)}$", out, re.MULTILINE)
    assert re.search(rf"^torch +{re.escape(torch.__version__)}$", out, re.MULTILINE)
    assert "  cpu: aten ('auto' takes Triton on GPUs only, and this is cpu)" in out
    for target in ("sm_80", "sm_90"):
        for name in ("norm", "conv", "pool", "sums", "low_bit"):
            assert f"  {target} {name}: 2 kernels compiled for {target}" in out
    assert out.splitlines()[-1] == (
        "All is well: there is no GPU here, so PyTorch computes every op, and the kernels compile for sm_80 and sm_90."
    )


def test_nothing_is_compiled_unless_asked_for(without_interpreter, monkeypatch, capsys):
    pytest.importorskip("triton")

    def compiles(*args):
        raise AssertionError("compiled")

    monkeypatch.setattr(doctor, "compile_kernels", compiles)
    monkeypatch.setattr(doctor, "run_kernels", compiles)
    why = "compiling them takes minutes the first time; `fusedseg doctor --compile` does it"
    for gpus in (0, 1):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        monkeypatch.setattr(doctor, "describe", str)
        monkeypatch.setattr(_backend, "architecture", lambda device: "sm_90")
        monkeypatch.setattr(_backend, "is_tested", lambda device: False)
        assert main(["doctor"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[-3] == f"  not tried: {why}"
        assert lines[-1] == f"Nothing is wrong, but the kernels were not tried: {why}."


def test_a_kernel_that_does_not_compile_is_a_problem(without_interpreter, monkeypatch, capsys):
    pytest.importorskip("triton")

    def fails(name, target):
        if name == "pool":
            raise RuntimeError("ptxas died\nat great length")
        return "compiled"

    monkeypatch.setattr(doctor, "compile_kernels", fails)
    assert main(["doctor", "--compile"]) == 1
    out = capsys.readouterr().out
    assert "sm_90 pool: PROBLEM: RuntimeError: ptxas died (" in out
    assert "sm_90 norm: compiled (" in out
    assert out.splitlines()[-1] == "Something is wrong: see the lines with PROBLEM above."


def test_asking_for_triton_where_nothing_serves_it_is_a_problem(without_interpreter, monkeypatch, capsys):
    monkeypatch.setattr(fusedseg, "backend", "triton")
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "PROBLEM: Triton was asked for" in out
    assert out.splitlines()[-1] == "Something is wrong: see the line with PROBLEM above."


def test_without_triton_kernels_are_not_tried(without_interpreter, monkeypatch, capsys):
    monkeypatch.setattr(doctor._backend, "_has_triton", lambda: False)
    assert main(["doctor", "--compile"]) == 0
    out = capsys.readouterr().out
    assert "not tried: triton is not installed, so PyTorch computes every op" in out
    assert out.splitlines()[-1].startswith("Nothing is wrong, but the kernels were not tried: triton is not installed")


def test_tested_versions_bring_no_warning():
    """So does a release of this package with the versions that its tests run with."""
    assert list(doctor.untested()) == []


@pytest.mark.parametrize(
    ("name", "version", "side"),
    [("torch", "2.5.1+cu124", "older"), ("torch", "2.16.0", "newer"), ("torch", "3.0", "newer")],
)
def test_another_torch_brings_a_warning(monkeypatch, name, version, side):
    monkeypatch.setattr(torch, "__version__", version)
    (line,) = doctor.untested()
    oldest, newest = doctor.TESTED[name]
    expected = f"{name} {version} is {side} than the versions that fusedseg is tested with, {oldest} to {newest}"
    assert line == f"WARNING: {expected}"


def test_another_triton_and_missing_names_bring_warnings(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_version", lambda name: "3.99.1")
    monkeypatch.setattr(doctor._torch, "MISSING_FOR_SCOPE", ["torch._C._a"])
    monkeypatch.setattr(doctor._torch, "MISSING", ["torch._C._b"])
    triton, scope, other = doctor.untested()
    assert "triton 3.99.1 is newer than" in triton
    assert "fusedseg.recompute() does nothing here" in scope
    assert "torch._C._a" in scope
    assert "torch._C._b" in other
    assert main(["doctor"]) == 0
    assert "WARNING: triton 3.99.1" in capsys.readouterr().out


def test_triton_is_found_by_import(monkeypatch, tmp_path):
    """The distribution may be triton-windows or pytorch-triton-rocm, and an empty folder ``triton`` is no Triton."""
    for name in ("empty", "windows"):
        (tmp_path / name / "triton").mkdir(parents=True)
    (tmp_path / "windows" / "triton" / "__init__.py").write_text("__version__ = '3.5.1.post21'")
    # Only the folders of this test have a triton; the package itself is found in the checkout.
    done = warm.run_bare(HIDE + FIND, *(str(tmp_path / name) for name in ("empty", "windows")))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["False not installed (a folder of this name is empty)", "True 3.5.1.post21"]


# Forks a process for each folder, because a process imports the package once.
FIND = """
import os
for folder in sys.argv[1:]:
    sys.stdout.flush()
    if not os.fork():
        sys.path.insert(0, folder)
        from fusedseg import _backend
        from fusedseg.doctor import report
        print(_backend._has_triton(), report._version("triton"))
        sys.exit()
    os.wait()
"""
# A finder that leaves out the triton that is installed.
HIDE = """
import importlib.machinery, sys, torch
class Only(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return super().find_spec(name, sys.path[:1], target) if name == "triton" else None
sys.meta_path.insert(0, Only)
[sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "triton"]
"""


def test_without_triton_it_is_one_sentence():
    """A process in which Triton cannot be imported: every op runs on aten, and the doctor says so."""
    script = "import sys; sys.modules['triton'] = None\nfrom fusedseg.__main__ import main\nsys.exit(main(['doctor']))"
    done = warm.run_bare(script)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^triton +not installed", done.stdout, re.MULTILINE)
    assert "  cpu: aten (triton is not installed)" in done.stdout
    assert done.stdout.count("triton is not installed, so PyTorch computes every op") == 2
    assert done.stdout.splitlines()[-1].startswith("Nothing is wrong, but the kernels were not tried")


def test_under_the_interpreter_kernels_are_not_tried(monkeypatch, capsys):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert main(["doctor", "--compile"]) == 0
    assert "not tried: TRITON_INTERPRET is set" in capsys.readouterr().out


@pytest.mark.usefixtures("needs_interpreter")
@pytest.mark.parametrize("name", checks.CHECKS)
def test_kernels_agree_with_float64(name):
    """The checks that the doctor runs on each GPU pass here in Triton's interpreter."""
    assert re.fullmatch(r"ran, and agrees with float64 to \de[-+]\d\d", doctor.run_kernels(name, torch.device("cpu")))


def test_on_a_gpu_every_check_runs_there(without_interpreter, monkeypatch, capsys):
    """A stand-in replaces the GPU, so the test runs on any machine."""
    pytest.importorskip("triton")
    tried = []

    def ran(name, device):
        tried.append((name, str(device)))
        return "ran"

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(doctor, "describe", str)
    monkeypatch.setattr(_backend, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(_backend, "is_tested", lambda device: False)
    monkeypatch.setattr(doctor, "run_kernels", ran)
    assert main(["doctor", "--compile"]) == 0
    assert tried == [(name, "cuda:0") for name in checks.CHECKS]
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "All is well: every kernel ran on every GPU and agrees with PyTorch in float64."


def test_the_checks_launch_every_kernel(monkeypatch):
    """Every kernel has a check, also a kernel that is added later."""
    pytest.importorskip("triton")
    from fusedseg.kernels.launcher import Launcher

    launched = set()
    monkeypatch.setattr(Launcher, "__call__", lambda self, tensors, *floats: launched.add(self._kernel.fn.__name__))
    for check in checks.CHECKS.values():
        list(check(torch.float32, torch.device("cpu")))
    kernels = (path.read_text() for path in (Path(__file__).parents[1] / "kernels").glob("*.py"))
    assert launched == {name for text in kernels for name in re.findall(r"^def (\w+_kernel)\(", text, re.MULTILINE)}


def clean() -> dict[str, str]:
    """The environment without the variables of the tests."""
    return warm.without(["FUSEDSEG_", "TRITON_"])


@pytest.mark.slow
def test_as_a_program_it_compiles_and_warns_of_nothing(tmp_path):
    """Triton 3.9 warned about ``enable_fp_fusion``, an option of its compiler that the launches did not set."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "fusedseg", "doctor", "--compile"]
    run = subprocess.run(command, cwd=tmp_path, env=clean(), capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.splitlines()[-1].startswith("All is well: ")


SMALL = """
import sys
from fusedseg import __main__
from fusedseg.doctor import report
report.TARGETS, report.CHECKS = ("sm_80",), {"pool": report.CHECKS["pool"]}
sys.exit(__main__.main(["doctor", *sys.argv[1:]]))
"""


def test_as_a_program_it_warns_of_nothing(tmp_path):
    """The test above, with two kernels for one GPU instead of all kernels."""
    pytest.importorskip("triton")
    run = warm.run_bare(SMALL, "--compile", cwd=tmp_path, env=clean())
    assert (run.returncode, run.stderr) == (0, "")
    assert "  sm_80 pool: 2 kernels compiled, not run (" in run.stdout


def test_without_compile_it_imports_no_compiler(tmp_path):
    """The command is fast because it imports neither PyTorch's compiler, nor our kernels, nor matplotlib."""
    code = (
        "import sys\nfrom fusedseg.__main__ import main\nassert main(['doctor']) == 0\n"
        "names = ['torch._dynamo', 'torch._inductor', 'sympy', 'fusedseg.kernels', 'matplotlib']\n"
        "print([name for name in names if name in sys.modules])"
    )
    run = warm.run_bare(code, cwd=tmp_path, env=clean())
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(("argv", "message"), [([], "required: COMMAND"), (["doktor"], "invalid choice: 'doktor'")])
def test_command_line_errors(argv, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    assert message in capsys.readouterr().err
