"""The package can be imported without triton, without a GPU, and from any folder."""

import importlib
import json
from pathlib import Path

import pytest
import torch

import fusedseg
from tests.tools import warm

# A module that is None in sys.modules cannot be imported, as on a machine without triton.
WITHOUT_TRITON = """
import json, sys
sys.modules["triton"] = None
import torch, fusedseg
found = {"backend": fusedseg.backend, "error": None}
norm = fusedseg.InPlaceABN(3)
conv = torch.nn.Conv2d(2, 3, 1)
try:
    norm(torch.randn(2, 3, 4))
except RuntimeError as error:
    found["error"] = str(error)
fusedseg.backend = "auto"
norm(conv(torch.randn(2, 2, 4, 4))).square().sum().backward()
found["gradient"] = conv.weight.grad.abs().sum().item()
print(json.dumps(found))
"""

PLAIN = """
import json, sys, torch
before = set(sys.modules)
import fusedseg
loaded = sorted(set(sys.modules) - before)
found = {"loaded": loaded, "backend": fusedseg.backend}
for name in fusedseg.__all__:
    getattr(fusedseg, name)
import fusedseg.__main__
found["by the command line"] = sorted(sys.modules)
try:
    import triton
except ImportError:
    print(json.dumps(found))
    sys.exit()
import fusedseg.kernels.norm_act
found["module"] = fusedseg.kernels.norm_act.__name__
found["folder"] = list(fusedseg.kernels.__path__)
print(json.dumps(found))
"""


def python(code: str, folder: Path, **env: str) -> str:
    """Returns the output of a program in a folder outside the repository; its process has imported PyTorch alone."""
    run = warm.run_bare(code, cwd=folder, env=warm.without(["FUSEDSEG_BACKEND", "TRITON_INTERPRET"]) | env)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    """The findings of one program, which all tests share."""
    return json.loads(python(PLAIN, tmp_path_factory.mktemp("elsewhere")))


def test_without_triton(tmp_path):
    """The import and a training step work; the error of the backend "triton" says that triton is missing.

    The backend comes from the environment variable.
    """
    found = json.loads(python(WITHOUT_TRITON, tmp_path, FUSEDSEG_BACKEND="triton"))
    assert found["backend"] == "triton"
    assert "triton is not installed" in found["error"]
    assert found["gradient"] > 0


def test_the_default_backend(found):
    assert found["backend"] == "auto"


def test_import_leaves_the_kernels_alone(found):
    """TRITON_INTERPRET is read when a kernel is defined, so a program must be able to set it after the import."""
    assert "fusedseg.ops" in found["loaded"]
    assert "fusedseg.kernels" not in found["loaded"]


def test_import_leaves_the_integrations_alone(found):
    """They import frameworks, which may be absent."""
    for when in ("loaded", "by the command line"):
        assert not [name for name in found[when] if name.startswith("fusedseg.integrations")]


def test_import_leaves_the_compiler_alone(found):
    """A decorator of ``torch.compiler`` imported ``torch._dynamo``, which doubled the time of ``import fusedseg``."""
    assert {"torch._dynamo", "triton", "sympy"}.isdisjoint(found["loaded"])


def test_the_command_line_does_not_load_matplotlib(found):
    """Only pictures need it, and its import takes a second."""
    assert "matplotlib" not in found["by the command line"]


def test_a_function_is_marked_constant_as_pytorch_marks_it():
    """``assume_constant_result`` stands for PyTorch's decorator, so both must leave the same attributes."""
    from fusedseg._torch import assume_constant_result

    marked, ours = (mark(lambda: True) for mark in (torch.compiler.assume_constant_result, assume_constant_result))
    assert vars(ours) == vars(marked) != {}


def test_kernels_are_found_from_any_folder(found):
    """The kernels come from the folder of this checkout."""
    pytest.importorskip("triton")
    assert found["module"] == "fusedseg.kernels.norm_act"
    assert [Path(folder) for folder in found["folder"]] == [Path(__file__).parents[1] / "kernels"]


def test_dir_has_public_names_alone():
    """Completion in an editor offered ``gc``, ``sys`` and the files of each package."""
    for name in ("functional", "losses", "memory", "nn", "unet", "compiler"):
        module = importlib.import_module(f"fusedseg.{name}")
        assert dir(module) == sorted(module.__all__)
    assert dir(fusedseg) == sorted([*fusedseg.__all__, "__version__", "compiler", "nn"])
