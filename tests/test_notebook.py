"""Runs the notebook docs/try_it.ipynb as plain code on the CPU, with a small demo; no Jupyter is needed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOK = json.loads((ROOT / "docs" / "try_it.ipynb").read_text())
CODE = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_prints_its_block_on_a_cpu(tmp_path):
    for package in ("nilearn", "matplotlib", "tqdm"):
        pytest.importorskip(package)
    code = "\n".join(CODE).replace('"cuda" if torch.cuda.is_available() else "cpu"', '"cpu"')
    install, demo = 'subprocess.run([sys.executable, "-m", "pip"', 'command("examples.demo", '
    for line in ("else 10\n", 'Path("..").resolve()', install, demo):
        assert line in code
    code = code.replace("else 10\n", "else 1\n").replace('Path("..").resolve()', f"Path({str(ROOT)!r})")
    # `.ci/run` runs the demo as it is, which takes most of a minute.
    code = code.replace(demo, 'command("tests.demo.small", ')
    path = tmp_path / "try_it.py"
    # The package is here, and a test installs nothing.
    path.write_text("\n".join(line for line in code.splitlines() if not line.startswith(install)))
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", path],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    block = done.stdout.rpartition("```text\n")[2]
    for line in ("$ fusedseg doctor  # exit 0", "$ tests.demo.small slices", "eager: ", "convert: ", "backend, aten: "):
        assert line in block
    assert all("  # exit 0, " in line for line in block.splitlines() if line.startswith("$ ")), block
    assert "FAILED" not in block


def test_the_notebook_has_no_outputs():
    """Outputs would show another machine's figures, and change with every run."""
    cells = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
