"""Importing works anywhere: without triton, without a GPU, from any folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

# a module that is None in sys.modules cannot be imported: what a machine without triton looks like
WITHOUT_TRITON = "import sys; sys.modules['triton'] = None\n"

TRAIN = """
import torch, fusedseg
norm = fusedseg.InPlaceABN(3)
conv = torch.nn.Conv2d(2, 3, 1)
norm(conv(torch.randn(2, 2, 4, 4))).square().sum().backward()
assert conv.weight.grad.abs().sum() > 0
"""


def python(code: str, folder: Path, **env: str) -> str:
    """What a fresh interpreter prints, run in a folder that is not the repository."""
    clean = {key: value for key, value in os.environ.items() if key not in ("FUSEDSEG_BACKEND", "TRITON_INTERPRET")}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=clean | env, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_import_and_a_training_step_without_triton(tmp_path):
    assert python(WITHOUT_TRITON + TRAIN + "print(fusedseg.backend)", tmp_path) == "auto"


def test_backend_triton_without_triton_says_so(tmp_path):
    code = (
        f"{WITHOUT_TRITON}import torch, fusedseg\n"
        "try:\n    fusedseg.InPlaceABN(3)(torch.randn(2, 3, 4))\n"
        "except RuntimeError as error:\n    print(error)"
    )
    assert "triton is not installed" in python(code, tmp_path, FUSEDSEG_BACKEND="triton")


def test_import_leaves_the_kernels_alone(tmp_path):
    """TRITON_INTERPRET is read when a kernel is defined, so a program must be able to set it after the import."""
    assert python("import sys, fusedseg; print('fusedseg.kernels' in sys.modules)", tmp_path) == "False"


def test_import_leaves_the_compiler_alone(tmp_path):
    """A decorator of ``torch.compiler`` imported ``torch._dynamo``, which doubled the time of ``import fusedseg``."""
    code = (
        "import sys, torch\nbefore = set(sys.modules)\nimport fusedseg\n"
        "print({'torch._dynamo', 'triton', 'sympy'} & (set(sys.modules) - before))"
    )
    assert python(code, tmp_path) == "set()"


def test_a_function_is_marked_constant_as_pytorch_marks_it():
    """``assume_constant_result`` stands for PyTorch's decorator, so both must leave the same attributes."""
    from fusedseg.ops.unfused import assume_constant_result

    marked, ours = (mark(lambda: True) for mark in (torch.compiler.assume_constant_result, assume_constant_result))
    assert vars(ours) == vars(marked) != {}


def test_kernels_are_found_from_any_folder(tmp_path):
    pytest.importorskip("triton")
    assert python("import fusedseg.kernels.norm_act as k; print(k.__name__)", tmp_path) == "fusedseg.kernels.norm_act"


def test_kernels_are_the_folder_of_this_checkout(tmp_path):
    folder = python("import fusedseg.kernels; print(fusedseg.kernels.__path__[0])", tmp_path)
    assert Path(folder) == Path(__file__).parents[1] / "kernels"


def test_public_names(tmp_path):
    code = "import fusedseg\nfor name in fusedseg.__all__: getattr(fusedseg, name)\nprint(*fusedseg.__all__)"
    names = python(code, tmp_path).split()
    assert {"InPlaceABN", "backend", "functional", "memory", "unet"} <= set(names)


def test_backend_from_the_environment(tmp_path):
    assert python("import fusedseg; print(fusedseg.backend)", tmp_path, FUSEDSEG_BACKEND="aten") == "aten"


def test_backend_is_checked_when_set():
    import fusedseg

    with pytest.raises(ValueError, match=r"fusedseg\.backend must be one of auto, triton, aten, got 'cuda'"):
        fusedseg.backend = "cuda"
