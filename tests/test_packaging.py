"""The statements of pyproject.toml about the package agree with the folders and with a built release."""

import email
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import fusedseg
from fusedseg.doctor.report import TESTED
from tests.test_documentation import blocks
from tests.tools import warm

ROOT = Path(__file__).parents[1]
PYPROJECT = (ROOT / "pyproject.toml").read_text()


def listed_packages() -> set[str]:
    listing = re.search(r"^packages = \[(.*?)\]", PYPROJECT, re.DOTALL | re.MULTILINE)
    assert listing
    return set(re.findall(r'"([\w.]+)"', listing[1]))


def test_every_package_is_listed():
    """A folder that is not listed works in a checkout and is missing from the wheel."""
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "fusedseg").rglob("*.py")}
    assert listed_packages() == {".".join(folder.parts) for folder in folders}


def test_version_is_stated_in_one_place():
    assert not re.search(r"^version *= *\"", PYPROJECT, re.MULTILINE)
    assert fusedseg.__version__ not in (ROOT / "CITATION.cff").read_text()


def test_changelog_has_this_version():
    assert f"## [{fusedseg.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_versions_that_are_demanded_are_those_that_are_tested():
    """The doctor's table has the tested versions; nothing newer is refused, and Triton comes with PyTorch."""
    (oldest_python, newest_python), (oldest_torch, _), (oldest_triton, _) = (
        TESTED[name] for name in ("python", "torch", "triton")
    )
    dependencies = re.search(r"^dependencies = \[(.*?)^\]", PYPROJECT, re.DOTALL | re.MULTILINE)
    assert dependencies
    assert re.findall(r'^    "(.*)",$', dependencies[1], re.MULTILINE) == [f"torch>={oldest_torch}", "numpy"]
    assert f"triton>={oldest_triton}; " in PYPROJECT
    assert f'requires-python = ">={oldest_python}"' in PYPROJECT
    minors = range(int(oldest_python.split(".")[1]), int(newest_python.split(".")[1]) + 1)
    assert re.findall(r"Python :: 3\.(\d+)", PYPROJECT) == list(map(str, minors))


