"""Norms, pools and convolutions with every dtype and memory format, on Triton and on aten, beside float64.

The families of upsampling, of losses and of packing stand in ``tests/ops``, with the same marker.
"""

import itertools

import pytest
import torch
from torch.nn import functional as F

from fusedseg.functional import inplace_abn, max_pool, norm_act
from tests import norms, reference
from tests.ops import conv_abn_cases as convs
from tests.ops import test_max_pool as test_pools
from tests.ops import test_norms
from tests.tools.marks import slow
from tests.tools.tensors import channels_last

pytestmark = pytest.mark.gpu
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp64": torch.float64}
# Without a GPU, ``tests/ops`` has every dtype.
by_dtype = pytest.mark.parametrize("dtype", slow(DTYPES.values(), torch.bfloat16, torch.float64), ids=DTYPES)
by_format = pytest.mark.parametrize("rows", [False, True], ids=["contiguous", "channels_last"])

# Planes of odd sizes.  A GPU also takes planes of which several programs share a channel.
SHAPES = {"cpu": [(2, 6, 9, 7)], "cuda": [(2, 6, 9, 7), (2, 6, 130, 257)]}


@pytest.mark.parametrize("keep", ["output", "input"])
@by_format
@by_dtype
def test_norm(backend, device, dtype, rows, keep):
    """Values, gradients, running statistics, strides, what is kept, and the same bits in two steps."""
    # An output that is rounded to half precision does not tell the residual.
    residual = keep == "input" or dtype.itemsize > 2
    activation, parameters = {"output": "elu", "input": "silu"}[keep], torch.promote_types(dtype, torch.float32)
    for shape, kind in itertools.product(SHAPES[device.type], norms.KINDS):
        case = norms.Case(
            keep, kind, False, activation, shape, 3, rows, dtype, parameters, affine=(True, True), residual=residual
        )
        test_norms.check(case, device, backend)


@by_format
@by_dtype
def test_max_pool(backend, device, dtype, rows):
    """Many values are equal: the first one of a window wins."""
    for name in ("halving", "overlapping", "3d-overlapping"):
        case = test_pools.CASES[name]
        test_pools.compare(torch.randint(-3, 4, case[0], device=device).to(dtype), case, rows)


@by_format
def test_convolution(backend, device, rows):
    """The format of the output, and the same bits in two steps; ``tests/ops/test_conv_abn.py`` compares values."""
    case = convs.CASES["2d"]
    given = convs.inputs(case, torch.float16, device, "channels_last" if rows else "contiguous", params=torch.float32)
    for training in (True, False):
        steps = []
        for _ in range(2):
            running = convs.running(case, torch.float32, device)
            z = convs.fused(given, backend, training, running, case)
            dz = torch.linspace(-1, 1, z.numel(), device=device).view_as(z).to(z.dtype)
            steps.append([z, *running, *torch.autograd.grad(z, given.given, dz)])
        assert z.stride() == (channels_last(z) if rows else z.contiguous()).stride()
        assert steps[0][3].stride() == given.x.stride()
        assert all(map(torch.equal, *steps))


# Ours, beside what it computes.
STRIDED = {
    "max-pool": (lambda x: max_pool(x, 3, 2, 1), lambda x: F.max_pool3d(x, 3, 2, 1)),
    "max-pool without a batch": (lambda x: max_pool(x[0], 3, 2, 1), lambda x: F.max_pool2d(x[0], 3, 2, 1)),
    "in place": (
        lambda x: inplace_abn(x * 1, None, None, training=True),
        lambda x: reference.norm_act(x).out,
    ),
    "exact": (
        lambda x: norm_act(x, None, None, norm="group", num_groups=3),
        lambda x: reference.norm_act(x, groups=3).out,
    ),
}


@pytest.mark.parametrize("name", STRIDED)
def test_other_strides(backend, device, name):
    """An input that is neither contiguous nor channels_last, and a gradient that is expanded from one number.

    aten's pool of such an input found indices with strides that CUDA's kernel does not expect, and wrote outside.
    """
    base, results = torch.randn(4, 3, 5, 6, 2, dtype=torch.float64), []
    for f, to in zip(STRIDED[name], (device, "cpu"), strict=True):
        leaf = base.to(to).permute(4, 1, 0, 3, 2).requires_grad_()
        z = f(leaf)
        results.append((z.cpu(), torch.autograd.grad(z.sum(), leaf)[0].cpu()))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)
