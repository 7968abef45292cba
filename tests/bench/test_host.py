"""The calls that the host makes in a step stay as few as they are."""

import functools
from typing import NamedTuple

import pytest

pytest.importorskip("triton")

from bench.gpu.host import NETWORKS
from tests.tools import warm


class Most(NamedTuple):
    """The most calls in Python that our code makes, and the most ops of PyTorch in a step with its loss.

    Lower a number when a change saves calls.
    """

    python: int
    ops: int


MOST = {
    # On a CPU each call finds the kept channels, in three calls of 56 by one rule for all activations, and asks whether
    # x is an output that its own op keeps.  Two calls each way look up whether this kind of call has been compared with
    # aten (``ops/at_size.py``).
    "InPlaceABN, forward": Most(56, 0),
    "InPlaceABN, backward": Most(24, 0),
    "PlainConvUNet, forward": Most(69, 19),
    "PlainConvUNet, backward": Most(83, 79),
    "U-Net, forward": Most(26, 29),
    "U-Net, backward": Most(41, 67),
}


@functools.cache
def counted() -> dict[str, dict[str, int]]:
    """The counts of a separate process, because this process may use the interpreter."""
    return warm.json_of("bench.gpu.host")


@pytest.mark.parametrize("row", MOST)
def test_no_more_calls(row):
    """A norm looked its layout up three times and built its record anew; each weight was cast in a call of its own."""
    name, _, _ = row.partition(", ")
    if name in NETWORKS and not NETWORKS[name].is_here():
        pytest.skip(f"needs the package {NETWORKS[name].package}")
    found = counted()[row]
    assert found["launches"] > 0
    most = MOST[row]
    assert found["python"] <= most.python, found
    assert found["ops"] <= most.ops, found
