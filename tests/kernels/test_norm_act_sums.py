"""Backward of norms whose output has two gradients: the kernels add them while they read (``also``)."""

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.test_norm_act import inputs, launch, start
from tests.tools.tensors import channels_last

GROUPS = {"batch": None, "instance": 8, "group": 2}


# Each layout and size has each of the statistics, and both kinds of what is kept.
CASES = [
    (size, rows, stat, ("input", "output")[(number + rows + (size == "whole slabs")) % 2], True)
    for size in ("whole slabs", "several programs")
    for rows in (False, True)
    for number, stat in enumerate(GROUPS)
]
CASES += [("whole slabs", False, "batch", "input", False), ("several programs", True, "batch", "input", False)]


@pytest.mark.sanitize
@pytest.mark.parametrize(("size", "rows", "stat", "keep", "training"), CASES)
def test_two_gradients_give_what_their_sum_gives(request, size, rows, stat, keep, training, device):
    """In fp32 the sum in the kernel has the bits of one in memory, also where its gradient is written over it."""
    if size == "several programs":
        request.getfixturevalue("small_tiles")
    shape = (2, 8, 13, 7)
    x, dz, residual, *affine = inputs(shape, rows, torch.float32, device)
    also = torch.randn_like(x)
    running = (None, None) if training else start(shape, device)
    options = {"groups": GROUPS[stat], "keep": keep, "training": training, "running": running}
    # Whether the residual's gradient is written over the second one does not depend on the layout.
    for added, over in ((residual, True), (None, False)) if rows else ((residual, size == "several programs"),):
        expected = launch(x, dz + also, added, *affine, **options)
        found = launch(x, dz, added, *affine, **options, also=also.clone(), pitch=8, over=over)
        assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize(
    ("dtype", "channels", "stat", "with_residual"),
    [
        (torch.float32, 8, "batch", False), (torch.float32, 6, "instance", True), (torch.float32, 3, "batch", True),
        (torch.float16, 8, "instance", False), (torch.float16, 6, "batch", True), (torch.float16, 3, "instance", False),
    ],
)  # fmt: skip
def test_a_slice_of_channels(small_tiles, dtype, channels, stat, with_residual, device):
    """The second gradient is a slice of that of a concatenation, whose rows have gaps; it ends with its tensor."""
    x, dz, residual, *affine = inputs((2, channels, 13, 7), True, dtype, device)
    wide = channels_last(torch.randn(2, 4 * channels, 13, 7)).to(device, dtype)
    also, residual, before = wide[:, 3 * channels :], residual if with_residual else None, wide.clone()
    options = {"groups": channels if stat == "instance" else None, "keep": "input"}
    found = launch(x, dz, residual, *affine, **options, also=also, pitch=4 * channels)
    expected = launch(x, (dz.float() + also.float()).to(dtype), residual, *affine, **options)
    assert torch.equal(wide, before)
    # The kernel does not round the sum to fp16.
    tolerance = 0 if dtype == torch.float32 else 4e-3
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance)
