"""Compares a bank with the stack of its branches: the function and gradients agree, at one convolution's bytes."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fusedseg import InPlaceABN
from fusedseg.memory.meter import measure
from fusedseg.nn import ConvBank2d, ConvBank3d
from tests.tools.called import Called

BANKS = {2: ConvBank2d, 3: ConvBank3d}
DOUBLE = {"dtype": torch.float64}


def stacked(bank, x):
    """Computes the branches one by one, each with a stock convolution."""
    return torch.stack([branch(x) for branch in bank.branches]).sum(0)


def assert_same(bank, x, reference=stacked):
    results = []
    for f in (bank, lambda x: reference(bank, x)):
        leaf = x.clone().requires_grad_()
        y = f(leaf)
        # The loss is not a plain sum, because its gradient would be the same everywhere.
        dy = torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view(y.shape)
        results.append((y, torch.autograd.grad(y, (leaf, *bank.parameters()), dy)))
    torch.testing.assert_close(results[0], results[1])


GEOMETRIES = [
    pytest.param({"padding": 1}, id="plain"),
    pytest.param({"padding": (1, 2), "stride": 2, "dilation": (1, 2), "bias": False}, id="stride and dilation"),
    pytest.param({"padding": "same", "dilation": 2}, id="same"),
    pytest.param({"padding": (1, 2), "groups": 2}, id="groups"),
    pytest.param({"padding": 1, "padding_mode": "reflect"}, id="reflect"),
    pytest.param({"padding": "same", "padding_mode": "circular"}, id="same circular"),
]


@pytest.mark.parametrize("branches", [1, 4, [3, 5, 3, 1, (1, 5)]], ids=["one", "equal", "mixed"])
@pytest.mark.parametrize("options", GEOMETRIES)
def test_values_and_gradients_of_the_stack(device, options, branches):
    bank = ConvBank2d(4, 6, 3, **options, branches=branches, device=device, **DOUBLE)
    assert_same(bank, torch.randn(2, 4, 9, 8, device=device, **DOUBLE))


@pytest.mark.parametrize("branches", [3, [3, 1, (1, 3, 5)]], ids=["equal", "mixed"])
def test_three_dimensions(device, branches):
    bank = ConvBank3d(2, 4, 3, (1, 2, 1), 1, groups=2, branches=branches, device=device, **DOUBLE)
    assert_same(bank, torch.randn(2, 2, 5, 6, 7, device=device, **DOUBLE))


def test_the_biases_of_some_branches_are_added_if_the_first_has_none():
    bank = ConvBank2d(4, 6, 3, padding=1, branches=3, **DOUBLE)
    bank.branches[0] = nn.Conv2d(4, 6, 3, padding=1, bias=False, **DOUBLE)
    assert_same(bank, torch.randn(2, 4, 5, 6, **DOUBLE))


@pytest.mark.parametrize("dims", [2, 3])
def test_a_smaller_kernel_without_padding_reads_the_centres(dims):
    bank = BANKS[dims](2, 3, 5, stride=2, dilation=2, branches=[5, 1], **DOUBLE)
    x = torch.randn(2, 2, *[13] * dims, **DOUBLE)

    def reference(bank, x):
        # 4 = dilation * (5 - 1) / 2
        return bank.branches[0](x) + bank.branches[1](F.pad(x, [-4] * 2 * dims))

    assert_same(bank, x, reference)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_even_kernels_have_one_centre_too():
    bank = ConvBank2d(2, 3, 2, padding="same", branches=[2, 4, (2, 6)], **DOUBLE)
    assert_same(bank, torch.randn(2, 2, 7, 8, **DOUBLE))


def test_without_a_batch():
    bank = ConvBank2d(4, 6, 3, groups=2, branches=2, **DOUBLE)
    x = torch.randn(4, 7, 8, **DOUBLE)
    torch.testing.assert_close(bank(x), bank(x[None])[0])


def test_gradcheck_twice():
    bank = ConvBank2d(2, 2, 3, padding=1, branches=[3, 1], groups=2, **DOUBLE)
    names = [name for name, _ in bank.named_parameters()]

    def f(x, *parameters):
        return torch.func.functional_call(bank, dict(zip(names, parameters, strict=True)), (x,))

    arguments = (torch.randn(1, 2, 4, 3, requires_grad=True, **DOUBLE), *bank.parameters())
    assert torch.autograd.gradcheck(f, arguments)
    assert torch.autograd.gradgradcheck(f, arguments)


def convolutions_of(called):
    """The number of convolutions in forward and backward."""
    return sum(name in ("convolution", "convolution_backward") for name in called.names)


@pytest.mark.parametrize("branches", [1, 16, [1, 3, 5]], ids=str)
def test_one_convolution_each_way(branches):
    bank = ConvBank2d(2, 2, 3, padding=1, branches=branches)
    with Called() as called:
        bank(torch.randn(1, 2, 8, 8, requires_grad=True)).sum().backward()
    assert convolutions_of(called) == 2


@pytest.mark.parametrize("dims", [2, 3])
def test_saved_bytes_do_not_depend_on_the_number_of_branches(dims):
    shape = (2, 8, *([64] * 2 if dims == 2 else [16] * 3))
    x = torch.randn(shape).requires_grad_()
    kernel = 8 * 8 * 3**dims * 4
    for k in (1, 4, 16, 64):
        bank = BANKS[dims](8, 8, 3, padding=1, branches=k)
        footprint = measure(bank, x)
        assert footprint.saved == x.nbytes + (k > 1) * kernel
        parameters = sum(p.nbytes for p in bank.parameters())
        # Alive are dy as (N, K, *), dx and a tensor of the size of dx.
        assert footprint.peak <= 3 * x.nbytes + parameters + 6 * kernel
        if k < 64:
            rival = measure(lambda x, bank=bank: stacked(bank, x), x, owned=bank.parameters())
            assert rival.peak >= (k + 1) * x.nbytes


def test_a_stack_inside_a_network_grows_where_a_bank_does_not():
    """A stack keeps an activation for every branch, so its bytes grow with the branches; a bank's bytes do not."""

    def network(k):
        return nn.Sequential(ConvBank2d(3, 8, 3, padding=1, branches=k), InPlaceABN(8), ConvBank2d(8, 8, 3, branches=k))

    x = torch.randn(2, 3, 64, 64)
    saved = {k: measure(network(k), x).saved for k in (1, 64)}
    assert saved[64] <= 1.1 * saved[1]


