"""Compares InPlaceInstanceNormAct, InPlaceGroupNormAct and residuals with stock modules: function and state."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

import fusedseg
from fusedseg import InPlaceABN, InPlaceABNSync, InPlaceGroupNormAct, InPlaceInstanceNormAct, InstanceNormAct
from fusedseg.memory.meter import measure
from tests.tools.compiling import check_compiled_follows
from tests.tools.tensors import channels_last

BATCH_NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
INSTANCE_NORMS = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}
SPATIAL = {1: (7,), 2: (5, 3), 3: (3, 2, 4)}
by_dims = pytest.mark.parametrize("dims", [1, 2, 3])


def pair(kind, dims=2, dtype=torch.float64, **options):
    """Makes a stock norm of 4 channels, and our module with the same state; the activation is leaky_relu."""
    if kind in ("batch", "exact batch"):
        stock = BATCH_NORMS[dims](4, dtype=dtype, **options)
        ours = (InPlaceABN if kind == "batch" else fusedseg.BatchNormAct)(4, dtype=dtype, **options)
    elif kind == "instance":
        stock = INSTANCE_NORMS[dims](4, dtype=dtype, **options)
        ours = InPlaceInstanceNormAct(4, dtype=dtype, **options)
    else:
        stock, ours = nn.GroupNorm(2, 4, dtype=dtype, **options), InPlaceGroupNormAct(2, 4, dtype=dtype, **options)
    with torch.no_grad():
        for t in (*stock.parameters(), *stock.buffers()):
            if t.is_floating_point():
                t.uniform_(0.5, 1.5)
        if stock.weight is not None:
            stock.weight.copy_(torch.tensor([1.0, -0.5, 1e-9, 0.0], dtype=dtype))
    ours.load_state_dict(stock.state_dict(), strict=True)
    assert list(ours.state_dict()) == list(stock.state_dict())
    return stock, ours


def assert_same_step(stock, ours, x, residual=None):
    results = []
    for module in (stock, ours):
        leaves = [t.clone().requires_grad_() for t in (x, residual) if t is not None]
        if module is ours:
            z = module(leaves[0] * 1, *leaves[1:])
        else:
            y = module(leaves[0] * 1)
            z = nn.functional.leaky_relu(y if residual is None else y + leaves[1], 0.01)
        wanted = [t for t in (*leaves, *module.parameters()) if t.requires_grad]
        results.append((z, torch.autograd.grad(z.square().sum(), wanted)))
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(ours.state_dict(), stock.state_dict())


@by_dims
@pytest.mark.parametrize("fmt", ["contiguous", "channels_last"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"affine": True},
        {"track_running_stats": True},
        {"affine": True, "track_running_stats": True, "momentum": None},
    ],
    ids=str,
)
def test_instance_norm_as_stock(backend, device, dims, fmt, options):
    stock, ours = (m.to(device) for m in pair("instance", dims, **options))
    for training in (True, True, False):
        x = torch.randn(2, 4, *SPATIAL[dims], dtype=torch.float64, device=device)
        stock.train(training)
        ours.train(training)
        assert_same_step(stock, ours, channels_last(x) if fmt == "channels_last" else x)


@by_dims
@pytest.mark.parametrize("fmt", ["contiguous", "channels_last"])
@pytest.mark.parametrize("options", [{}, {"affine": False}, {"eps": 1e-2}], ids=str)
def test_group_norm_as_stock(backend, device, dims, fmt, options):
    stock, ours = (m.to(device) for m in pair("group", dims, **options))
    for training in (True, False):
        x = torch.randn(2, 4, *SPATIAL[dims], dtype=torch.float64, device=device)
        stock.train(training)
        ours.train(training)
        assert_same_step(stock, ours, channels_last(x) if fmt == "channels_last" else x)


def test_group_norm_of_vectors(backend, device):
    stock, ours = (m.to(device) for m in pair("group"))
    assert_same_step(stock, ours, torch.randn(3, 4, dtype=torch.float64, device=device))


@pytest.mark.parametrize("kind", ["batch", "instance", "group"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
def test_residual(backend, device, kind, training):
    stock, ours = (m.to(device).train(training) for m in pair(kind, affine=True))
    x, r = torch.randn(2, 2, 4, 5, 3, dtype=torch.float64, device=device)
    assert_same_step(stock, ours, x, r)


@pytest.mark.parametrize("kind", ["batch", "exact batch", "instance", "group"])
@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_are_independent(kind, clone):
    stock, ours = pair(kind, affine=True)
    other, before = clone(ours), copy.deepcopy(ours.state_dict())
    assert_same_step(stock, other, torch.randn(2, 4, 5, 3, dtype=torch.float64))
    torch.testing.assert_close(ours.state_dict(), before)
    assert repr(other) == repr(ours)
    assert "activation=leaky_relu(0.01)" in repr(ours)


def test_old_checkpoints_are_refused_as_by_stock():
    """A state dict from before PyTorch 0.4.0 has running statistics; a module that does not track them refuses it."""
    state = {"running_mean": torch.zeros(4), "running_var": torch.ones(4)}
    texts = []
    for module in (nn.InstanceNorm2d(4), InPlaceInstanceNormAct(4)):
        with pytest.raises(RuntimeError, match="Unexpected running stats") as caught:
            module.load_state_dict(dict(state))
        texts.append(str(caught.value).replace(type(module).__name__, "norm"))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("norm", [InPlaceInstanceNormAct, InstanceNormAct])
def test_other_channels_are_warned_about_where_nothing_depends_on_them(norm, device):
    x = torch.randn(2, 3, 4, 4, device=device)
    with pytest.warns(UserWarning, match=rf"{norm.__name__}: x must have shape \(N, 4\)") as seen:
        z = norm(4)(x.clone())
    assert seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(z, nn.LeakyReLU(0.01)(nn.InstanceNorm2d(4)(x)))


@pytest.mark.parametrize("kind", ["batch", "instance", "group"])
def test_autocast(backend, device, kind):
    """The norm's input is bf16 and the residual is fp32."""
    norms = {"batch": InPlaceABN(4), "instance": InPlaceInstanceNormAct(4, affine=True)}
    conv, norm = nn.Conv2d(3, 4, 3).to(device), (norms | {"group": InPlaceGroupNormAct(2, 4)})[kind].to(device)
    x, r = torch.randn(2, 3, 8, 8, device=device), torch.randn(2, 4, 6, 6, device=device, requires_grad=True)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        z = norm(conv(x), r)
    assert z.dtype == torch.bfloat16
    z.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in (*norm.parameters(), r))


