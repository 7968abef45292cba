"""Every loss on each path, in the dtypes and memory formats of training, against float64 on the CPU."""

import pytest
import torch

import fusedseg
from tests.losses.jobs import LOSSES, labels_or_regions
from tests.reference import relative_error
from tests.tools.tensors import channels_last

pytestmark = pytest.mark.gpu
K, SPATIAL = 4, (9, 7)
# The dtype of the logits, whether they are channels_last, and the unit roundoff of the dtype.  The loss is fp32; its
# sums of a few hundred values, and TopKLoss with its own few roundings, stay within 1e-6.
FORMS = [(torch.float32, False, 2**-20), (torch.float16, False, 2**-10), (torch.bfloat16, True, 2**-7)]


@pytest.mark.parametrize("name", LOSSES)
def test_against_float64(backend, device, name, monkeypatch):
    """The value, and the gradient, which is rounded once; two steps give the same bits."""
    target = labels_or_regions(name, 2, K, SPATIAL)
    for dtype, rows, rounding in FORMS:
        x = torch.randn(2, K, *SPATIAL).to(dtype)
        exact = x.double().requires_grad_()
        with monkeypatch.context() as on_the_cpu:
            # There is no interpreter of Triton in a run on a GPU.
            on_the_cpu.setattr(fusedseg, "backend", "aten")
            expected = LOSSES[name]()(exact, target)
            (wanted,) = torch.autograd.grad(expected, exact)
        found = []
        for _ in range(2):
            leaf = (channels_last(x) if rows else x).to(device).requires_grad_()
            loss = LOSSES[name]()(leaf, target.to(device))
            # The scale of a GradScaler, a power of two, rounds nothing.
            (dx,) = torch.autograd.grad(loss * 2.0**10, leaf)
            found.append((loss.detach(), dx))
        assert all(map(torch.equal, *found))
        loss, dx = found[0]
        assert loss.dtype == torch.float32
        assert dx.dtype == dtype
        assert dx.stride() == leaf.stride()
        assert relative_error(loss, expected) <= 1e-6
        assert relative_error(dx.double() * 2.0**-10, wanted) <= rounding
