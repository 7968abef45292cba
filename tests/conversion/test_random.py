"""Random networks through ``convert``."""

import copy

import pytest
import torch

import fusedseg
from fusedseg.conversion import convs
from fusedseg.ops.conv import sources
from tests.conversion.compare import assert_same
from tests.conversion.networks import Random

QUICK = 30


@pytest.mark.parametrize("seed", [*range(QUICK), *(pytest.param(s, marks=pytest.mark.slow) for s in range(QUICK, 200))])
def test_random_network(seed, monkeypatch, request):
    if seed % 3:
        # The bytes of every third network are counted too.
        request.getfixturevalue("uncounted")
    if seed % 2:
        # One op is used wherever it is possible, and all concatenations count as large.
        monkeypatch.setattr(convs, "pays", lambda x: True)
        monkeypatch.setattr(sources, "FORMED_BYTES", 0)
    torch.manual_seed(seed)
    stock = Random(seed).double()
    x = torch.randn(2, 3, 9, 10, dtype=torch.float64)
    ours = copy.deepcopy(stock)
    keys = list(ours.state_dict())
    report = fusedseg.convert(ours, example_inputs=x)
    assert list(ours.state_dict()) == keys
    norms = {m for m in stock.modules() if "Norm" in type(m).__name__}
    explained = [row for row in (*report.replaced, *report.recomputed, *report.skipped) if "Norm" in row.what + row.to]
    assert len(explained) >= len(norms)
    for training in (True, False):
        assert_same(ours, stock, x, training=training)


@pytest.mark.usefixtures("uncounted")
def test_random_networks_are_of_every_kind():
    """The test above shows little unless the networks have fused norms of every kind and norms that are left."""
    kinds = {"ConvABN2d", "InPlaceInstanceNormAct", "InPlaceGroupNormAct", "BatchNormAct", "MaxPool2d", "JoinConv2d",
             "its activation module is also called elsewhere"}  # fmt: skip
    often = ("followed by add", "its output is read by")
    found = []

    def rare() -> list[str]:
        return [*kinds.difference(found), *(of for of in often if sum(why.startswith(of) for why in found) <= 3)]

    # The first networks of the test above, as many as it takes.
    for seed in range(QUICK):
        report = fusedseg.convert(Random(seed), example_inputs=torch.randn(2, 3, 9, 10))
        found += [row.to.partition("(")[0] for row in report.replaced] + [row.why for row in report.recomputed]
        if not rare():
            break
    assert rare() == []
