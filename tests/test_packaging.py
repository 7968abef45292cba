"""What pyproject.toml says of the package is what lies in the folders."""

import re
import zipfile
from pathlib import Path

import pytest

import fusedseg

ROOT = Path(__file__).parents[1]
PYPROJECT = (ROOT / "pyproject.toml").read_text()


def listed_packages() -> set[str]:
    listing = re.search(r"^packages = \[(.*?)\]", PYPROJECT, re.DOTALL | re.MULTILINE)
    assert listing
    return set(re.findall(r'"([\w.]+)"', listing[1]))


def test_every_package_is_listed():
    """A folder that is not listed works in a checkout and is missing from the wheel."""
    folders = {
        path.parent.relative_to(ROOT) for name in ("fusedseg", "kernels") for path in (ROOT / name).rglob("*.py")
    }
    names = {".".join(folder.parts) for folder in folders}
    assert listed_packages() == {f"fusedseg.{name}" if name.startswith("kernels") else name for name in names}


def test_version_is_stated_once():
    stated = re.search(r'^version = "(.+)"', PYPROJECT, re.MULTILINE)
    assert stated
    assert stated[1] == fusedseg.__version__


def test_changelog_has_this_version():
    assert f"## [{fusedseg.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.slow
def test_wheel_holds_kernels_and_types(tmp_path, monkeypatch):
    import shutil

    from setuptools import build_meta

    # built from a copy: setuptools leaves its build folder behind
    for name in ("fusedseg", "kernels"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    wheel = build_meta.build_wheel(str(tmp_path))
    held = set(zipfile.ZipFile(tmp_path / wheel).namelist())
    expected = {f"fusedseg/{path.relative_to(ROOT / 'fusedseg')}" for path in (ROOT / "fusedseg").rglob("*.py")}
    expected |= {f"fusedseg/kernels/{path.name}" for path in (ROOT / "kernels").glob("*.py")}
    assert expected | {"fusedseg/py.typed"} <= held
    assert any(name.endswith("LICENSE") for name in held)
