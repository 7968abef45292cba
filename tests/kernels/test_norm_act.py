"""Compares the InPlaceABN kernels with float64, in the interpreter or on a GPU (``--device cuda``).

``test_norm_act_groups.py`` has their activations, their kept channels, and the order of their programs.
"""

import pytest
import torch

pytest.importorskip("triton")

from fusedseg.ops.layout import layout_of
from tests import reference
from tests.kernels import test_norm_act_groups
from tests.reference import FORWARD_TOLERANCE, GRADIENT_TOLERANCE, relative_error
from tests.tools.traffic import checked

LEAKY, ELU = ("leaky_relu", 0.01), ("elu", 1.3)
EPS = 1e-5

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
SMALL_PATHS = {
    "planes": (PLANES["odd-plane"], False),
    "planes-split": ((3, 2, 9, 11), False),
    # Planes begin anywhere, and the vectors at their ends hold elements of other planes.
    "planes-peeled-split": ((2, 4, 17, 19), False),
    "rows": (ROWS["odd-rows"], True),
    "rows-split": ((2, 20, 3, 5), True),
}


@pytest.fixture(params=SMALL_PATHS)
def path(request):
    """Names a path by its shape, and whether the layout is rows."""
    if request.param.endswith("split"):
        request.getfixturevalue("small_tiles")
    return SMALL_PATHS[request.param]


def inputs(shape, rows, dtype, device, affine=True):
    """x, dz, weight and bias."""
    x, dz, _, *parameters = test_norm_act_groups.inputs(shape, rows, dtype, device, affine)
    return x, dz, *parameters


def start(shape, device, dtype=torch.float32):
    """The running statistics of a new module."""
    return torch.zeros(shape[1], device=device, dtype=dtype), torch.ones(shape[1], device=device, dtype=dtype)


def launch(x, dz, weight, bias, act=LEAKY, training=True, running=(None, None), kept=None, in_place=True):
    """Runs forward and backward, leaves ``x`` as it is, and checks in the interpreter that no access leaves a
    tensor."""
    from fusedseg.kernels.norm_act import norm_act_fwd
    from fusedseg.kernels.norm_act_bwd import norm_act_bwd

    source = x.clone() if in_place else x
    z = source if in_place else torch.empty_like(x)
    layout = layout_of(x)
    parameters = None if weight is None else weight.dtype
    with checked(x.device):
        mean, rstd, xhat = norm_act_fwd(source, z, layout, weight, bias, *running, training, 0.1, EPS, act, kept)
        dx, dweight, dbias = norm_act_bwd(dz, z, layout, weight, bias, rstd, xhat, kept, training, act, parameters)
    return {"z": z, "mean": mean, "rstd": rstd, "dx": dx, "dweight": dweight, "dbias": dbias}


def check(x, dz, weight, bias, act=LEAKY, training=True, running=(None, None), kept=None, **options):
    """Compares everything that ``launch`` returns, and the running statistics that it moves, with float64."""
    before = [None if r is None else r.clone() for r in running]
    found = launch(x, dz, weight, bias, act, training, running, kept, **options)
    settings = {"training": training, "eps": EPS, "activation": act[0], "param": act[1]}
    settings |= {"running_mean": before[0], "running_var": before[1]}
    expected = reference.norm_act(x, weight, bias, **settings)
    assert found["z"].stride() == found["dx"].stride() == x.stride()
    assert relative_error(found["z"], expected.out) <= FORWARD_TOLERANCE[x.dtype]
    gradients = reference.gradients(dz, x, weight, bias, **settings)
    for name, value in gradients._asdict().items():
        if value is not None:
            assert relative_error(found[name], value) <= GRADIENT_TOLERANCE[x.dtype], name
    if training and running[0] is not None:
        # Statistics are exact to fp32 or fp64, and the buffer's rounding is added.
        tolerance = FORWARD_TOLERANCE[running[0].dtype]
        assert relative_error(running[0], expected.running_mean) <= tolerance
        assert relative_error(running[1], expected.running_var) <= tolerance
    return found


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("shape", "rows"), CASES)
def test_training(shape, rows, device):
    check(*inputs(shape, rows, torch.float32, device), running=start(shape, device))


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dtypes(path, dtype, device):
    shape, rows = path
    check(*inputs(shape, rows, dtype, device), running=start(shape, device, dtype))


@pytest.mark.usefixtures("poison")
def test_running_statistics_in_eval(path, device):
    shape, rows = path
    running = (torch.linspace(-1, 1, shape[1], device=device), torch.linspace(0.5, 2, shape[1], device=device))
    before = [r.clone() for r in running]
    check(*inputs(shape, rows, torch.float32, device), training=False, running=running)
    assert all(map(torch.equal, running, before))


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_without_affine(path, training, device):
    shape, rows = path
    given = inputs(shape, rows, torch.float32, device, affine=False)
    found = check(*given, training=training, running=start(shape, device))
    assert found["dweight"] is None


def test_out_of_place_leaves_x_and_gives_the_same(path, device):
    shape, rows = path
    x, dz, weight, bias = inputs(shape, rows, torch.float32, device)
    before = x.clone()
    there = launch(x, dz, weight, bias, in_place=False)
    assert torch.equal(x, before)
    assert all(torch.equal(there[name], value) for name, value in launch(x, dz, weight, bias).items())


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
