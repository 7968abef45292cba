"""Backward of norms whose output has two gradients: the kernels add them while they read (``also``)."""

import pytest
import torch

pytest.importorskip("triton")

from fusedseg.ops.layout import layout_of
from tests.tools.tensors import empty

LEAKY = ("leaky_relu", 0.01)
GROUPS = {"batch": None, "instance": 8, "group": 2}


def run(dz, x, groups, keep, training, residual, also=None, pitch=None, over=False):
    """dx, dweight, dbias and, with a residual, its gradient, which is written ``over`` the second gradient."""
    from fusedseg.kernels.norm_act import norm_act_fwd
    from fusedseg.kernels.norm_act_bwd import norm_act_bwd

    layout, (C, of) = layout_of(x).by_sample(x.shape[0], groups), (x.shape[1], x.dtype)
    weight, bias = (torch.linspace(a, a + 1, C, dtype=of, device=x.device) for a in (0.5, -0.5))
    running = (None, None) if training else (torch.zeros_like(weight), torch.ones_like(weight))
    z = torch.empty_like(x)
    mean, rstd, _ = norm_act_fwd(
        x, z, layout, weight, bias, *running, training, 0.1, 1e-5, LEAKY, None, residual=residual
    )
    if not training:
        mean = running[0]
    dresidual = None if residual is None else also if over else torch.empty_like(x)
    found = norm_act_bwd(
        dz, x if keep == "input" else z, layout, weight, bias, rstd, None, None, training, LEAKY, of,
        mean=mean if keep == "input" else None, residual=residual, dresidual=dresidual, also=also, pitch=pitch,
    )  # fmt: skip
    return found if residual is None else (*found, dresidual)


@pytest.mark.parametrize("size", ["whole slabs", "several programs"])
@pytest.mark.parametrize("rows", [False, True], ids=["planes", "rows"])
@pytest.mark.parametrize(
    ("stat", "keep", "training"),
    [*((stat, keep, True) for stat in GROUPS for keep in ("input", "output")), ("batch", "input", False)],
)
@pytest.mark.parametrize("with_residual", [False, True])
def test_two_gradients_give_what_their_sum_gives(request, size, rows, stat, keep, training, with_residual, device):
    """In fp32 the sum in the kernel has the bits of one in memory."""
    if size == "several programs":
        request.getfixturevalue("small_tiles")
    groups, shape = GROUPS[stat], (2, 8, 13, 7)
    x, dz, also, residual = (empty(shape, torch.float32, rows).normal_().to(device) for _ in range(4))
    residual = residual if with_residual else None
    expected = run(dz + also, x, groups, keep, training, residual)
    for over in (False, True) if with_residual else (False,):
        found = run(dz, x, groups, keep, training, residual, also.clone(), 8, over)
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("channels", [8, 6, 3])
@pytest.mark.parametrize("stat", ["batch", "instance"])
@pytest.mark.parametrize("with_residual", [False, True])
def test_a_slice_of_channels(small_tiles, dtype, channels, stat, with_residual, device):
    """The second gradient is a slice of that of a concatenation, whose rows have gaps."""
    x, dz, residual = (empty((2, channels, 13, 7), dtype, True).normal_().to(device) for _ in range(3))
    wide = empty((2, 4 * channels, 13, 7), dtype, True).normal_().to(device)
    groups = channels if stat == "instance" else None
    also, pitch = wide[:, channels : 2 * channels], 4 * channels
    residual = residual if with_residual else None
    before = wide.clone()
    found = run(dz, x, groups, "input", True, residual, also, pitch)
    expected = run((dz.float() + also.float()).to(dtype), x, groups, "input", True, residual)
    assert torch.equal(wide, before)
    for a, b in zip(found, expected, strict=True):
        # The kernel does not round the sum to fp16.
        torch.testing.assert_close(
            a, b, rtol=0 if dtype == torch.float32 else 4e-3, atol=0 if dtype == torch.float32 else 4e-3
        )
