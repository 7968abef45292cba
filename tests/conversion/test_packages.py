"""Networks of published packages: each norm is replaced or explained, the function stays, and memory goes down.

``pytest -m slow -s tests/conversion/test_packages.py`` prints a row for each network.  ``packages.txt`` names the
packages to install.
"""

import warnings

import pytest
import torch

import fusedseg
from tests.conversion.packages import NETWORKS

# The tolerances in fp64 and in fp32.  In fp32 only outputs are compared: a rounding that moves one value over the kink
# of LeakyReLU moves gradients by up to 1e-2, also in a stock network whose weights are moved by an ulp.
DOUBLE, SINGLE = 1e-9, 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_package(name):
    network = NETWORKS[name]
    with warnings.catch_warnings():
        # The packages warn when they build networks.
        warnings.simplefilter("ignore")
        model = network.make()
    x = torch.randn(network.shape)
    keys, parameters = list(model.state_dict()), list(model.parameters())
    report = fusedseg.convert(model, example_inputs=x)
    assert list(model.state_dict()) == keys
    assert all(ours is stock for ours, stock in zip(model.parameters(), parameters, strict=True))
    fused = [row for row in report.replaced if "Norm" in row.what]
    joins, pools = (sum(row.what.startswith(name) for row in report.replaced) for name in ("cat()", "MaxPool"))
    others = [row for row in (*report.recomputed, *report.skipped) if "Norm" in row.what and row.why]
    assert (len(fused), len(others)) == (network.after_activation, network.others)
    assert not report.skipped
    found = [report.verify(x, training=training) for training in (True, False)]
    saved, peak = (getattr(report.after, m) / getattr(report.before, m) for m in ("saved", "peak"))
    value, gradient = (max(getattr(v, part).size for v in found) for part in ("value", "gradient"))
    print(
        f"\n{name}, {'x'.join(map(str, network.shape))}: {len(fused)} + {len(others)} norms, "
        f"{joins} joins, {pools} pools; fp32 difference {value:.1g}, {gradient:.1g}; "
        f"saved {report.before.saved / 2**20:.1f} -> {report.after.saved / 2**20:.1f} MiB ({saved:.2f}), "
        f"peak {report.before.peak / 2**20:.1f} -> {report.after.peak / 2**20:.1f} MiB ({peak:.2f})"
    )
    assert value < SINGLE
    assert saved <= network.saved
    assert peak <= 1.0
    double = fusedseg.convert(model.double(), example_inputs=x.double())
    assert double.verify(x.double(), training=True).largest < DOUBLE
    assert double.verify(x.double(), training=False).largest < DOUBLE
