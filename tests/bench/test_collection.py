"""``pytest tests bench`` works in one process."""

import pytest

from tests.tools import warm


def test_tests_and_benches_run_together():
    """Both folders define the option ``--device``, and have files of the same names."""
    # Benches import what the demo needs.
    pytest.importorskip("nilearn")
    # A process that an xdist worker starts must not act as a worker.
    files = ("tests/bench/test_conv_abn.py", "bench/test_conv_abn.py", "bench/gpu/test_machine.py")
    run = warm.run(
        "pytest", *files, "--collect-only", "-q", "-n", "0", "-p", "no:cacheprovider", env=warm.without(["PYTEST_"])
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    assert all(f"{name}::" in run.stdout for name in files)