def test_half_precision_adds_up_in_fp32():
    """If the sum were in fp16, adding 2**-12 to 1 would leave 1, also after 64 additions."""
    bank = ConvBank2d(1, 1, 1, branches=65, bias=True).half()
    with torch.no_grad():
        for i, branch in enumerate(bank.branches):
            for p in branch.parameters():
                p.fill_(1 if i == 0 else 2**-12)
    y = bank(torch.ones(1, 1, 1, 1, dtype=torch.float16))
    assert y.dtype == torch.float16
    assert y.item() == 2 * (1 + 2**-6)


def test_autocast(device):
    bank = ConvBank2d(3, 4, 3, branches=[3, 5], padding=1, device=device)
    x = torch.randn(2, 3, 8, 8, device=device)
    expected = bank(x)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y = bank(x)
    assert y.dtype == torch.bfloat16
    # The result adds 75 products of two rounded factors.
    torch.testing.assert_close(y.float(), expected, rtol=2e-2, atol=2e-2)
    y.float().square().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in bank.parameters())


@pytest.mark.parametrize("groups", [1, 2])
def test_channels_last(device, groups):
    """The test uses fp32, because torch on GPUs does not keep channels_last in float64."""
    bank = ConvBank2d(4, 6, 3, padding=1, groups=groups, branches=[3, 5], device=device)
    x = torch.randn(2, 4, 6, 5, device=device)
    expected = bank(x)
    bank.to(memory_format=torch.channels_last)
    y = bank(x.contiguous(memory_format=torch.channels_last))
    assert y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y, expected)
    bank.grow()
    assert bank.branches[2].weight.is_contiguous(memory_format=torch.channels_last)


def test_inplace_abn_may_follow():
    bank, norm = ConvBank2d(3, 4, 3, branches=[3, 1], padding=1, **DOUBLE), InPlaceABN(4, **DOUBLE)
    stock = nn.Sequential(nn.BatchNorm2d(4, **DOUBLE), nn.LeakyReLU(0.01))
    grads = []
    for f in (lambda x: norm(bank(x)), lambda x: stock(stacked(bank, x))):
        y = f(torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(0), **DOUBLE))
        grads.append((y, torch.autograd.grad(y.square().sum(), [*bank.parameters()])))
    torch.testing.assert_close(*grads)


