"""Regressions of the recompute scope: norms, pools and dropout of other layouts and shapes.  Each test names its bug.

Every program runs twice, without and with the scope, and all results must be equal to the last bit.
"""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fusedseg import recompute
from tests.ops.scope_cases import grads, same_in_the_scope
from tests.tools.tensors import Cut, channels_last

pytestmark = pytest.mark.usefixtures("one_thread")

LAYOUTS = {
    "transposed": lambda t: t.transpose(2, 3),
    "reversed": lambda t: t.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "gaps": lambda t: torch.stack([t, t], -1)[..., 0],
    "part": lambda t: torch.cat([t, t], 1)[:, : t.shape[1]],
    "channels_last": channels_last,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("norm", ["batch", "instance"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch", [1, 2])
@same_in_the_scope
def test_norm_of_another_layout(scope, batch, layout, norm, dtype):
    """The last bit differed: batch norm in training adds memory with gaps in another order than in eval mode.

    An instance norm of one sample was rebuilt in the strides of its input, where aten makes it contiguous.
    """
    x = torch.randn(batch, 6, 6, 6, dtype=dtype, requires_grad=True)
    w, b = (torch.randn(6, dtype=dtype, requires_grad=True) for _ in range(2))
    with scope():
        t = LAYOUTS[layout](x * 3)
        z = F.batch_norm(t, None, None, w, b, True) if norm == "batch" else F.instance_norm(t, weight=w, bias=b)
        out = z.square() * F.silu(z)
    out.sum().backward()
    return [z.detach(), *grads(x, w, b)]


@same_in_the_scope
def test_instance_norm_of_another_layout_is_changed_in_the_scope(scope):
    """The scope kept the norm's input where aten keeps a copy, so backward raised an error after the input changed."""
    conv = nn.Conv2d(3, 4, 1)
    with scope():
        x = conv(torch.randn(2, 3, 6, 6)).transpose(2, 3)
        out = F.instance_norm(x)
        x.mul_(2)
    out.square().sum().backward()
    return grads(conv)


@pytest.mark.parametrize(
    ("drop", "shape"), [(F.dropout1d, (4, 6)), (F.dropout3d, (4, 2, 3, 3)), (F.dropout3d, (2, 3, 4))]
)
@pytest.mark.filterwarnings("ignore:dropout.d. Received a .-D input:UserWarning")
@same_in_the_scope
def test_dropout_without_a_batch(scope, drop, shape):
    """The output was rebuilt with one dimension more."""
    x, w = torch.randn(shape, requires_grad=True), torch.randn(shape, requires_grad=True)
    with scope():
        out = drop(x * w, 0.5) * w
    out.square().sum().backward()
    return grads(x, w)


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("view", [lambda x: x.view_as(x), lambda x: x * 1, lambda x: x.as_strided(x.shape, x.stride())])
@same_in_the_scope
def test_pool_lays_out_what_the_stock_function_does(scope, dims, batch, view):
    """Aten takes a channels_last view of one image for contiguous because of its strides; the pool must do the same."""
    x = channels_last(torch.randn(batch, 4, *(6,) * dims)).requires_grad_()
    y = view(x)
    y.retain_grad()
    with scope():
        z = getattr(F, f"max_pool{dims}d")(y, 3, 2, 1)
    z.sum().backward()
    return [z.detach(), y.grad, torch.tensor(z.stride()), torch.tensor(y.grad.stride())]


@same_in_the_scope
def test_gradient_of_a_pool_with_one_position_lies_as_its_input(scope):
    """The gradient of a channels_last image came contiguous, and the norm before it summed in another order."""
    bn, x = nn.BatchNorm2d(4), channels_last(torch.randn(2, 4, 2, 2))
    y = bn(x)
    y.retain_grad()
    with scope():
        z = F.max_pool2d(y, 3, 2, 1)
    z.square().sum().backward()
    return [z.detach(), y.grad, torch.tensor(y.grad.stride()), *grads(bn)]


def test_pool_that_no_gradient_reaches():
    """The pool's input got a gradient of zeros, where eager mode gives no gradient."""
    for scope in (nullcontext, recompute):
        x = torch.randn(2, 4, 6, 6, requires_grad=True)
        with scope():
            out = Cut.apply(F.max_pool2d(x * 2, 2))
        out.sum().backward()
        assert x.grad is None


@same_in_the_scope
def test_pool_of_volumes_under_autocast(scope):
    """On a CPU autocast pools volumes in fp32; the result had the dtype of the input."""
    x = torch.randn(2, 4, 4, 4, 4, dtype=torch.bfloat16, requires_grad=True)
    with scope(), torch.autocast("cpu", torch.bfloat16):
        out = F.max_pool3d(x * 2, 2)
    out.sum().backward()
    return [out.detach(), x.grad]
