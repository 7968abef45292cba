"""The kernels of a graph, and of a self-test, are compiled in threads before the first launch."""

import functools
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.tools.checks import checks_of, results_of

CHECKS = checks_of(Path(__file__).with_name("ahead_checks.py"))


@functools.cache
def results() -> dict[str, str]:
    return results_of("tests.kernels.ahead_checks", CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_ahead(name):
    """Kernels were compiled one after the other, each at its first launch."""
    if name == "nnunets_network":
        pytest.importorskip("dynamic_network_architectures")
    assert not results()[name], results()[name]
