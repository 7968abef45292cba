"""The kernels of norms beside float64, in the interpreter or on a GPU (``--device cuda``).

``tests/ops/test_norms.py`` draws dtypes, activations, kept channels and running statistics for them.
"""

import itertools

import pytest
import torch

pytest.importorskip("triton")

from fusedseg.ops.layout import layout_of
from tests import reference
from tests.reference import FORWARD_TOLERANCE, GRADIENT_TOLERANCE, relative_error
from tests.tools.interpreter import reordered
from tests.tools.tensors import channels_last, placed, slots_of
from tests.tools.traffic import checked

LEAKY, ELU, IDENTITY = ("leaky_relu", 0.01), ("elu", 1.3), ("identity", 0.0)
EPS = 1e-5

# Norms of the batch.  Tiles hold 2048 values in fp32.  A channel of up to 16384 (backward 8192; rows 1024) takes the
# one-launch path.
BATCH_PLANES = {
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
BATCH_ROWS = {
    "odd-rows": (2, 5, 7, 9),
    "channels-over-the-block": (2, 37, 5, 3),
    "channels-over-the-block-split": (3, 70, 20, 21),
    "rows-of-a-volume": (2, 3, 9, 11, 13),
    "more-splits-than-a-program-merges": (9, 4, 64, 64),
    "long-n-by-c": (1500, 5),
}
# Shape and number of groups (None: the batch).  A slab of 16384 fp32 values (backward and rows 8192) is read once.
PLANES = {
    "instance": ((2, 5, 7, 9), 5),
    "instance-tiny-planes-share-a-tile": ((3, 7, 2, 2), 7),
    "instance-forward-one-launch-backward-split": ((2, 2, 90, 91), 2),
    "instance-split": ((2, 3, 129, 131), 3),
    "instance-one-sample": ((1, 3, 9, 5), 3),
    "instance-volume": ((2, 3, 3, 5, 4), 3),
    "group": ((2, 6, 7, 9), 2),
    "group-of-3": ((3, 6, 5, 5), 2),
    "group-of-all": ((2, 5, 7, 9), 1),
    "group-split": ((2, 6, 65, 67), 2),
    "group-of-one-channel": ((2, 3, 7, 9), 3),
    "batch": ((3, 5, 7, 9), None),
    "batch-split": ((9, 2, 65, 65), None),
}
ROWS = {
    "rows-instance": ((2, 5, 7, 9), 5),
    "rows-instance-channels-over-the-block": ((2, 37, 5, 3), 37),
    "rows-instance-split": ((2, 20, 40, 31), 20),
    "rows-instance-more-splits-than-a-program-merges": ((1, 4, 150, 140), 4),
    "rows-group": ((2, 8, 7, 9), 2),
    "rows-group-of-5": ((3, 10, 5, 5), 2),
    "rows-group-narrow": ((3, 12, 5, 5), 6),
    "rows-group-split": ((2, 24, 40, 31), 3),
    "rows-group-more-splits-than-a-program-merges": ((1, 4, 150, 140), 2),
    "rows-group-n-by-c": ((6, 8), 2),
    "rows-batch": ((2, 5, 7, 9), None),
    "rows-batch-split": ((3, 10, 20, 21), None),
}
# One case of each path, in small tiles where they are split.
ON_CHIP, SPLIT = ("instance", "group"), {"instance-split": 6, "group-split": 2}
PATHS = {name: (*PLANES[name], False) for name in ON_CHIP} | {
    f"rows-{name}": (*ROWS[f"rows-{name}"], True) for name in ON_CHIP
}
PATHS |= {name: ((2, 6, 11, 13), groups, False) for name, groups in SPLIT.items()}
PATHS |= {f"rows-{name}": ((2, 6, 5, 7), groups, True) for name, groups in SPLIT.items()}
PATHS |= {
    "batch": (*PLANES["batch"], False),
    "batch-split": ((3, 6, 9, 11), None, False),
    # Planes begin anywhere, and the vectors at their ends hold elements of other planes.
    "batch-peeled-split": ((2, 4, 17, 19), None, False),
    "rows-batch": (*ROWS["rows-batch"], True),
    "rows-batch-split": ((2, 20, 3, 5), None, True),
}


@pytest.fixture(params=PATHS)
def path(request):
    """Names a path by its shape, the number of groups, and whether the layout is rows."""
    if request.param.endswith("split"):
        request.getfixturevalue("small_tiles")
    return PATHS[request.param]


def inputs(shape, rows, dtype, device):
    """x, dz, residual, weight and bias; weights have both signs and are near 1, so that rounding is not magnified."""
    C = shape[1]
    x, dz, residual = torch.randn(3, *shape, dtype=torch.float64)
    # Without this term, dweight would be a small difference of large sums.
    dz += x / 4
    # The means are not zero, and differ between channels and samples.
    x += torch.linspace(-2, 3, shape[0] * C).view(*shape[:2], *(1,) * (len(shape) - 2))
    x, dz, residual = (t.to(device, dtype) for t in (x, dz, residual))
    if rows:
        x, dz, residual = map(channels_last, (x, dz, residual))
    parameters = torch.float64 if dtype == torch.float64 else torch.float32
    weight = torch.linspace(0.6, 1.4, C, device=device, dtype=parameters)
    weight[1::2] *= -1
    return x, dz, residual, weight, torch.linspace(-0.5, 0.5, C, device=device, dtype=parameters)


def start(shape, device, dtype=torch.float32):
    """The running statistics of a new module."""
    return torch.zeros(shape[1], device=device, dtype=dtype), torch.ones(shape[1], device=device, dtype=dtype)


def launch(x, dz, residual, weight, bias, groups, act=LEAKY, keep="output", kept=None, training=True,
           running=(None, None), also=None, pitch=None, over=False):  # fmt: skip
    """Runs forward and backward, and leaves ``x`` as it is.

    ``also`` is a second gradient; ``over``: the gradient of the residual is written over it.
    """
    from fusedseg.kernels.norm_act import norm_act_fwd, norm_act_rebuild
    from fusedseg.kernels.norm_act_bwd import norm_act_bwd

    layout = layout_of(x).by_sample(x.shape[0], groups)
    z = placed(x)
    source = z if keep == "output" else x
    if source is x:
        z.fill_(torch.nan)
    dresidual = None if residual is None else also if over else placed(residual)
    with checked(x.device):
        mean, rstd, xhat = norm_act_fwd(source, z, layout, weight, bias, *running, training, 0.1, EPS, act, kept,
                                        residual=residual)  # fmt: skip
        mean = mean if training else running[0]
        options = {"residual": residual, "dresidual": dresidual, "mean": mean if keep == "input" else None}
        saved = x if keep == "input" else z
        dx, dweight, dbias = norm_act_bwd(
            dz, saved, layout, weight, bias, rstd, xhat, kept, training, act, weight.dtype, also=also, pitch=pitch,
            **options,
        )  # fmt: skip
        if keep == "input":
            again = torch.empty_like(z)
            norm_act_rebuild(x, again, layout, weight, bias, mean, rstd, act, residual)
            assert torch.equal(again, z)
    found = {"z": z, "rstd": rstd, "dx": dx, "dweight": dweight, "dbias": dbias, "dresidual": dresidual}
    return {name: t for name, t in found.items() if t is not None}


def check(x, dz, residual, weight, bias, groups, act=LEAKY, training=True, running=(None, None), **options):
    """Compares everything that ``launch`` returns, and the running statistics that it moves, with float64."""
    before = [None if r is None else r.clone() for r in running]
    found = launch(x, dz, residual, weight, bias, groups, act, training=training, running=running, **options)
    settings = {"eps": EPS, "activation": act[0], "param": act[1], "groups": groups, "residual": residual}
    settings |= {"training": training, "running_mean": before[0], "running_var": before[1]}
    expected = reference.norm_act(x, weight, bias, **settings)
    assert found["z"].stride() == found["dx"].stride() == x.stride()
    assert relative_error(found["z"], expected.out) <= FORWARD_TOLERANCE[x.dtype]
    for name, value in reference.gradients(dz, x, weight, bias, **settings)._asdict().items():
        if value is not None:
            assert relative_error(found[name], value) <= GRADIENT_TOLERANCE[x.dtype], name
    if training and running[0] is not None:
        # Statistics are exact to fp32 or fp64, and the buffer's rounding is added.
        tolerance = FORWARD_TOLERANCE[running[0].dtype]
        assert relative_error(running[0], expected.running_mean) <= tolerance
        assert relative_error(running[1], expected.running_var) <= tolerance


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("name", BATCH_PLANES | BATCH_ROWS)
def test_training(name, device):
    shape = (BATCH_PLANES | BATCH_ROWS)[name]
    x, dz, _, *affine = inputs(shape, name in BATCH_ROWS, torch.float32, device)
    check(x, dz, None, *affine, None, running=start(shape, device))


# Each path, and each kind of statistics, has both.
KEPT = [*zip(PLANES | ROWS, itertools.cycle(("output", "input")), strict=False)]


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("name", "keep"), KEPT)
def test_training_with_a_residual(name, keep, device):
    shape, groups = (PLANES | ROWS)[name]
    check(*inputs(shape, name in ROWS, torch.float32, device), groups, keep=keep)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(
    ("C", "groups", "dtype"),
    [
        pytest.param(C, groups, dtype, id=f"{C}{'-batch' * (groups is None)}-{dtype}")
        for C, groups, dtypes in (
            (16, 8, (torch.float64, torch.float32, torch.float16, torch.bfloat16)),
            (48, 24, (torch.float32, torch.float16)),
            (100, None, (torch.float32, torch.bfloat16)),
        )
        for dtype in dtypes
    ],
)
def test_many_kept_channels_of_rows(C, groups, dtype, device, request):
    """Triton 3.6 added xhat * g of tiles wrongly as compiled code, and dx of an H100 was off by 3 %.

    With more kept channels than ``MAX_COLUMNS``, their loads give the tile another order of threads.  The tiles are
    those of real tensors, in which a thread holds several rows.
    """
    if groups is None:
        request.getfixturevalue("always_split")
    given = inputs((2, C, 16, 16), True, dtype, device)
    kept = list(range(0, C, 2))
    given[3][kept], given[4][kept] = 1e-4, 3.0
    check(*given, groups, kept=slots_of(kept, C, device))


