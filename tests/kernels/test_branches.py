"""Each branch of each kernel runs in a small test that a GPU runs under compute-sanitizer."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.tools.branches import every_branch

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_branch_has_a_case_for_compute_sanitizer(tmp_path):
    """A second run of pytest notes the branches: here no test knows what other processes have run."""
    file = tmp_path / "branches.json"
    files = [of for of in Path(__file__).parent.glob("test_*.py") if "sanitize" in of.read_text()]
    command = [sys.executable, "-m", "pytest", *files, "-n", "0", "-q", "-m", "sanitize"]
    command += ["-p", "tests.tools.branches", "-p", "no:cacheprovider"]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"BRANCHES": str(file)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert every_branch() - {*json.loads(file.read_text())} == set()
