"""Compares the concatenation kernel with PyTorch, in the interpreter or on a GPU (``--device cuda``)."""

import pytest
import torch

pytest.importorskip("triton")

from tests.tools.interpreter import only_programs, reordered
from tests.tools.marks import sanitized
from tests.tools.tensors import channels_last, empty
from tests.tools.traffic import checked

# The batch and the positions, and the channels of the sources.
CASES = {
    "two": ((2, 5, 7), (8, 16)),
    "one": ((2, 5, 7), (24,)),
    "over-a-block": ((1, 33, 65), (64, 64)),
    "channels-over-a-block": ((1, 3, 2), (136, 320)),
    "odd-channels": ((2, 3, 5), (3, 64, 1)),
    "four": ((1, 4, 4), (8, 8, 16, 8)),
    "more-than-a-launch": ((1, 3, 4), (8, 3, 16, 8, 5, 2, 8, 8, 8)),
    "one-position": ((1, 1, 1), (8, 8)),
    "positions-of-samples": ((3, 1, 1), (8, 4)),
    "3d": ((2, 3, 2, 5), (16, 8)),
}


def launch(sources, pitches, y):
    """Writes the concatenation."""
    from fusedseg.kernels.concat import concat

    with checked(y.device) as counted:
        concat(sources, pitches, y, y.shape[1])
    return y, counted


def image(size, channels, device, dtype, gap=0):
    """Rows, or with a gap a slice of the channels of wider rows."""
    wide = channels_last(torch.randn(size[0], channels + 2 * gap, *size[1:], device=device).to(dtype))
    return wide[:, gap : gap + channels]


def check(size, channels, device, dtype=torch.float32, gap=0):
    sources = [image(size, C, device, dtype, gap) for C in channels]
    y = empty((size[0], sum(channels), *size[1:]), dtype, True).to(device).fill_(7)
    y, counted = launch(sources, [C + 2 * gap for C in channels], y)
    assert torch.equal(y, torch.cat(sources, 1))
    return counted, sources, y


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("gap", [0, 8, 3])
@pytest.mark.parametrize("case", sanitized(CASES, "two", "odd-channels", "more-than-a-launch"))
def test_values(case, gap, device):
    check(*case, device, gap=gap)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("case", sanitized(CASES, "odd-channels", "more-than-a-launch"))
def test_biases(case, dtype, device):
    """Every second source has a bias; the sum has the bits of PyTorch's."""
    from fusedseg.kernels.concat import concat

    size, channels = case
    sources = [image(size, C, device, dtype, 3) for C in channels]
    biases = [torch.randn(C, device=device).to(dtype) if k % 2 == 0 else None for k, C in enumerate(channels)]
    y = empty((size[0], sum(channels), *size[1:]), dtype, True).to(device).fill_(7)
    with checked(y.device):
        concat(sources, [C + 6 for C in channels], y, y.shape[1], tuple(biases))
    view = (1, -1, *(1,) * (len(size) - 1))
    expected = [x if b is None else x + b.view(view) for x, b in zip(sources, biases, strict=True)]
    assert torch.equal(y, torch.cat(expected, 1))


def test_the_slice_that_is_not_written_stays(device):
    y = empty((2, 24, 5, 7), torch.float32, True).to(device).fill_(7)
    sources = [image((2, 5, 7), C, device, torch.float32) for C in (8, 3)]
    launch(sources, [8, 3], y)
    assert torch.equal(y, torch.cat([*sources, torch.full((2, 13, 5, 7), 7.0, device=device)], 1))


@pytest.mark.usefixtures("only_in_the_interpreter")
def test_moves_every_byte_once(device):
    moved, sources, y = check((2, 16, 16), (64, 32), device)
    assert moved.launches == ["concat_kernel"]
    assert moved.loaded("concat_kernel") == sum(x.nbytes for x in sources)
    assert moved.stored("concat_kernel") == y.nbytes


def test_the_order_of_programs_does_not_matter(device):
    size, channels = CASES["over-a-block"]
    sources = [image(size, C, device, torch.float32) for C in channels]
    with reordered(device):
        y, _ = launch(sources, channels, empty((size[0], sum(channels), *size[1:]), torch.float32, True).to(device))
    assert torch.equal(y, torch.cat(sources, 1))


@pytest.mark.usefixtures("only_in_the_interpreter")
def test_beyond_two_to_the_31_elements(device):
    """The last programs copy the right values, and no access leaves a tensor."""
    a, b, y = (empty((40, C, 1024, 1024), torch.bfloat16, True) for C in (64, 32, 96))
    assert y.numel() > 2**31
    for x in (a, b):
        x[-1, :, -1, -256:] = torch.randn(x.shape[1], 256).bfloat16()
    # Three programs copy the channels of the last rows.
    with only_programs(lambda kernel, grid: [(grid[0] - k, 0, 0) for k in (3, 2, 1)]):
        launch([a, b], [64, 32], y)
    wanted = torch.cat([x[-1, :, -1, -16:] for x in (a, b)])
    assert torch.equal(y[-1, :, -1, -16:], wanted)