@pytest.mark.parametrize("name", ["batch", "batch-split", "rows-batch", "rows-batch-split"])
def test_mean_300_and_variance_a_hundredth(name, device):
    """In fp32, the formula E[x^2] - E[x]^2 gives 0 or less here."""
    shape, rows = (PLANES | ROWS)[name][0], name in ROWS
    x, dz, _, *affine = inputs(shape, rows, torch.float32, device)
    x = (x - x.mean()) / x.std() * 0.1 + 300
    rstd = launch(x, dz, None, *affine, None)["rstd"]
    expected = (x.double().var((0, 2, 3), correction=0) + EPS).rsqrt()
    # x - mean is exact to 300 u / 0.1 = 2e-4 of its size, and its errors partly average out over a channel.
    assert relative_error(rstd, expected) <= 1e-4


def test_elu_far_in_its_tail_stays_finite(device):
    """If the output has saturated at -alpha, xhat is lost, but it is neither infinite nor NaN."""
    x, dz, _, weight, bias = inputs((4, 2, 50), False, torch.float16, device)
    found = launch(x * 20, dz, None, weight * 8, bias, None, ELU)
    assert found["dx"].isfinite().all()
    assert found["dweight"].isfinite().all()


def test_the_order_of_programs_does_not_matter(path, device):
    shape, groups, rows = path
    arguments = inputs(shape, rows, torch.float32, device)
    forward = launch(*arguments, groups)
    with reordered(device):
        again = launch(*arguments, groups)
    assert all(torch.equal(again[name], value) for name, value in forward.items())


