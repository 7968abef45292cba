"""``pytest tests bench`` works in one process, in either order, with pytest-benchmark or without it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run_pytest(*arguments: str) -> str:
    command = [sys.executable, "-m", "pytest", *arguments, "-q", "-n", "0", "-p", "no:cacheprovider"]
    # A process that an xdist worker starts must not act as a worker.
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    return run.stdout


# A few tests and benches, which take a third of the time of all: they cover options, fixtures and equal file names.
TESTS = ("tests/ops/test_inplace_abn.py", "tests/bench/test_conv_abn.py")
BENCHES = ("bench/test_conv_abn.py", "bench/gpu/test_machine.py")


@pytest.mark.parametrize("folders", [TESTS + BENCHES, BENCHES + TESTS], ids=["tests-bench", "bench-tests"])
def test_tests_and_benches_are_collected_together(folders):
    # The benches import what the demo needs.
    for package in ("matplotlib", "nilearn", "triton"):
        pytest.importorskip(package)
    collected = run_pytest(*folders, "--collect-only").splitlines()
    for path in (
        "tests/ops/test_inplace_abn.py",
        "tests/bench/test_conv_abn.py",
        "bench/test_conv_abn.py",
        "bench/gpu/test_machine.py",
    ):
        assert any(node.startswith(f"{path}::") for node in collected), path


def test_a_bench_finds_its_fixtures_beside_the_tests():
    """Without pytest-benchmark every bench ended with "fixture 'benchmark' not found"."""
    run_pytest("tests/test_layers.py", "bench/test_launch.py", "--setup-only")
