"""Statistics from the sums that a convolution leaves, in the interpreter or on a GPU (``--device cuda``)."""

import pytest
import torch

pytest.importorskip("triton")

from fusedseg.ops.layout import FORMATS, layout_of
from tests.tools.traffic import checked

EPS = 1e-5


def run(shape, dtype, of_samples, shift, device):
    """The results of the kernel, and those of float64."""
    from fusedseg.kernels.norm_sums import norm_of_sums

    torch.manual_seed(0)
    y = (torch.randn(shape) * 2 + 3).to(device, dtype, memory_format=FORMATS[len(shape)])
    wide, C = torch.promote_types(dtype, torch.float32), shape[1]
    layout, over = layout_of(y), (0, *range(2, len(shape)))
    if of_samples:
        layout, over = layout.by_sample(shape[0], C), over[1:]
    running = [None if of_samples else torch.full((C,), v, dtype=wide, device=device) for v in (shift, 1.0)]
    d, exact = y.to(wide) - (0.0 if of_samples else shift), y.double()
    sums = torch.stack([d.sum(over).flatten(), d.square().sum(over).flatten()])
    with checked(y.device):
        found = norm_of_sums(y, sums, layout, *running, momentum=0.1, eps=EPS, far=64.0)
    mean, var = exact.mean(over).flatten(), exact.var(over, correction=0).flatten()
    wanted, m = [mean, (var + EPS).rsqrt()], y.numel() // len(mean)
    if not of_samples:
        found, wanted = (*found, *running), [*wanted, shift + 0.1 * (mean - shift), 0.9 + 0.1 * var * m / (m - 1)]
    return found, wanted


@pytest.mark.sanitize
@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("shift", [2.0, 1e4], ids=["near", "far"])
@pytest.mark.parametrize("of_samples", [False, True], ids=["batch", "instance"])
def test_values(of_samples, shift, device):
    """Behind a far shift one sum of squares in float32 would leave nothing of a variance of 4."""
    for a, b in zip(*run((2, 37, 9, 8), torch.float32, of_samples, shift, device), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5 if shift < 10 else 1e-3)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dtypes(dtype, device):
    for a, b in zip(*run((2, 8, 5, 6, 7), dtype, True, 0.0, device), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
