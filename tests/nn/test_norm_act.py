"""Compares the modules with the stock norm and activation: function, state and behaviour."""

import pytest
import torch
from torch import nn

import fusedseg
from fusedseg import BatchNormAct, GroupNormAct, InstanceNormAct
from tests.tools.compiling import check_compiled_follows

BATCH = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
INSTANCE = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}
SHAPES = [(1, (5, 4)), (1, (3, 4, 7)), (2, (2, 4, 5, 3)), (3, (2, 4, 3, 2, 2))]


def fill(*modules):
    """Gives all modules the same, non-trivial state."""
    state = {name: torch.rand_like(t) + 0.5 for name, t in modules[0].state_dict().items() if t.is_floating_point()}
    for module in modules:
        module.load_state_dict(module.state_dict() | state, strict=True)


def assert_same_step(stock, ours, x, activation=torch.relu, residual=False):
    results = []
    for module in (stock, ours):
        leaf = x.clone().requires_grad_()
        r = x.flip(0).requires_grad_() if residual else None
        if module is ours:
            y = ours(leaf, r)
        else:
            y = activation(stock(leaf) if r is None else stock(leaf) + r)
        wanted = [t for t in (leaf, r, *module.parameters()) if t is not None and t.requires_grad]
        results.append((y, torch.autograd.grad(y.square().sum(), wanted)))
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(ours.state_dict(), stock.state_dict())


@pytest.mark.parametrize(("dims", "shape"), SHAPES)
@pytest.mark.parametrize(
    "options",
    [{}, {"affine": False}, {"track_running_stats": False}, {"momentum": None}, {"momentum": 0.3, "eps": 1e-2}],
    ids=str,
)
@pytest.mark.parametrize("norm", ["batch", "instance"])
def test_training_and_eval_as_stock(norm, dims, shape, options):
    if norm == "instance":
        if len(shape) == 2:
            pytest.skip("InstanceNorm needs positions")
        options = {"affine": True, "track_running_stats": True} | options
    stock_class, our_class = (BATCH[dims], BatchNormAct) if norm == "batch" else (INSTANCE[dims], InstanceNormAct)
    stock, ours = stock_class(4, **options).double(), our_class(4, activation="relu", **options).double()
    fill(stock, ours)
    for training in (True, True, False):
        stock.train(training)
        ours.train(training)
        assert_same_step(stock, ours, torch.randn(shape, dtype=torch.float64))
        assert_same_step(stock, ours, torch.randn(shape, dtype=torch.float64), residual=True)


@pytest.mark.parametrize("shape", [(5, 4), (3, 4, 7), (2, 4, 5, 3), (2, 4, 3, 2, 2)], ids=str)
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("affine", [True, False])
def test_group_norm_as_stock(shape, groups, affine):
    stock = nn.GroupNorm(groups, 4, 1e-3, affine).double()
    ours = GroupNormAct(groups, 4, 1e-3, affine, activation="relu").double()
    fill(stock, ours)
    for residual in (False, True):
        assert_same_step(stock, ours, torch.randn(shape, dtype=torch.float64), residual=residual)
    ours.eval()
    assert_same_step(stock, ours, torch.randn(shape, dtype=torch.float64))


MODULES = {
    "batch": lambda **options: BatchNormAct(4, **options),
    "instance": lambda **options: InstanceNormAct(4, affine=True, **options),
    "group": lambda **options: GroupNormAct(2, 4, **options),
}
STOCK = {
    "batch": lambda: nn.BatchNorm2d(4),
    "instance": lambda: nn.InstanceNorm2d(4, affine=True),
    "group": lambda: nn.GroupNorm(2, 4),
}


@pytest.mark.parametrize("norm", MODULES)
@pytest.mark.parametrize("slopes", [1, 4])
def test_prelu_learns_its_slope(norm, slopes):
    ours, prelu = MODULES[norm](activation="prelu", activation_param=0.3, num_slopes=slopes), nn.PReLU(slopes, 0.3)
    stock = nn.Sequential(STOCK[norm](), prelu)
    x = torch.randn(2, 4, 5, 5)
    for _ in range(2):
        for module in (stock, ours):
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            optimizer.zero_grad()
            module(x).square().mean().backward()
            optimizer.step()
        torch.testing.assert_close(ours.slope, prelu.weight)
    ours.reset_parameters()
    assert (ours.slope == 0.3).all()


def test_repr_names_the_activation():
    assert "activation=leaky_relu(0.01)" in repr(BatchNormAct(3))
    assert "activation=gelu('tanh')" in repr(GroupNormAct(1, 3, activation="gelu", activation_param="tanh"))
    assert "activation=prelu(0.25), num_slopes=3" in repr(InstanceNormAct(3, activation="prelu", num_slopes=3))
    assert "activation=relu" in repr(BatchNormAct(3, activation="relu"))


