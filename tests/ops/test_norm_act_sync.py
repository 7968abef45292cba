"""The synchronised norm_act on both backends, in one process.  A stand-in imitates a second, equal process."""

import pytest
import torch

from fusedseg import recompute
from fusedseg.activation import Activation
from fusedseg.ops.norm import op, sync
from fusedseg.ops.norm.checks import check
from fusedseg.ops.norm.spec import Passed, Spec
from tests.reference import FORWARD_TOLERANCE, GRADIENT_TOLERANCE, relative_error
from tests.tools.tensors import channels_last

EPS = 1e-5


def step(x, dz, residual, act, norm):
    """Returns z, gradients and running statistics; ``norm`` is called with x, parameters and statistics."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    C = x.shape[1]
    vectors = [torch.linspace(*ends, C, dtype=wide, device=x.device) for ends in ((-1, 1.5), (-0.5, 0.5), (0.1, 0.4))]
    slope = vectors.pop().requires_grad_() if act.name == "prelu" else None
    leaves = [t.clone().requires_grad_() for t in (x, *vectors[:2])]
    leaves += [] if residual is None else [residual.clone().requires_grad_()]
    running = torch.zeros(C, dtype=wide, device=x.device), torch.ones(C, dtype=wide, device=x.device)
    z = norm(*leaves[:3], leaves[3] if residual is not None else None, slope, *running)
    return z, torch.autograd.grad(z, leaves if slope is None else [*leaves, slope], dz), running


def both(act):
    """Returns two functions: the synchronised op, and the local op over the joint batch of both processes."""

    def ours(*passed):
        return op.normalise(Passed(*passed), Spec("input", act, EPS, 0.1, process_group="group"))

    def joint(*passed):
        return op.normalise(Passed(*passed), Spec("input", act, EPS, 0.1))

    return ours, joint


CASES = {
    "relu": ((2, 5, 3, 7), torch.float64, False, Activation("relu", 0.0), True),
    "silu": ((2, 5, 3, 7), torch.float32, True, Activation("silu", 0.0), True),
    "large plane": ((1, 3, 40, 41), torch.float32, False, Activation("gelu", 0.0), False),
    "bf16": ((2, 8, 6, 5), torch.bfloat16, True, Activation("relu", 0.0), False),
    "fp16": ((2, 8, 33), torch.float16, False, Activation("leaky_relu", 0.1), True),
    "identity": ((4, 3), torch.float64, False, Activation("identity", 0.0), True),
    "prelu": ((2, 6, 5), torch.float64, False, Activation("prelu", 0.25), True),
}


@pytest.mark.parametrize("case", CASES)
def test_as_over_both(backend, twin, device, case):
    shape, dtype, rows, act, with_residual = CASES[case]
    x, dz, r = (torch.randn(shape, device=device).to(dtype) for _ in range(3))
    if rows:
        x, dz, r = (channels_last(t) for t in (x, dz, r))
    residual = r if with_residual else None
    ours, joint = both(act)
    z, grads, moved = step(x, dz, residual, act, ours)
    # Forward and backward take one all-gather each.
    assert twin == [(3, shape[1]), (2, shape[1])]
    assert z.stride() == x.stride()
    pair = [None if t is None else torch.cat([t, t]).double() for t in (x, dz, residual)]
    expected, exact, statistics = step(*pair, act, joint)
    half = shape[0]
    assert relative_error(z, expected[:half]) <= FORWARD_TOLERANCE[dtype]
    # The parameters' gradients belong to one process, which is half of the sum over both.
    exact = [d[:half] if d.dim() > 1 else d / 2 for d in exact]
    for mine, theirs in zip(grads, exact, strict=True):
        assert relative_error(mine, theirs) <= GRADIENT_TOLERANCE[dtype]
    for mine, theirs in zip(moved, statistics, strict=True):
        assert relative_error(mine, theirs) <= FORWARD_TOLERANCE[torch.float32]


@pytest.mark.usefixtures("twin")
@pytest.mark.parametrize("rows", [False, True], ids=["planes", "rows"])
def test_mean_far_from_zero(backend, rows):
    """In fp32, values around 1000 give the same gradients as values around 0."""
    x, dz = torch.randn(2, 2, 3, 8, 8)
    # The values are moved without rounding.
    x = (x * 64).round() / 64
    x, dz = (channels_last(t) if rows else t for t in (x, dz))
    act = Activation("identity", 0.0)
    ours, _ = both(act)
    _, (near, *_), _ = step(x, dz, None, act, ours)
    _, (far, *_), _ = step(x + 1024, dz, None, act, ours)
    assert relative_error(far, near) <= GRADIENT_TOLERANCE[torch.float32]


@pytest.mark.usefixtures("twin")
def test_in_the_recompute_scope():
    """An op that saves the output keeps a recipe instead, and the recipe gives the same bits."""
    act = Activation("relu", 0.0)
    ours, _ = both(act)

    def grads(scope):
        torch.manual_seed(0)
        x = torch.randn(2, 3, 4, 4, requires_grad=True)
        weight = torch.randn(4, 3, 1, 1, requires_grad=True)
        with scope:
            z = ours(x, None, None, None, None, None, None)
            loss = torch.nn.functional.conv2d(z, weight).square().sum()
        return torch.autograd.grad(loss, [x, weight])

    for mine, plain in zip(grads(recompute()), grads(torch.enable_grad()), strict=True):
        assert torch.equal(mine, plain)


@pytest.mark.usefixtures("twin")
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (0, 3, 4, 5)], ids=["", "empty"])
@pytest.mark.parametrize("name", ["relu", "identity", "prelu"])
def test_opcheck(shape, name):
    x, residual = torch.randn(2, *shape, dtype=torch.float64).requires_grad_().unbind()
    vectors = torch.randn(3, 3, dtype=torch.float64).requires_grad_().unbind()
    slope = vectors[2] if name == "prelu" else None
    args = (x.detach().requires_grad_(), *vectors[:2], residual.detach().requires_grad_(), slope)
    spec = Spec("input", Activation(name, 0.25), EPS, process_group="group")
    torch.library.opcheck(op.norm_op, (*args, None, None, None, 0, *op.flat(spec)))


def test_a_failed_collective_changes_nothing(monkeypatch):
    def fails(t, group):
        raise RuntimeError("connection closed")

    monkeypatch.setattr(sync, "gather", fails)
    mean, var = torch.zeros(3), torch.ones(3)
    ours, _ = both(Activation("relu", 0.0))
    with pytest.raises(RuntimeError, match="connection closed"):
        ours(torch.randn(2, 3, 4), None, None, None, None, mean, var)
    assert not mean.any()


@pytest.mark.usefixtures("twin")
def test_double_backward_raises():
    ours, _ = both(Activation("relu", 0.0))
    x = torch.randn(2, 3, 4, requires_grad=True)
    z = ours(x, None, None, None, None, None, None)
    (dx,) = torch.autograd.grad(z.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="norm_act_sync: double backward is not supported"):
        dx.sum().backward()


def test_errors():
    weight, bias, mean, var = torch.ones(4, 3).unbind()

    def refuse(x, residual=None, var=var, act=Activation("relu", 0.0)):  # noqa: B008
        spec = Spec("input", act, process_group="group")
        check(spec.name, Passed(x, weight, bias, residual, None, mean, var), spec)

    with pytest.raises(ValueError, match=r"norm_act_sync: weight must have shape \(4,\)"):
        refuse(torch.randn(2, 4))
    with pytest.raises(ValueError, match="running_mean and running_var must be given together"):
        refuse(torch.randn(2, 3), var=None)
    with pytest.raises(ValueError, match=r"residual must have the shape of x, \(2, 3\), got \(2, 4\)"):
        refuse(torch.randn(2, 3), torch.randn(2, 4))
    with pytest.raises(ValueError, match="slope must be given for activation 'prelu'"):
        refuse(torch.randn(2, 3), act=Activation("prelu", 0.25))
