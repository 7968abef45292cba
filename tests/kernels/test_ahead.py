"""The kernels of a graph, and of a self-test, are compiled in threads before the first launch."""

import functools
import json

import pytest

pytest.importorskip("triton")

from tests.tools import warm

CHECKS = (
    "networks_in_channels_last",
    "networks_in_planes",
    "nnunets_network",
    "a_loss_in_the_graph",
    "bits_in_rows",
    "bits_in_planes",
    "self_tests",
    "threads_compile_the_same_code",
    "an_error_is_that_of_the_launch",
    "threads_parse_one_after_the_other",
    "two_threads_put_the_parser_back",
    "an_interrupt_leaves_no_mode",
    "a_function_that_fails_on_fake_tensors_is_called_as_before",
    "the_random_numbers_of_a_step_stay",
)


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