@pytest.mark.parametrize("norm", MODULES)
def test_autocast_and_half(norm):
    """Parameters and statistics stay in fp32; the result has the dtype of the convolution's output."""
    conv, module = nn.Conv2d(3, 4, 3), MODULES[norm](activation="prelu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = module(conv(torch.randn(2, 3, 8, 8)), torch.randn(2, 4, 6, 6))
    assert z.dtype == torch.bfloat16
    z.float().square().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in (*conv.parameters(), *module.parameters()))
    x = torch.randn(2, 4, 6, 6)
    expected = module(x)
    assert module.to(torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16
    torch.testing.assert_close(module(x.bfloat16()).float(), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("norm", MODULES)
def test_from_and_to_norm(norm):
    stock = STOCK[norm]().eval()
    ours = type(MODULES[norm]()).from_norm(stock, "elu")
    assert ours.weight is stock.weight
    assert not ours.training
    x = torch.randn(2, 4, 5, 5)
    assert torch.equal(ours(x), nn.functional.elu(stock(x)))
    back = ours.to_norm()
    assert type(back) is type(stock)
    assert back.weight is stock.weight
    assert list(back.state_dict()) == list(stock.state_dict())
    assert repr(back) == repr(stock)
    prelu = nn.PReLU(4)
    learned = type(ours).from_norm(stock, "prelu", slope=prelu.weight)
    assert learned.slope is prelu.weight
    assert torch.equal(learned(x), prelu(stock(x)))


def test_from_norm_without_parameters_and_of_other_dimensions():
    ours = BatchNormAct.from_norm(nn.BatchNorm1d(3, affine=False, track_running_stats=False), "relu")
    assert list(ours.state_dict()) == []
    assert type(ours.to_norm(1)) is nn.BatchNorm1d
    assert type(InstanceNormAct(3).to_norm(3)) is nn.InstanceNorm3d
    assert BatchNormAct.from_norm(nn.BatchNorm3d(3)).num_batches_tracked == 0


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compile_fullgraph_follows_eager(compiler):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 1)
            self.batch = BatchNormAct(4, activation="prelu", num_slopes=4)
            self.instance = InstanceNormAct(4, affine=True, track_running_stats=True, activation="relu")
            self.group = GroupNormAct(2, 4, activation="identity")

        def forward(self, x):
            x = self.batch(self.a(x))
            return self.group(self.instance(self.b(x), x), x)

    # Strides can only be wrong in channels_last.
    eager = Net().to(torch.float64, memory_format=torch.channels_last)
    batches = torch.randn(2, 2, 2, 8, 8, dtype=torch.float64)
    # In compiled code an instance norm is the stock op, whose result is contiguous.
    check_compiled_follows(
        eager, compiler, [x.contiguous(memory_format=torch.channels_last) for x in batches], strides=False
    )


@pytest.mark.parametrize(
    ("attempt", "error", "text"),
    [
        (lambda: InstanceNormAct(3, num_slopes=3), ValueError,
         "num_slopes must be 1 for activation 'leaky_relu', .* got 3"),
        (lambda: BatchNormAct(3, activation="prelu", num_slopes=2), ValueError, "num_slopes must be 1 or .* 3, got 2"),
        (lambda: BatchNormAct(3)(torch.randn(2, 4, 5)), ValueError, r"must have shape \(N, 3\) .* got \(2, 4, 5\)"),
        (lambda: GroupNormAct(1, 3)(torch.randn(3)), ValueError, r"fusedseg.GroupNormAct: x must have shape"),
        (lambda: InstanceNormAct(3)(torch.randn(2, 3)), ValueError,
         "x must have shape .* one to three spatial dimensions"),
        (lambda: BatchNormAct(3).from_norm(nn.GroupNorm(1, 3)), TypeError, "nn.BatchNorm3d, got GroupNorm"),
        (lambda: BatchNormAct.from_norm(nn.BatchNorm2d(3), "prelu"), ValueError, "slope must be given for activation"),
    ],
)  # fmt: skip
def test_refused(attempt, error, text):
    with pytest.raises(error, match=text):
        attempt()


@pytest.mark.parametrize("make", [InstanceNormAct, fusedseg.InPlaceInstanceNormAct])
def test_running_statistics_of_one_channel_move_once(make):
    """The running statistics moved twice for a batch of two samples, because every sample wrote to the same number."""
    x = torch.randn(2, 1, 6, 6)
    stock, ours = nn.InstanceNorm2d(1, track_running_stats=True), make(1, track_running_stats=True)
    stock(x.clone())
    ours(x.clone())
    torch.testing.assert_close(ours.running_mean, stock.running_mean)
    torch.testing.assert_close(ours.running_var, stock.running_var)


@pytest.mark.parametrize("activation", ["leaky_relu", "elu", "relu", "silu", "gelu", "relu6", "softplus"])
def test_saved_tensors_may_be_changed(activation):
    """``allow_mutation_on_saved_tensors`` raised KeyError for gradients that are written into a tensor."""
    x, norm = torch.randn(2, 4, 5, 3, requires_grad=True), BatchNormAct(4, activation=activation)
    (expected,) = torch.autograd.grad(norm(x).square().sum(), x)
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        y = norm(x)
        loss = y.square().sum()
        y.detach().zero_()
        (found,) = torch.autograd.grad(loss, x)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("fmt", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("norm", [BatchNormAct, InstanceNormAct, GroupNormAct], ids=lambda norm: norm.__name__)
def test_the_output_may_be_changed_in_place(norm, fmt, backend, device):
    """A group norm returned a view on a CPU, and autograd refused ``y += x`` and dropout in place after it."""
    groups = (2,) if norm is GroupNormAct else ()
    ours = norm(*groups, 4, activation="gelu", device=device)
    x = torch.randn(2, 4, 5, 3, device=device).to(memory_format=fmt).requires_grad_()
    y = ours(x)
    (expected,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
    y += 1
    (found,) = torch.autograd.grad((y - 1).square().sum(), x)
    torch.testing.assert_close(found, expected)
