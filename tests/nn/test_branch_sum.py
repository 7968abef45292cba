"""Compares ``BranchSum`` with ``torch.stack(...).sum(0)``."""

import copy

import pytest
import torch
from torch import nn

from fusedseg import BranchSum
from fusedseg.memory import measure

DOUBLE = {"dtype": torch.float64}


class Call(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, x):
        return self.f(x)


def assert_same(module, x):
    results = []
    for f in (module, lambda x: torch.stack([branch(x) for branch in module.branches]).sum(0)):
        leaf = x.clone().requires_grad_()
        y = f(leaf * 1)
        dy = torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view(y.shape)
        results.append((y, torch.autograd.grad(y, (leaf, *module.parameters()), dy)))
    torch.testing.assert_close(results[0], results[1])


SHARED = nn.Sequential(nn.Conv2d(3, 3, 1, **DOUBLE), nn.Sigmoid())
BRANCHES = {
    "one": [nn.Conv2d(3, 3, 1, **DOUBLE)],
    "two": [nn.Conv2d(3, 4, 3, **DOUBLE), nn.Conv2d(3, 4, 3, **DOUBLE)],
    # Autograd keeps the outputs of these layers.
    "kept outputs": [nn.Sigmoid(), nn.ReLU(), nn.Tanh(), nn.Softmax(1)],
    "the input itself": [nn.Identity()] * 4,
    "views": [Call(lambda x: x.flip(2).flip(2)), Call(lambda x: x.view_as(x)), Call(lambda x: x[:]), nn.Identity()],
    "expanded": [Call(lambda x: x.mean().expand_as(x))] * 3,
    "shared branch": [SHARED, SHARED, SHARED],
    "no gradient in the first two": [Call(torch.ones_like), Call(torch.zeros_like), nn.Sigmoid(), nn.Tanh()],
}


@pytest.mark.parametrize("name", BRANCHES)
def test_values_and_gradients_of_the_stack(device, name):
    assert_same(BranchSum(copy.deepcopy(BRANCHES[name])).to(device), torch.randn(2, 3, 6, 5, device=device, **DOUBLE))


@pytest.mark.parametrize("name", BRANCHES)
def test_the_input_stays(name):
    x = torch.randn(2, 3, 6, 5, **DOUBLE)
    before = x.clone()
    BranchSum(BRANCHES[name])(x)
    assert torch.equal(x, before)


def test_gradcheck_twice():
    module = BranchSum([nn.Sigmoid(), nn.Tanh(), nn.Identity(), nn.Conv2d(1, 1, 1, **DOUBLE)])
    x = torch.randn(1, 1, 3, 2, requires_grad=True, **DOUBLE)
    assert torch.autograd.gradcheck(module, x)
    assert torch.autograd.gradgradcheck(module, x)


def test_nothing_is_stacked_and_every_output_let_go():
    """Many branches have the peak of three tensors: the sum, one branch's output, and the next tensor."""
    x = torch.randn(2, 4, 32, 32)

    def peak(k):
        # Convolutions keep x and their weights, and not their output.
        module = BranchSum(nn.Conv2d(4, 4, 1, bias=False) for _ in range(k))
        parameters = sum(p.nbytes for p in module.parameters())
        footprint = measure(module, x)
        assert footprint.saved == x.nbytes
        return footprint.peak - parameters

    assert max(peak(3), peak(16)) <= 3 * x.nbytes
    stack = measure(lambda x: torch.stack([x * 1 for _ in range(16)]).sum(0), x)
    assert stack.peak >= 32 * x.nbytes


def test_dtypes_are_promoted_as_in_a_stack():
    x = torch.randn(2, 3, **DOUBLE)
    widening = [Call(lambda x: x.half()), Call(lambda x: x.half()), Call(lambda x: x.float()), nn.Identity()]
    for branches in (widening, widening[::-1]):
        y = BranchSum(branches)(x)
        assert y.dtype == torch.float64
        torch.testing.assert_close(y, torch.stack([branch(x) for branch in branches]).sum(0), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compile_fullgraph_before_and_after_growth(device, compiler):
    torch._dynamo.reset()
    module = BranchSum([nn.Conv2d(3, 3, 1), nn.Identity(), nn.Sigmoid(), nn.ReLU()]).to(device)
    compiled = torch.compile(module, fullgraph=True, backend=compiler)
    x = torch.randn(2, 3, 6, 5, device=device, requires_grad=True)
    for _ in range(2):
        results = []
        for f in (module, compiled):
            y = f(x)
            results.append((y, torch.autograd.grad(y.square().sum(), (x, *module.parameters()))))
        torch.testing.assert_close(*results)
        module.grow(nn.Conv2d(3, 3, 3, padding=1).to(device))


def test_growth_returns_what_the_optimizer_lacks():
    first = nn.Conv2d(3, 3, 1)
    module = BranchSum([first]).eval()
    optimizer = torch.optim.Adam(module.parameters())
    new = nn.Sequential(nn.Conv2d(3, 3, 1), first, nn.Dropout())
    grown = module.grow(new)
    assert [id(p) for p in grown] == [id(p) for p in new[0].parameters()]
    assert not new[2].training
    optimizer.add_param_group({"params": grown})
    assert len(module) == 2


def test_growth_by_zeros_leaves_the_function():
    module = BranchSum([nn.Conv2d(3, 3, 1)])
    x = torch.randn(2, 3, 4, 4)
    before, zero = module(x), nn.Conv2d(3, 3, 1)
    for p in zero.parameters():
        nn.init.zeros_(p)
    module.grow(zero)
    torch.testing.assert_close(module(x), before)


@pytest.mark.parametrize(
    ("attempt", "error", "text"),
    [
        (lambda: BranchSum([]), ValueError, "fusedseg.BranchSum: branches must hold at least one module, got none"),
        (lambda: BranchSum([torch.relu]), TypeError, "branches must be modules, got builtin_function_or_method"),
        (lambda: BranchSum([nn.ReLU()]).grow("x"), TypeError, "BranchSum.grow: module must be a module, got str"),
        (
            lambda: BranchSum([nn.Identity(), nn.Flatten()])(torch.ones(2, 3, 4)),
            ValueError,
            r"branch 1 must return shape \(2, 3, 4\), as the branches before it, got \(2, 12\)",
        ),
        (lambda: BranchSum([Call(lambda x: (x,))])(torch.ones(1)), TypeError, "branch 0 must .* tensor, got tuple"),
    ],
)
def test_refused(attempt, error, text):
    with pytest.raises(error, match=text):
        attempt()