def test_a_frozen_branch():
    bank = ConvBank2d(2, 3, 3, branches=2)
    bank.branches[0].requires_grad_(False)
    bank(torch.randn(2, 2, 5, 5)).square().sum().backward()
    assert all(p.grad is None for p in bank.branches[0].parameters())
    assert all(p.grad.abs().sum() > 0 for p in bank.branches[1].parameters())


@pytest.mark.parametrize("kernel_size", [None, 1, 5, (1, 7)])
@pytest.mark.parametrize("padding", [0, 1, "same"])
def test_growing_a_sum_leaves_the_function(kernel_size, padding):
    bank = ConvBank2d(2, 3, 3, padding=padding, dilation=2, branches=[3, 1], **DOUBLE).eval()
    x = torch.randn(2, 2, 9, 9, **DOUBLE)
    before, old = bank(x), list(bank.parameters())
    new = bank.grow(2, kernel_size)
    torch.testing.assert_close(bank(x), before)
    assert len(bank) == 4
    assert all(a is b for a, b in zip([*old, *new], bank.parameters(), strict=True))
    assert not bank.branches[3].training
    bank(x).square().sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in new)


def test_initial_values():
    bank = ConvBank2d(2, 3, 3)
    assert all((p == 0).all() for p in bank.grow())
    assert all(p.abs().sum() > 0 for p in bank.grow(init="stock"))
    assert all((p == 1).all() for p in bank.grow(init=lambda branch: [nn.init.ones_(p) for p in branch.parameters()]))