@pytest.mark.parametrize("path", [name for name in PATHS if "instance" in name], indirect=True)
def test_statistics_and_sums_given_from_outside(path, device):
    """A caller may change statistics and sums between reduction and use, as merging over ranks does.

    The test runs two halves of a batch, and each half gets the partial results of both halves.
    """
    shape, _, rows = path
    from fusedseg.kernels.norm_act import norm_act_fwd
    from fusedseg.kernels.norm_act_bwd import norm_act_bwd, norm_act_bwd_sums
    from fusedseg.kernels.norm_stats import norm_stats

    x, dz, _, weight, bias = inputs((4, *shape[1:]), rows, torch.float32, device)
    halves = [slice(0, 2), slice(2, 4)]
    parts = [norm_stats(x[h], layout_of(x[h])) for h in halves]
    partial = torch.cat(parts, dim=1)
    outs, sums = [], []
    for h in halves:
        layout, z = layout_of(x[h]), torch.empty_like(x[h])
        _, rstd, _ = norm_act_fwd(x[h], z, layout, weight, bias, None, None, True, 0.1, EPS, LEAKY, None, partial)
        outs.append((z, layout, weight, bias, rstd))
        sums.append(norm_act_bwd_sums(dz[h], *outs[-1], None, None, LEAKY))
    # The kernel divides by the number of values of one half.
    both = torch.stack([s.sum(1, keepdim=True) for s in sums]).mean(0)
    dx = [
        norm_act_bwd(dz[h], *out, None, None, True, LEAKY, None, sums=both)[0]
        for h, out in zip(halves, outs, strict=True)
    ]
    expected = reference.norm_act(x, weight, bias, eps=EPS)
    assert relative_error(torch.cat([out[0] for out in outs]), expected.out) <= FORWARD_TOLERANCE[x.dtype]
    exact = reference.gradients(dz, x, weight, bias, eps=EPS)
    assert relative_error(torch.cat(dx), exact.dx) <= GRADIENT_TOLERANCE[x.dtype]
