"""The bytes of a step by kind of kernel, counted on tensors without values: ``bench/gpu/counts.py``."""

import re

import pytest

pytest.importorskip("triton")

from tests.tools import warm


@pytest.mark.slow
def test_a_step_with_bits():
    """Names of functions that it knows had changed, so that it ended with an error."""
    run = warm.run("bench.gpu.counts", "--tiny", "--bits", "4", "U-Net, 8x3x512x512 bf16 nhwc")
    assert run.returncode == 0, run.stderr
    rows = re.findall(r"^(\D+?) +[\d.]+ +[\d.]+ +(\d+)", run.stdout, re.MULTILINE)
    launches = {kind: int(found) for kind, found in rows}
    assert launches["pack"] <= launches["unpack"]
    assert launches["norm"] > 0
    # No activation is a pass of its own.
    assert launches.get("rest", 0) <= 2
