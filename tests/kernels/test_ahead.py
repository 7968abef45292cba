"""The kernels of a graph, and of a self-test, are compiled in threads before the first launch."""

import functools
import json
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.tools import warm
from tests.tools.checks import checks_of

CHECKS = checks_of(Path(__file__).with_name("ahead_checks.py"))


@functools.cache
def results() -> dict[str, str]:
    """Results of the checks in a separate process, because this process may use the interpreter."""
    run = warm.run("tests.kernels.ahead_checks", *CHECKS, env=warm.without(["TRITON_INTERPRET"]))
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CHECKS)
def test_ahead(name):
    """Kernels were compiled one after the other, each at its first launch."""
    if name == "nnunets_network":
        pytest.importorskip("dynamic_network_architectures")
    assert not results()[name], results()[name]
