"""The command ``fusedseg doctor``."""

import re
from pathlib import Path

import pytest
import torch

import fusedseg
from fusedseg.__main__ import main
from fusedseg.doctor import report as doctor
from fusedseg.ops.registry import FAMILIES
from tests.tools import warm

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="describes a machine without a GPU")


def test_versions_and_backend_are_reported(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert re.search(rf"^fusedseg +{re.escape(fusedseg.__version__)}$", out, re.MULTILINE)
    assert re.search(rf"^torch +{re.escape(torch.__version__)}$", out, re.MULTILINE)
    assert "  cpu: aten ('auto' takes Triton on GPUs only, and this is cpu)" in out
    assert out.splitlines()[-1] == "Nothing is wrong."


def test_asking_for_triton_where_nothing_serves_it_is_a_problem(monkeypatch, capsys):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(fusedseg, "backend", "triton")
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "PROBLEM: Triton was asked for" in out
    assert out.splitlines()[-1] == "Something is wrong: see the line with PROBLEM above."


def test_tested_versions_bring_no_warning():
    """So does a release of this package with the versions that its tests run with."""
    assert list(doctor.untested()) == []


@pytest.mark.parametrize(("version", "side"), [("2.5.1+cu124", "older"), ("2.16.0", "newer"), ("3.0", "newer")])
def test_another_torch_brings_a_warning(monkeypatch, version, side):
    monkeypatch.setattr(torch, "__version__", version)
    tested = " to ".join(doctor.TESTED["torch"])
    expected = f"WARNING: torch {version} is {side} than the versions that fusedseg is tested with, {tested}"
    assert list(doctor.untested()) == [expected]


def test_another_triton_and_missing_names_bring_warnings(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_version", lambda name: "3.99.1")
    monkeypatch.setattr(doctor._torch, "MISSING", ["torch._C._b"])
    triton, other = doctor.untested()
    assert "triton 3.99.1 is newer than" in triton
    assert "torch._C._b" in other
    assert main(["doctor"]) == 0
    assert "WARNING: triton 3.99.1" in capsys.readouterr().out


def test_triton_is_found_by_import(tmp_path):
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
    assert done.stdout.splitlines()[-1] == "Nothing is wrong."


def test_the_checks_launch_every_kernel(monkeypatch):
    """Every kernel has a check, also a kernel that is added later."""
    pytest.importorskip("triton")
    from fusedseg.kernels.launcher import Launcher

    launched, of_family = set(), set()
    monkeypatch.setattr(Launcher, "__call__", lambda self, tensors, *floats: of_family.add(self._kernel.fn.__name__))
    for name, family in FAMILIES.items():
        list(family.self_test(torch.float32, torch.device("cpu")))
        # Every norm on a GPU compiled this kernel, which an option needs that is off by default.
        assert (name == "norm_sums") == ("norm_of_sums_kernel" in of_family), name
        launched |= of_family
        of_family.clear()
    kernels = (path.read_text() for path in (Path(__file__).parents[1] / "kernels").glob("*.py"))
    assert launched == {name for text in kernels for name in re.findall(r"^def (\w+_kernel)\(", text, re.MULTILINE)}


def clean() -> dict[str, str]:
    """The environment without the variables of the tests."""
    return warm.without(["FUSEDSEG_", "TRITON_"])


def test_it_imports_no_compiler(tmp_path):
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
