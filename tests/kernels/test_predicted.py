"""What the compiled kernels say about their speed, for shapes that are hard to serve: ``bench/gpu/predict.py``.

Nothing is measured here.  A kernel that streams needs programs that are resident at once, a last wave that is not
nearly empty, bytes of loads under way, and passes that cut a tensor at the same places.
"""

import itertools
import re

import pytest

pytest.importorskip("triton")

from bench.gpu.shapes import HARD
from tests.tools import warm

QUICK = ("rows, input kept", "odd planes", "C = 320")
# Slabs have a program for each channel, and small launches take longer than their bytes.
STREAMING = [name for name in HARD if not name.startswith(("slabs", "small"))]
# ``launch.py`` starts 32 warps in programs for each multiprocessor; in backward of rows 24, whose threads hold more.
WARPS, WARPS_OF_ROWS_BACKWARD = 32, 24
# 132 multiprocessors of an H200.  Little's law wants 26 KB of loads under way in each for 4.3 TB/s.
MULTIPROCESSORS, KILOBYTES = 132, 24
# What does not hold yet: shape, kernel and rule.  Whoever mends a kernel removes its line.
KEPT_IN_ROWS = ("kept channel", "four kept channels", "eight kept channels")
LATER = ("elu", "celu", "selu", "silu", "gelu", "gelu_tanh", "mish", "hardswish", "softplus")
NOT_YET = {
    # Four programs are planned and five or six are resident, so that the second wave of 960 is half empty.
    *(("C = 320", of, "wave") for of in ("act_fwd_apply", "act_bwd_apply")),
    # Statistics read whole vectors, and the second pass has programs of half the size.
    ("odd planes", "act_fwd_apply", "boundaries"),
    # A thread holds an address for each element of a kept channel: in forward, and in backward of more than four.
    *((f"{of}, rows", "act_fwd_apply", rule) for of in KEPT_IN_ROWS for rule in ("resident", "under way")),
    *(("eight kept channels, rows", "act_bwd_reduce", rule) for rule in ("resident", "under way")),
    *(("eight kept channels, rows", "act_bwd_apply", rule) for rule in ("resident", "wave", "under way")),
    # A thread computes the activation of one vector before it asks for the next one.
    *((f"{of}, rows", "act_fwd_apply", "under way") for of in LATER),
    # 342 programs have 396 places.
    ("few groups, rows", "act_bwd_apply", "under way"),
    # Accesses of two bytes.
    ("odd planes", "act_bwd_reduce", "under way"),
}


def broken_rules(shape: str, ways: list[list[dict]]) -> set[tuple[str, str, str]]:
    wrong = set()
    for of in itertools.chain(*ways):
        kernel = of["kernel"]
        if not kernel.endswith(("stats", "apply", "reduce")):
            continue
        backward = kernel.startswith("act_bwd")
        planned = (WARPS_OF_ROWS_BACKWARD if HARD[shape].rows and backward else WARPS) // of["warps"]
        wanted = min(planned, -(-of["programs"] // MULTIPROCESSORS))
        places = MULTIPROCESSORS * of["resident"]
        last = (
            of["programs"] % places / places if of["programs"] > places else of["programs"] / MULTIPROCESSORS / wanted
        )
        if of["resident"] < wanted:
            wrong.add((shape, kernel, "resident"))
        if of["waves"] < 4 and 0 < last < 0.6:
            wrong.add((shape, kernel, "wave"))
        if round(of["kilobytes"]) < KILOBYTES:
            wrong.add((shape, kernel, "under way"))
    for way in ways:
        passes = [of for of in way if of["kernel"].endswith(("stats", "apply", "reduce"))]
        if len({tuple(of["runs"]) for of in passes}) > 1:
            wrong.add((shape, passes[-1]["kernel"], "boundaries"))
    return wrong


@pytest.mark.parametrize(
    "shapes",
    [
        pytest.param(QUICK, id="quick"),
        # Every other shape.
        pytest.param([of for of in STREAMING if of not in QUICK], id="others", marks=pytest.mark.slow),
    ],
)
def test_kernels_fill_a_gpu(shapes):
    predicted = warm.json_of("bench.gpu.predict", "--gpu", "H200", "--json", "--shapes", *shapes)
    found = set().union(*(broken_rules(shape, ways) for shape, ways in predicted.items()))
    expected = {of for of in NOT_YET if of[0] in shapes}
    assert not found - expected, f"does not hold: {sorted(found - expected)}"
    assert not expected - found, f"holds now, remove it from NOT_YET: {sorted(expected - found)}"


def test_shapes_have_every_activation():
    from fusedseg.activation import TABLE

    # prelu has a tensor of slopes, and no kernel.  The other shapes have leaky_relu.
    stems = {re.sub(", rows$", "", of) for of in HARD}
    assert set(TABLE) - {"leaky_relu", "prelu"} <= stems


@pytest.mark.parametrize(
    ("groups", "tiles", "places", "splits"),
    [
        # As many programs as there are places, or a few less.
        (64, 512, 528, 8),
        (1, 4096, 396, 396),
        # Three waves of 320 programs fill two waves of places.
        (320, 24, 528, 3),
        # The groups fill the places by themselves.
        (640, 24, 528, 1),
        # There is one tile only.
        (320, 1, 528, 1),
    ],
)
def test_splits_fill_waves(groups, tiles, places, splits):
    from fusedseg.kernels.launch import splits_of

    assert splits_of(groups, tiles, tiles, places) == splits
