"""Launches that go directly to compiled kernels, and plans that are made once for each shape."""

import functools
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from fusedseg.ops.layout import layout_of
from tests.tools.checks import checks_of, results_of
from tests.tools.spy import spied

CHECKS = checks_of(*(Path(__file__).with_name(f"launcher_{of}.py") for of in ("checks", "agreement")))
LEAKY = ("leaky_relu", 0.01)


@functools.cache
def results() -> dict[str, str]:
    return results_of("tests.kernels.launcher_checks", CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_launcher(name):
    assert not results()[name], results()[name]


def test_version_is_known():
    """Before you add a version to VERSIONS, check that its ``JITFunction.run`` passes these arguments on."""
    import triton

    from fusedseg.kernels import launcher

    assert launcher.KNOWN, f"launcher.py has not been read beside Triton {triton.__version__}"


def forward_and_backward(x, weight, bias, dz):
    from fusedseg.kernels.norm_act import norm_act_fwd
    from fusedseg.kernels.norm_act_bwd import norm_act_bwd

    layout, z = layout_of(x), torch.empty_like(x)
    _, rstd, _ = norm_act_fwd(x, z, layout, weight, bias, None, None, True, 0.1, 1e-5, LEAKY, None)
    return z, *norm_act_bwd(dz, z, layout, weight, bias, rstd, None, None, True, LEAKY, weight.dtype)


def test_blocks_are_chosen_once_for_a_shape(monkeypatch, replanned, device):
    """Choosing blocks in every call would take longer than a small kernel."""
    from fusedseg.kernels import norm_act, norm_act_bwd, norm_stats

    chosen = [
        spied(monkeypatch, module, name)
        for module in (norm_act, norm_act_bwd, norm_stats)
        for name in {"onchip_blocks", "split_blocks"} & vars(module).keys()
    ]
    x, dz = torch.randn(2, 2, 1, 192, 256, device=device).unbind()
    weight, bias = torch.ones(1, device=device), torch.zeros(1, device=device)
    forward_and_backward(x, weight, bias, dz)
    assert sum(map(len, chosen)) == 6
    forward_and_backward(x, weight, bias, dz)
    assert sum(map(len, chosen)) == 6
    # Plans follow changed constants after they are cleared.
    replanned()
    forward_and_backward(x, weight, bias, dz)
    assert sum(map(len, chosen)) == 12
