"""The synchronised norms on both backends, in one process.  A stand-in imitates a second, equal process."""

import pytest
import torch

from fusedseg.activation import Activation
from fusedseg.ops.norm import eager as op
from fusedseg.ops.norm import sync
from fusedseg.ops.norm.call import Norm, Operands
from fusedseg.ops.norm.graph import NormCall, norm_op
from fusedseg.ops.norm.kept import find
from tests.reference import FORWARD_TOLERANCE, GRADIENT_TOLERANCE, relative_error
from tests.tools.tensors import channels_last

EPS = 1e-5
LEAKY, RELU = Activation("leaky_relu", 0.2), Activation("relu", 0.0)
# What each norm keeps for backward, with an activation that it takes.
BY_KEPT = pytest.mark.parametrize(("keep", "act"), [("output", LEAKY), ("input", RELU)], ids=["output", "input"])


def step(x, dz, residual, keep, act, group):
    """Returns z, gradients and running statistics of one process (``group=None``), or of this process and its twin."""
    wide = torch.promote_types(x.dtype, torch.float32)
    ends = ((-1, 1.5), (-0.5, 0.5), (0.1, 0.4))
    weight, bias, slope = (torch.linspace(*of, x.shape[1], dtype=wide, device=x.device) for of in ends)
    # Such a channel is kept.
    weight[1] = 0
    given = x, weight, bias, residual, slope if act.name == "prelu" else None
    leaves = [None if t is None else t.clone().requires_grad_() for t in given]
    running = torch.zeros_like(weight), torch.ones_like(weight)
    kept = find(weight, bias, act, x.dtype, residual=residual is not None) if keep == "output" else None
    spec = Norm(keep, act, EPS, 0.1, process_group=group)
    z = op.normalise(Operands(leaves[0] * 1, *leaves[1:], *running), spec, kept)
    return z, torch.autograd.grad(z, [t for t in leaves if t is not None], dz), running


CASES = {
    "leaky_relu": ("output", (2, 5, 3, 7), torch.float64, False, LEAKY),
    "leaky_relu, fp32": ("output", (2, 5, 3, 7), torch.float32, True, LEAKY),
    "leaky_relu, large plane": ("output", (1, 3, 40, 41), torch.float32, False, LEAKY),
    "leaky_relu, bf16": ("output", (2, 8, 6, 5), torch.bfloat16, True, LEAKY),
    "leaky_relu, fp16": ("output", (2, 8, 33), torch.float16, False, LEAKY),
    "relu": ("input", (2, 5, 3, 7), torch.float64, False, RELU),
    "silu": ("input", (2, 5, 3, 7), torch.float32, True, Activation("silu", 0.0)),
    "large plane": ("input", (1, 3, 40, 41), torch.float32, False, Activation("gelu", 0.0)),
    "bf16": ("input", (2, 8, 6, 5), torch.bfloat16, True, RELU),
    "fp16": ("input", (2, 8, 33), torch.float16, False, Activation("leaky_relu", 0.1)),
    "identity": ("input", (4, 3), torch.float64, False, Activation("identity", 0.0)),
    "prelu": ("input", (2, 6, 5), torch.float64, False, Activation("prelu", 0.25)),
}


@pytest.mark.parametrize("with_residual", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("case", CASES)
def test_as_over_both(backend, twin, device, case, with_residual):
    keep, shape, dtype, rows, act = CASES[case]
    x, dz, r = (torch.randn(shape, device=device).to(dtype) for _ in range(3))
    if rows:
        x, dz, r = (channels_last(t) for t in (x, dz, r))
    residual = r if with_residual else None
    z, grads, moved = step(x, dz, residual, keep, act, "group")
    # Forward and backward take one all-gather each.
    assert twin == [(3, shape[1]), (2, shape[1])]
    assert z.stride() == x.stride()
    pair = [None if t is None else torch.cat([t, t]).double() for t in (x, dz, residual)]
    expected, exact, statistics = step(*pair, keep, act, None)
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
    near, far = (step(of, dz, None, "input", Activation("identity", 0.0), "group")[1][0] for of in (x, x + 1024))
    assert relative_error(far, near) <= GRADIENT_TOLERANCE[torch.float32]


@pytest.mark.usefixtures("twin")
@pytest.mark.parametrize(
    ("samples", "keep", "name", "with_residual"),
    [
        (2, "output", "leaky_relu", False), (0, "output", "leaky_relu", True), (0, "input", "relu", True),
        (2, "input", "prelu", True),
    ],
)  # fmt: skip
def test_opcheck(samples, keep, name, with_residual):
    x, residual = (torch.randn(samples, 3, 4, 5, dtype=torch.float64).requires_grad_() for _ in range(2))
    weight, bias, slope = (torch.tensor([1.0, 0.0, -0.7], dtype=torch.float64).requires_grad_() for _ in range(3))
    act = Activation(name, 0.25)
    kept = find(weight, bias, act, torch.float64) if keep == "output" else None
    more = {} if kept is None else {"slots": kept.slots, "kept_count": kept.count}
    more |= {"residual": residual if with_residual else None, "slope": slope if name == "prelu" else None}
    spec = Norm(keep, act, EPS, process_group="group")
    torch.library.opcheck(norm_op, NormCall(spec, x, weight, bias, **more).arguments)


@BY_KEPT
def test_a_failed_collective_changes_nothing(monkeypatch, keep, act):
    def fails(t, group):
        raise RuntimeError("connection closed")

    monkeypatch.setattr(sync, "gather", fails)
    mean, var, x = torch.zeros(3), torch.ones(3), torch.randn(2, 3, 4)
    before = x.clone()
    with pytest.raises(RuntimeError, match="connection closed"):
        op.normalise(Operands(x, running_mean=mean, running_var=var), Norm(keep, act, EPS, process_group="group"))
    assert torch.equal(x, before)
    assert not mean.any()


@pytest.mark.usefixtures("twin")
@BY_KEPT
def test_double_backward_raises(keep, act):
    x = torch.randn(2, 3, 4, requires_grad=True)
    spec = Norm(keep, act, EPS, process_group="group")
    (dx,) = torch.autograd.grad(op.normalise(Operands(x * 1), spec).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"fusedseg\.(inplace_abn|norm_act)_sync: double backward is not supported"):
        dx.sum().backward()
