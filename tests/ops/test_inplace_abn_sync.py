"""The synchronised op on both backends, in one process.  A stand-in imitates a second process with the same values."""

import pytest
import torch

from fusedseg.activation import parse_invertible
from fusedseg.ops.norm import op, sync
from fusedseg.ops.norm.checks import check
from fusedseg.ops.norm.kept import find
from fusedseg.ops.norm.spec import Passed, Spec
from tests.reference import FORWARD_TOLERANCE, GRADIENT_TOLERANCE, relative_error

ACT = parse_invertible("test", "leaky_relu", 0.2)


def parameters(C, dtype, device):
    torch.manual_seed(0)
    weight, bias = torch.rand(C) + 0.5, torch.rand(C) - 0.5
    # One weight is negative, and one channel is kept.
    weight[0], weight[1] = -weight[0], 0
    return [t.to(device, dtype).requires_grad_() for t in (weight, bias)]


def step(x, dz, norm, residual):
    """Returns z, gradients and running statistics; ``norm`` is called with x, parameters and statistics."""
    weight, bias = parameters(x.shape[1], x.dtype if x.dtype == torch.float64 else torch.float32, x.device)
    statistics = torch.zeros_like(weight.detach()), torch.ones_like(weight.detach())
    leaves = [x.clone().requires_grad_(), weight, bias]
    if residual is not None:
        leaves.append(residual.clone().requires_grad_())
    kept = find(weight, bias, ACT, x.dtype)
    z = norm(leaves[0] * 1, weight, bias, *statistics, kept, leaves[3] if residual is not None else None)
    return z, torch.autograd.grad(z, leaves, dz), statistics


@pytest.mark.parametrize("with_residual", [False, True], ids=["", "residual"])
@pytest.mark.parametrize(
    ("shape", "dtype", "channels_last"),
    [
        ((2, 5, 3, 7), torch.float64, False),
        ((2, 5, 3, 7), torch.float32, True),
        ((1, 3, 40, 41), torch.float32, False),
        ((2, 8, 6, 5), torch.bfloat16, True),
        ((2, 8, 33), torch.float16, False),
    ],
    ids=str,
)
def test_as_over_both(backend, twin, device, shape, dtype, channels_last, with_residual):
    torch.manual_seed(1)
    x, dz, r = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    if channels_last:
        x, dz, r = (t.contiguous(memory_format=torch.channels_last) for t in (x, dz, r))
    residual = r if with_residual else None

    def ours(x, weight, bias, mean, var, kept, residual):
        spec = Spec("output", ACT, 1e-5, 0.1, process_group="group")
        return op.normalise(Passed(x, weight, bias, residual, None, mean, var), spec, kept)

    def stock(x, weight, bias, mean, var, kept, residual):
        return op.normalise(Passed(x, weight, bias, residual, None, mean, var), Spec("output", ACT, 1e-5, 0.1), kept)

    z, grads, moved = step(x, dz, ours, residual)
    # Forward and backward take one all-gather each.
    assert twin == [(3, shape[1]), (2, shape[1])]
    both = [None if t is None else torch.cat([t, t]).double() for t in (x, dz, residual)]
    expected, exact, statistics = step(both[0], both[1], stock, both[2])
    half = shape[0]
    assert relative_error(z, expected[:half]) <= FORWARD_TOLERANCE[dtype]
    # The parameters' gradients belong to one process, which is half of the sum over both.
    exact = [exact[0][:half], exact[1] / 2, exact[2] / 2, *(d[:half] for d in exact[3:])]
    for mine, theirs in zip(grads, exact, strict=True):
        assert relative_error(mine, theirs) <= GRADIENT_TOLERANCE[dtype]
    for mine, theirs in zip(moved, statistics, strict=True):
        assert relative_error(mine, theirs) <= FORWARD_TOLERANCE[torch.float32]


def test_a_failed_collective_changes_nothing(monkeypatch):
    def fails(t, group):
        raise RuntimeError("connection closed")

    monkeypatch.setattr(sync, "gather", fails)
    weight, bias = parameters(3, torch.float32, "cpu")
    mean, var, x = torch.zeros(3), torch.ones(3), torch.randn(2, 3, 4)
    before = x.clone()
    spec = Spec("output", ACT, 1e-5, 0.1, process_group="group")
    with pytest.raises(RuntimeError, match="connection closed"):
        op.normalise(Passed(x, weight, bias, None, None, mean, var), spec)
    assert torch.equal(x, before)
    assert not mean.any()


def test_errors():
    weight, bias, mean, var = torch.ones(4, 3).unbind()

    def refuse(x, var=var):
        spec = Spec("output", ACT, process_group="group")
        check(spec.name, Passed(x, weight, bias, None, None, mean, var), spec)

    with pytest.raises(ValueError, match=r"inplace_abn_sync: weight must have shape \(4,\)"):
        refuse(torch.randn(2, 4))
    with pytest.raises(ValueError, match="running_mean and running_var must be given together"):
        refuse(torch.randn(2, 3), None)
    with pytest.raises(ValueError, match="leaf that requires grad"):
        refuse(torch.randn(2, 3, requires_grad=True))


@pytest.mark.parametrize("with_residual", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (0, 3, 4, 5)], ids=["", "empty"])
@pytest.mark.usefixtures("twin")
def test_opcheck(shape, with_residual):
    x, residual = torch.randn(2, *shape, dtype=torch.float64)
    weight, bias = parameters(3, torch.float64, "cpu")
    kept = find(weight, bias, ACT, torch.float64)
    args = (weight, bias, residual.requires_grad_() if with_residual else None, *(None,) * 3, kept.slots, kept.count)
    spec = Spec("output", ACT, process_group="group")
    torch.library.opcheck(op.norm_op, (x.requires_grad_(), *args, *op.flat(spec)))


@pytest.mark.usefixtures("twin")
def test_double_backward_raises():
    weight, bias = parameters(3, torch.float64, "cpu")
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    z = op.normalise(Passed(x * 1, weight, bias), Spec("output", ACT, process_group="group"))
    (dx,) = torch.autograd.grad(z.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="inplace_abn_sync: double backward is not supported"):
        dx.sum().backward()
