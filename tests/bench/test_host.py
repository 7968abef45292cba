"""The calls that the host makes in a step stay as few as they are."""

import functools
import json

import pytest

pytest.importorskip("triton")

from bench.gpu.host import NETWORKS
from tests.tools import warm

# The most calls in Python that our code makes.  Lower a number when a change saves calls.
MOST = {
    "InPlaceABN, forward": 50,
    "InPlaceABN, backward": 23,
    "PlainConvUNet, forward": 65,
    "PlainConvUNet, backward": 90,
    "U-Net, forward": 22,
    "U-Net, backward": 49,
}


@functools.cache
def counted() -> dict[str, dict[str, int]]:
    """The counts of a separate process, because this process may use the interpreter."""
    run = warm.run("bench.gpu.host", env=warm.without(["TRITON_INTERPRET"]))
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("row", MOST)
def test_no_more_calls(row):
    """A norm looked its layout up three times and built its record anew in every call."""
    name, _, _ = row.partition(", ")
    if name in NETWORKS and not NETWORKS[name].is_here():
        pytest.skip(f"needs the package {NETWORKS[name].package}")
    found = counted()[row]
    assert found["launches"] > 0
    assert found["python"] <= MOST[row], found
