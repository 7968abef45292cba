"""Compares the InPlaceABN kernels with float64, in the interpreter or on a GPU (``--device cuda``).

``test_norm_act_groups.py`` has their activations, their kept channels, and the order of their programs.
"""

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels import test_norm_act_groups as norms
from tests.kernels.test_norm_act_groups import ELU, EPS
from tests.reference import relative_error

# Tiles hold 2048 values in fp32.  A channel of up to 16384 (backward 8192; rows 1024) takes the one-launch path.
PLANES = {
    "single-element-plane": (4, 3, 1, 1),
    "one-channel": (5, 1, 7),
    "one-sample": (1, 3, 9, 5),
    "odd-plane": (2, 5, 7, 9),
    "n-by-c": (33, 6),
    "volume": (2, 3, 3, 5, 4),
    "forward-one-launch-backward-split": (2, 2, 90, 91),
    "one-over-the-block": (5, 2, 4097),
    "many-small-planes": (700, 2, 33),
    "few-channels-large-plane": (2, 1, 150, 137),
}
ROWS = {
    "odd-rows": (2, 5, 7, 9),
    "channels-over-the-block": (2, 37, 5, 3),
    "channels-over-the-block-split": (3, 70, 20, 21),
    "rows-of-a-volume": (2, 3, 9, 11, 13),
    "more-splits-than-a-program-merges": (9, 4, 64, 64),
    "long-n-by-c": (1500, 5),
}
CASES = [pytest.param(shape, False, id=name) for name, shape in PLANES.items()]
CASES += [pytest.param(shape, True, id=name) for name, shape in ROWS.items()]
# One case of each path: planes and rows, one launch and split.
PATHS = [
    pytest.param(PLANES["odd-plane"], False, id="planes"),
    pytest.param((9, 2, 65, 65), False, id="planes-split"),
    pytest.param(ROWS["odd-rows"], True, id="rows"),
    pytest.param(ROWS["channels-over-the-block-split"], True, id="rows-split"),
]


# Split cases have small tiles here; `test_training` and PATHS have the tiles of real tensors.
SMALL_PATHS = {name: (shape, rows) for name, (shape, groups, rows) in norms.PATHS.items() if groups is None}


@pytest.fixture(params=SMALL_PATHS)
def path(request):
    """Names a path by its shape, and whether the layout is rows."""
    if request.param.endswith("split"):
        request.getfixturevalue("small_tiles")
    return SMALL_PATHS[request.param]


def inputs(shape, rows, dtype, device, affine=True):
    """x, dz, weight and bias."""
    x, dz, _, *parameters = norms.inputs(shape, rows, dtype, device, affine)
    return x, dz, *parameters


def launch(x, dz, weight, bias, **options):
    return norms.launch(x, dz, None, weight, bias, None, **options)


def check(x, dz, weight, bias, **options):
    return norms.check(x, dz, None, weight, bias, None, **options)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("shape", "rows"), CASES)
def test_training(shape, rows, device):
    check(*inputs(shape, rows, torch.float32, device), running=norms.start(shape, device))


@pytest.mark.usefixtures("poison")
def test_running_statistics_in_eval(path, device):
    shape, rows = path
    running = (torch.linspace(-1, 1, shape[1], device=device), torch.linspace(0.5, 2, shape[1], device=device))
    before = [r.clone() for r in running]
    for affine in (True, False):
        check(*inputs(shape, rows, torch.float32, device, affine), training=False, running=running)
    assert all(map(torch.equal, running, before))


def test_out_of_place_leaves_x_and_gives_the_same(path, device):
    shape, rows = path
    x, dz, weight, bias = inputs(shape, rows, torch.float32, device)
    before = x.clone()
    there = launch(x, dz, weight, bias, in_place=False)
    assert torch.equal(x, before)
    here = launch(x, dz, weight, bias)
    assert all(torch.equal(there[name], here[name]) for name in ("z", "rstd", "dx", "dweight", "dbias"))


@pytest.mark.parametrize(("shape", "rows"), PATHS)
def test_mean_300_and_variance_a_hundredth(shape, rows, device):
    """In fp32, the formula E[x^2] - E[x]^2 gives 0 or less here."""
    x, dz, weight, bias = inputs(shape, rows, torch.float32, device)
    x = (x - x.mean()) / x.std() * 0.1 + 300
    rstd = launch(x, dz, weight, bias)["rstd"]
    axes = [d for d in range(x.dim()) if d != 1]
    expected = (x.double().var(axes, correction=0) + EPS).rsqrt()
    # x - mean is exact to 300 u / 0.1 = 2e-4 of its size, and its errors partly average out over a channel.
    assert relative_error(rstd, expected) <= 1e-4


def test_elu_far_in_its_tail_stays_finite(device):
    """If the output has saturated at -alpha, xhat is lost, but it is neither infinite nor NaN."""
    x, dz, weight, bias = inputs((4, 2, 50), False, torch.float16, device)
    found = launch(x * 20, dz, weight * 8, bias, act=ELU)
    assert found["dx"].isfinite().all()
    assert found["dweight"].isfinite().all()
