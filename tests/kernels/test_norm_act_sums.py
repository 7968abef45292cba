"""Backward of norms whose output has two gradients: the kernels add them while they read (``also``)."""

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.test_norm_act import inputs, launch, start
from tests.tools.tensors import channels_last

GROUPS = {"batch": None, "instance": 8, "group": 2}


@pytest.mark.parametrize("size", ["whole slabs", "several programs"])
@pytest.mark.parametrize("rows", [False, True], ids=["planes", "rows"])
@pytest.mark.parametrize(
    ("stat", "keep", "training"),
    [*((stat, keep, True) for stat in GROUPS for keep in ("input", "output")), ("batch", "input", False)],
)
@pytest.mark.parametrize("with_residual", [False, True])
def test_two_gradients_give_what_their_sum_gives(request, size, rows, stat, keep, training, with_residual, device):
    """In fp32 the sum in the kernel has the bits of one in memory, also where its gradient is written over it."""
    if size == "several programs":
        request.getfixturevalue("small_tiles")
    shape = (2, 8, 13, 7)
    x, dz, residual, *affine = inputs(shape, rows, torch.float32, device)
    also, residual = torch.randn_like(x), residual if with_residual else None
    running = (None, None) if training else start(shape, device)
    options = {"groups": GROUPS[stat], "keep": keep, "training": training, "running": running}
    expected = launch(x, dz + also, residual, *affine, **options)
    for over in (False, True) if with_residual else (False,):
        found = launch(x, dz, residual, *affine, **options, also=also.clone(), pitch=8, over=over)
        assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("channels", [8, 6, 3])
@pytest.mark.parametrize("stat", ["batch", "instance"])
@pytest.mark.parametrize("with_residual", [False, True])
def test_a_slice_of_channels(small_tiles, dtype, channels, stat, with_residual, device):
    """The second gradient is a slice of that of a concatenation, whose rows have gaps."""
    x, dz, residual, *affine = inputs((2, channels, 13, 7), True, dtype, device)
    wide = channels_last(torch.randn(2, 4 * channels, 13, 7)).to(device, dtype)
    also, residual, before = wide[:, channels : 2 * channels], residual if with_residual else None, wide.clone()
    options = {"groups": channels if stat == "instance" else None, "keep": "input"}
    found = launch(x, dz, residual, *affine, **options, also=also, pitch=4 * channels)
    expected = launch(x, (dz.float() + also.float()).to(dtype), residual, *affine, **options)
    assert torch.equal(wide, before)
    # The kernel does not round the sum to fp16.
    tolerance = 0 if dtype == torch.float32 else 4e-3
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance)