# The graphs of both backends hold the same op, and tests/nn/test_inplace_abn.py compiles a norm on Triton.
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", ["aten"], indirect=True)
def test_compile_fullgraph_follows_eager(backend, device, compiler):
    """Residual blocks of all kinds train for several steps from a weight of 0.

    A state dict is loaded in between.
    """
    torch._dynamo.reset()

    class Block(nn.Module):
        def __init__(self, kind):
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3, padding=1)
            options = {"track_running_stats": True} if kind == "instance" else {}
            _, self.norm = pair(kind, affine=True, **options)

        def forward(self, x):
            return self.norm(self.conv(x), x)

    blocks = [Block(kind) for kind in ("batch", "instance", "group")]
    eager = nn.Sequential(nn.Conv2d(2, 4, 1), *blocks).to(device, torch.float64)

    def zero_weights(net):
        for block in net[1:]:
            block.norm.weight[1].zero_()

    batches = torch.randn(3, 2, 2, 6, 6, dtype=torch.float64, device=device)
    check_compiled_follows(eager, compiler, list(batches), {2: zero_weights})


class ResidualNet(nn.Module):
    """A convolution, then norm + residual + activation twice; weights of norms start at 0, as in many networks."""

    def __init__(self, kind, fused):
        super().__init__()
        self.stem, self.head = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 1, 1)
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(2))
        stock, ours = zip(*(pair(kind, dtype=torch.float32, affine=True) for _ in range(2)), strict=True)
        self.norms, self.fused = nn.ModuleList(ours if fused else stock), fused
        for norm in self.norms:
            nn.init.zeros_(norm.weight)
            nn.init.zeros_(norm.bias)

    def forward(self, x):
        x = self.stem(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            y = conv(x)
            x = norm(y, x) if self.fused else nn.functional.leaky_relu(norm(y) + x, 0.01)
        return self.head(x)


@pytest.mark.parametrize("kind", ["batch", "exact batch", "instance", "group"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"])
def test_five_steps_from_zero_weights(backend, device, kind, dtype, tolerance):
    stock, ours = (ResidualNet(kind, fused).to(device) for fused in (False, True))
    ours.load_state_dict(stock.state_dict())
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (stock, ours)]
    for _ in range(5):
        x, target = torch.randn(4, 2, 10, 10, device=device), torch.randn(4, 1, 10, 10, device=device)
        losses = []
        for net, optimizer in zip((stock, ours), optimizers, strict=True):
            optimizer.zero_grad()
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
                out = net(x)
            loss = (out.float() - target).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[1] == pytest.approx(losses[0], rel=tolerance)
    assert all((norm.weight != 0).all() for norm in ours.norms)


def test_a_residual_network_keeps_one_tensor_a_convolution(backend, device):
    x = torch.randn(2, 2, 16, 16, device=device)
    nets = [ResidualNet("instance", fused).to(device) for fused in (False, True)]
    for net in nets:
        for norm in net.norms:
            nn.init.ones_(norm.weight)
    stock, ours = (measure(net, x).saved for net in nets)
    tensor = 2 * 4 * 16 * 16 * 4
    # Kept are the input, the input of each convolution, and mean and 1 / sqrt(var + eps) of each channel of a sample.
    assert ours <= x.nbytes + 3 * tensor + 2 * 2 * 4 * 8
    assert stock >= x.nbytes + 5 * tensor


@pytest.mark.parametrize(
    ("attempt", "error", "text"),
    [
        (lambda: InPlaceInstanceNormAct(3, activation="relu"), ValueError,
         "fusedseg.InPlaceInstanceNormAct: activation 'relu' cannot be inverted; use fusedseg.InstanceNormAct"),
        (lambda: InPlaceGroupNormAct(4, 6), ValueError, "must be divisible by num_groups"),
        (lambda: InPlaceInstanceNormAct(3, affine=True)(torch.randn(2, 4, 5)), ValueError,
         r"x must have shape \(N, 3\) with one to three spatial dimensions after it, got \(2, 4, 5\)"),
        (lambda: InPlaceInstanceNormAct(3)(torch.randn(2, 3)), ValueError,
         r"x must have shape \(N, 3\) with one to three spatial dimensions after it, got \(2, 3\)"),
        (lambda: InPlaceGroupNormAct(2, 4)(torch.randn(2, 6, 5)), ValueError,
         r"fusedseg.InPlaceGroupNormAct: x must have shape \(N, 4\) .* got \(2, 6, 5\)"),
    ],
)  # fmt: skip
def test_refused(attempt, error, text):
    with pytest.raises(error, match=text):
        attempt()


@pytest.mark.parametrize(
    ("cls", "stock"),
    [
        (InPlaceABN, nn.BatchNorm2d(4)),
        (InPlaceABNSync, nn.BatchNorm2d(4, affine=False)),
        (InPlaceInstanceNormAct, nn.InstanceNorm2d(4, affine=True, track_running_stats=True)),
        (InPlaceInstanceNormAct, nn.InstanceNorm2d(4)),
        (InPlaceGroupNormAct, nn.GroupNorm(2, 4)),
        (InPlaceGroupNormAct, nn.GroupNorm(2, 4, affine=False)),
    ],
    ids=repr,
)
def test_from_and_to_norm(cls, stock):
    """``from_norm`` and ``to_norm`` keep the function, parameters and buffers; every norm has both methods."""
    ours = cls.from_norm(stock.eval(), "elu", 0.5)
    x = torch.randn(2, 4, 5, 3)
    torch.testing.assert_close(ours(x.clone()), nn.functional.elu(stock(x), 0.5))
    back = ours.to_norm()
    assert type(back) is type(stock)
    assert repr(back) == repr(stock)
    assert not back.training
    for name, value in stock.state_dict(keep_vars=True).items():
        assert ours.state_dict(keep_vars=True)[name] is value
        assert back.state_dict(keep_vars=True)[name] is value
    with pytest.raises(TypeError, match=rf"fusedseg.{cls.__name__}.from_norm: norm must be one of .* got LayerNorm"):
        cls.from_norm(nn.LayerNorm(4))