@pytest.mark.parametrize(
    "make",
    [lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), lambda p: torch.optim.Adam(p, lr=0.1)],
    ids=["SGD", "Adam"],
)
def test_optimizer_state_survives_growth(make):
    """A bank that grew branches with a learning rate of zero trains like a bank that did not grow."""
    small = ConvBank2d(2, 3, 3, branches=2, **DOUBLE)
    grown = copy.deepcopy(small)
    optimizers = [make(small.parameters()), make(grown.parameters())]
    for step in range(4):
        if step == 2:
            state = {p: dict(optimizers[1].state[p]) for p in grown.parameters()}
            optimizers[1].add_param_group({"params": grown.grow(2, kernel_size=5), "lr": 0.0})
            assert all(optimizers[1].state[p] == kept for p, kept in state.items() if kept)
        x = torch.randn(2, 2, 6, 6, **DOUBLE)
        for bank, optimizer in zip((small, grown), optimizers, strict=True):
            optimizer.zero_grad()
            bank(x).square().mean().backward()
            optimizer.step()
    for ours, theirs in zip(grown.branches[:2].parameters(), small.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert len(optimizers[1].state) == 8


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_grow_independently(clone):
    bank = ConvBank2d(2, 3, 3, branches=[3, 1])
    bank.grow(kernel_size=5, init="stock")
    other, x = clone(bank), torch.randn(1, 2, 6, 6)
    torch.testing.assert_close(other(x), bank(x))
    other.grow()
    assert (len(bank), len(other)) == (3, 4)


def test_state_dict_after_growth():
    bank = ConvBank2d(2, 3, 3)
    bank.grow(2, kernel_size=5, init="stock")
    assert list(bank.state_dict()) == [f"branches.{i}.{name}" for i in range(3) for name in ("weight", "bias")]
    other = ConvBank2d(2, 3, 3)
    with pytest.raises(RuntimeError, match=r"ConvBank2d: .* must have 1 branches, .* got 3; use grow\(2\) before"):
        other.load_state_dict(bank.state_dict())
    other.grow(2, kernel_size=5)
    other.load_state_dict(bank.state_dict())
    x = torch.randn(1, 2, 6, 6)
    torch.testing.assert_close(other(x), bank(x))
    with pytest.raises(RuntimeError, match="must have 3 branches, as the bank has, got 1; use a new bank"):
        other.load_state_dict(ConvBank2d(2, 3, 3).state_dict())


def test_a_stock_convolution_becomes_a_bank():
    conv = nn.Conv2d(2, 3, 3, padding="same", padding_mode="circular").eval()
    x = torch.randn(1, 2, 6, 6)
    net = nn.Sequential(ConvBank2d(2, 3, 3, padding="same", padding_mode="circular"))
    net.load_state_dict(nn.Sequential(conv).state_dict(), strict=True)
    torch.testing.assert_close(net(x), conv(x))
    bank = ConvBank2d.from_conv(conv)
    assert bank.branches[0] is conv
    assert not bank.training
    assert not bank.grow()[0].is_meta
    torch.testing.assert_close(bank(x), conv(x))


def test_hooks_replaced_and_parametrized_branches():
    bank = ConvBank2d(2, 3, 3, branches=[3, 1], **DOUBLE)
    x, seen = torch.randn(1, 2, 6, 6, **DOUBLE), []
    expected = bank(x)
    handle = bank.branches[1].register_forward_hook(lambda *_: seen.append(1))
    torch.testing.assert_close(bank(x), expected)
    assert seen == [1]
    handle.remove()
    forward = bank.branches[1].forward
    bank.branches[1].forward = lambda x: seen.append(2) or forward(x)
    torch.testing.assert_close(bank(x), expected)
    assert seen == [1, 2]
    del bank.branches[1].forward
    nn.utils.parametrizations.weight_norm(bank.branches[0])
    with Called() as called:
        torch.testing.assert_close(bank(x), expected)
    assert convolutions_of(called) == 1
    bank.branches[1] = nn.Sequential(bank.branches[1])
    with pytest.raises(ValueError, match=r"branch 1 must return shape \(1, 3, 4, 4\), .* got \(1, 3, 6, 6\)"):
        bank(x)


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compile_fullgraph_before_and_after_growth(device, compiler):
    torch._dynamo.reset()
    bank = ConvBank2d(4, 6, 3, padding=1, groups=2, branches=[3, 1, 3], device=device, **DOUBLE)
    compiled = torch.compile(bank, fullgraph=True, backend=compiler)
    for _ in range(2):
        x, results = torch.randn(2, 4, 6, 5, device=device, **DOUBLE), []
        for f in (bank, compiled):
            y = f(x)
            results.append((y, torch.autograd.grad(y.square().sum(), [*bank.parameters()])))
        torch.testing.assert_close(*results)
        bank.grow(kernel_size=5, init="stock")


@pytest.mark.parametrize(
    ("attempt", "error", "text"),
    [
        (lambda: ConvBank2d(2, 3, 3, padding_mode="same"), ValueError, "padding_mode must be one of zeros, .* 'same'"),
        (lambda: ConvBank2d(2, 3, 3, branches=0), ValueError, "branches must be an integer >= 1, got 0"),
        (lambda: ConvBank2d(2, 3, 3, branches=[]), ValueError, r"branches must be an integer >= 1, or .* got \[\]"),
        (lambda: ConvBank2d(2, 3, 3, branches=[3, 2]), ValueError, r"from the bank's \(3, 3\) by even .* got \(2, 2\)"),
        (lambda: ConvBank3d(2, 3, (3, 3)), ValueError, r"ConvBank3d: kernel_size must be .* 3 of them, got \(3, 3\)"),
        (lambda: ConvBank2d(3, 4, 3, groups=2), ValueError, "in_channels must be divisible by groups=2, got 3"),
        (lambda: ConvBank2d(4, 3, 3, groups=2), ValueError, "out_channels must be divisible by groups=2, got 3"),
        (lambda: ConvBank2d(2, 3, 3, 2, "same"), ValueError, r"padding='same' needs a stride of 1, got \(2, 2\)"),
        (lambda: ConvBank2d(2, 3, 3)(torch.ones(1, 4, 5, 5)), ValueError, r"\(N, 2\) with 2 spatial .* \(1, 4, 5, 5\)"),
        (lambda: ConvBank2d(2, 3, 3)("x"), TypeError, "ConvBank2d: x must be a tensor, got str"),
        (lambda: ConvBank2d(2, 3, 3).grow(0), ValueError, "ConvBank2d.grow: k must be an integer >= 1, got 0"),
        (lambda: ConvBank2d(2, 3, 3).grow(init="ones"), ValueError, "init must be 'zeros', 'stock' or .* got 'ones'"),
        (lambda: ConvBank2d.from_conv(nn.Conv3d(2, 3, 3)), TypeError, "conv must be an nn.Conv2d, got Conv3d"),
    ],
)
def test_refused(attempt, error, text):
    with pytest.raises(error, match=text):
        attempt()