# These are copied to a folder where a release is built, because setuptools leaves folders behind.  Of the tests, one
# file is enough.
FOLDERS = ("fusedseg", "kernels", "bench", "docs", "examples", "tests")
FILES = (
    "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff",
    "CONTRIBUTING.md", "SECURITY.md",
)  # fmt: skip
BUILD = """
import sys
from setuptools import build_meta
print(*(build("dist") for build in (build_meta.build_sdist, build_meta.build_wheel, build_meta.build_editable)))
"""


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    """The sdist and the wheel of this checkout, and the wheel of an editable install."""
    setuptools = pytest.importorskip("setuptools")
    if int(setuptools.__version__.partition(".")[0]) < 71:
        # Old versions of setuptools need this package to build a wheel.
        pytest.importorskip("wheel")
    folder = tmp_path_factory.mktemp("release")
    for name in FOLDERS:
        if (ROOT / name).exists():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "_build", "out"))
    for name in FILES:
        shutil.copy(ROOT / name, folder)
    run = subprocess.run([sys.executable, "-c", BUILD], cwd=folder, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return [folder / "dist" / name for name in run.stdout.splitlines()[-1].split()]


def test_wheel_holds_the_package_alone(release):
    with zipfile.ZipFile(release[1]) as wheel:
        held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    expected = {f"fusedseg/{path.relative_to(ROOT / 'fusedseg')}" for path in (ROOT / "fusedseg").rglob("*.py")}
    expected |= {f"fusedseg/kernels/{path.name}" for path in (ROOT / "kernels").glob("*.py")}
    assert held == expected | {"fusedseg/py.typed"}
    with zipfile.ZipFile(release[1]) as wheel:
        assert wheel.read("fusedseg/kernels/__init__.py").decode() == (ROOT / "kernels/__init__.py").read_text()


def test_metadata_is_complete(release):
    with zipfile.ZipFile(release[1]) as wheel:
        (info,) = {name.split("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
        found = email.message_from_bytes(wheel.read(f"{info}/METADATA"))
        scripts = wheel.read(f"{info}/entry_points.txt").decode()
        assert any(name.startswith(info) and name.endswith("LICENSE") for name in wheel.namelist())
    assert found["Version"] == fusedseg.__version__
    assert "License :: OSI Approved :: Apache Software License" in found.get_all("Classifier")
    assert found["Requires-Python"] == ">=3.10"
    assert "Programming Language :: Python :: 3.10" in found.get_all("Classifier")
    # The project has no address that it could promise to keep.
    assert found["Home-page"] is None
    assert found["Project-URL"] is None
    assert found["Description-Content-Type"] == "text/markdown"
    assert "fusedseg = fusedseg.__main__:main" in scripts


def test_sdist_holds_the_tests_and_nothing_stray(release):
    with tarfile.open(release[0]) as sdist:
        held = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"tests/reference.py", "tests/tools/codegen.py", "bench/harness.py", "kernels/launch.py", *FILES} <= held
    # A checkout finds the folder kernels/ by this file.
    assert "fusedseg/kernels/__init__.py" in held
    made = {"PKG-INFO", "setup.cfg", "fusedseg.egg-info"}
    assert {name.split("/")[0] for name in held if name} <= {*FOLDERS, *FILES, *made}
    assert not [name for name in held if name.endswith(".pyc")]


# A user's program.  mypy must find the errors that its comments name, and no others.
PROGRAM = """
import torch
from torch import nn
import fusedseg

model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
fusedseg.backend = "aten"
model = fusedseg.convert(model)
served: list[str] = [row.name for row in fusedseg.conversion(model).served]
block = fusedseg.ConvABN2d(3, 4, 3, padding=1, conv_backend="aten")
sums = fusedseg.functional.segmentation_sums(block(model(torch.randn(1, 3, 8, 8))), torch.zeros(1, 8, 8))
(1 - sums.overlap.mean() + sums.nll.sum()).backward()

fusedseg.backend = "cuda"  # assignment
fusedseg.ConvABN2d(3, 4, 3, conv_backend="cudnn")  # arg-type
fusedseg.functional.norm_act(torch.zeros(1), None, None, norm="layer")  # arg-type
fusedseg.batch_norm  # attr-defined
fusedseg.conversion(model).served.kept  # attr-defined
"""


@pytest.mark.parametrize("way", ["wheel", "editable"])
def test_type_checkers_see_the_package(way, release, tmp_path):
    """mypy did not find the package in an editable install, and refused what the pages write."""
    pytest.importorskip("mypy", reason="mypy comes with the extra lint")
    venv.create(tmp_path / "venv", symlinks=True)
    (site,) = (tmp_path / "venv").glob("lib/*/site-packages")
    with zipfile.ZipFile(release[1 if way == "wheel" else 2]) as wheel:
        wheel.extractall(site)
    names = ["program.py"]
    (tmp_path / "program.py").write_text(PROGRAM)
    for number, block in enumerate(blocks("python")):
        names.append(f"page_{number}.py")
        (tmp_path / names[-1]).write_text(f"# {block.where}\n{block.text}")
    # PyTorch is not installed there, so that mypy need not read it: what it returns may be anything.
    python = str(tmp_path / "venv" / "bin" / "python")
    command = ["mypy", "--config-file=", "--ignore-missing-imports", "--python-executable", python, *names]
    env = warm.without(["MYPYPATH", "PYTHONPATH"])
    run = subprocess.run(
        [sys.executable, "-m", *command], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    lines = enumerate(PROGRAM.splitlines(), 1)
    expected = [("program.py", number, line.split("# ")[1]) for number, line in lines if "# " in line]
    found = re.findall(r"^(\w+\.py):(\d+): error: .*\[([\w-]+)\]$", run.stdout, re.MULTILINE)
    assert [(file, int(number), code) for file, number, code in found] == expected, run.stdout + run.stderr
