"""A test that breaks CUDA fails alone.  A file stands for the device: while it exists, waiting for the device fails."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("xdist")

ROOT = Path(__file__).parents[2]
CONFTEST = """
import os

from tests.tools.context import Context

def synchronize():
    # A new process has a new context.
    if os.path.exists(f"broken-{os.getpid()}"):
        raise RuntimeError("device-side assert triggered\\nCompile with TORCH_USE_CUDA_DSA")

def pytest_configure(config):
    config.pluginmanager.register(Context(synchronize, hasattr(config, "workerinput")), "context")
"""
# ``test_later`` needs the device, as every test of a GPU does.  The culprit itself raises nothing: its kernel fails
# after the call has returned.
TESTS = """
import os
from pathlib import Path

import pytest

from conftest import synchronize

def note(name):
    with open("ran", "a") as file:
        file.write(f"{name} {os.getpid()}\\n")

@pytest.mark.parametrize("i", range(3))
def test_before(i):
    synchronize()
    note(f"before-{i}")

def test_culprit():
    note("culprit")
    Path(f"broken-{os.getpid()}").touch()

def test_raises():
    note("raises")
    Path(f"broken-{os.getpid()}").touch()
    synchronize()

@pytest.mark.parametrize("i", range(6))
def test_later(i):
    synchronize()
    note(f"later-{i}")

def test_wrong():
    assert not "an ordinary failure"
"""


def run(folder, *arguments):
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(TESTS)
    (folder / "pytest.ini").write_text(f"[pytest]\npythonpath = . {ROOT}\n")
    command = [sys.executable, "-m", "pytest", "-rfE", "-p", "no:cacheprovider", "-p", "no:randomly", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    failed = {line.split()[1].split("::")[1] for line in done.stdout.splitlines() if line.startswith("FAILED")}
    ran = dict(line.split() for line in (folder / "ran").read_text().splitlines())
    return done, failed, ran


def test_only_the_culprits_fail(tmp_path):
    """One assertion in the device took 692 tests with it, which met the same broken context."""
    done, failed, ran = run(tmp_path, "-n", "2", "--dist", "worksteal")
    text = done.stdout + done.stderr
    assert failed == {"test_culprit", "test_raises", "test_wrong"}, text
    # Every test ran, and none in the process of a culprit after it.
    assert len(ran) == 3 + 2 + 6, text
    for culprit in ("culprit", "raises"):
        order = [name for name, process in ran.items() if process == ran[culprit]]
        assert order[-1] == culprit, text
    # The report of the culprit shows its own error, and the log says why a process ended.
    assert "RuntimeError: device-side assert triggered" in done.stdout
    assert "CUDA works no more in this process after test_it.py::test_culprit: device-side assert" in done.stderr
    assert "9 passed" in done.stdout
