"""``pytest tests bench`` works in one process, in either order, with pytest-benchmark or without it."""

import pytest

from tests.tools import warm


def run_pytest(*arguments: str) -> str:
    # A process that an xdist worker starts must not act as a worker.
    env = warm.without(["PYTEST_"])
    run = warm.run("pytest", *arguments, "-q", "-n", "0", "-p", "no:cacheprovider", env=env)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    return run.stdout


# A few tests and benches, which take a third of the time of all: they cover options, fixtures and equal file names.
TESTS = ("tests/test_layers.py", "tests/bench/test_conv_abn.py")
BENCHES = ("bench/test_conv_abn.py", "bench/gpu/test_machine.py", "bench/test_launch.py")


@pytest.mark.parametrize(
    "folders",
    [TESTS + BENCHES, pytest.param(BENCHES + TESTS, marks=pytest.mark.slow)],
    ids=["tests-bench", "bench-tests"],
)
def test_tests_and_benches_run_together(folders):
    """All are collected, and some find their fixtures.

    Without pytest-benchmark every bench ended with "fixture 'benchmark' not found".
    """
    # The benches import what the demo needs.
    for package in ("matplotlib", "nilearn", "triton"):
        pytest.importorskip(package)
    shown = run_pytest(*folders, "--setup-only", "-k", "test_layers or test_launch")
    # A bench shows nothing where pytest-benchmark is absent; a fixture that is not found is an error in any case.
    assert "tests/test_layers.py::" in shown
