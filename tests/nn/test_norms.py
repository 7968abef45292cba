"""Compares the modules of norms with the stock norm and an activation: function, state and behaviour."""

import warnings

import pytest
import torch
from torch import nn

import fusedseg
from fusedseg import (
    BatchNormAct,
    GroupNormAct,
    InPlaceABN,
    InPlaceABNSync,
    InPlaceGroupNormAct,
    InPlaceInstanceNormAct,
    InstanceNormAct,
)
from fusedseg.memory.meter import measure
from tests.tools.tensors import channels_last

BATCH = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
INSTANCE = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}
STOCK = {"batch": BATCH, "instance": INSTANCE, "group": dict.fromkeys(BATCH, nn.GroupNorm)}
# For each statistic, the module that keeps its output and the one that keeps its input.
OURS = {
    "batch": (InPlaceABN, BatchNormAct),
    "instance": (InPlaceInstanceNormAct, InstanceNormAct),
    "group": (InPlaceGroupNormAct, GroupNormAct),
}
SHAPES = [(1, (3, 4, 7)), (2, (2, 4, 5, 3)), (3, (2, 4, 3, 2, 2))]
# Without positions, where a batch or a group alone has statistics.
VECTORS = [(1, (5, 4))]
OPTIONS = [
    ("batch", {}),
    ("batch", {"affine": False}),
    ("batch", {"track_running_stats": False}),
    ("batch", {"momentum": None}),
    ("batch", {"momentum": 0.3, "eps": 1e-2}),
    ("instance", {}),
    ("instance", {"affine": True}),
    ("instance", {"track_running_stats": True}),
    ("instance", {"affine": True, "track_running_stats": True, "momentum": None}),
    ("group", {}),
    ("group", {"affine": False}),
    ("group", {"eps": 1e-2}),
]
by_place = pytest.mark.parametrize("place", [0, 1], ids=["output", "input"])
by_kind = pytest.mark.parametrize("kind", OURS)


def fill(norm):
    """Gives a stock norm other statistics and parameters than at first, among them a tiny weight and one of zero."""
    with torch.no_grad():
        for t in (*norm.parameters(), *norm.buffers()):
            if t.is_floating_point():
                t.uniform_(0.5, 1.5)
        if norm.weight is not None:
            norm.weight.copy_(torch.tensor([1.0, -0.5, 1e-9, 0.0, 2.0, 0.3])[: len(norm.weight)])


def pair(kind, place=0, dims=2, dtype=torch.float64, **options):
    """Makes a stock norm of 4 channels, and our module with the same state; the activation is leaky_relu."""
    groups = (2,) if kind == "group" else ()
    stock = STOCK[kind][dims](*groups, 4, dtype=dtype, **options)
    ours = OURS[kind][place](*groups, 4, dtype=dtype, **options)
    fill(stock)
    ours.load_state_dict(stock.state_dict(), strict=True)
    assert list(ours.state_dict()) == list(stock.state_dict())
    return stock, ours


def assert_same_step(stock, ours, x, residual=None):
    results = []
    for module in (stock, ours):
        leaves = [t.clone().requires_grad_() for t in (x, residual) if t is not None]
        if module is ours:
            # A module that keeps its output overwrites its input.
            z = module(leaves[0] * 1, *leaves[1:])
        else:
            y = module(leaves[0] * 1)
            z = nn.functional.leaky_relu(y if residual is None else y + leaves[1], 0.01)
        wanted = [t for t in (*leaves, *module.parameters()) if t.requires_grad]
        results.append((z, torch.autograd.grad(z.square().sum(), wanted)))
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(ours.state_dict(), stock.state_dict())


# Triton gets the options once, of images; ``tests/ops/test_norms.py`` has random norms on each backend.
@by_place
@pytest.mark.parametrize(
    ("backend", "kind", "options"),
    [*(("aten", *of) for of in OPTIONS), *(("triton", *of) for of in OPTIONS if {"eps", "momentum"} & of[1].keys())],
    ids=str,
    indirect=["backend"],
)
def test_training_and_eval_as_stock(backend, device, kind, options, place):
    """In one to three dimensions, in both memory formats, with and without a residual."""
    shapes = SHAPES + (VECTORS if kind != "instance" else [])
    for dims, shape in shapes if backend == "aten" else SHAPES[1:2]:
        stock, ours = (m.to(device) for m in pair(kind, place, dims, **options))
        for training in (True, True, False):
            stock.train(training)
            ours.train(training)
            x, r = torch.randn(2, *shape, dtype=torch.float64, device=device)
            x, r = (channels_last(x), channels_last(r)) if dims == 2 else (x, r)
            assert_same_step(stock, ours, x, r if training else None)


@pytest.mark.parametrize("shape", [(2, 4, 5, 3), (2, 4, 64, 130)], ids=["one launch", "two launches"])
@pytest.mark.parametrize("cls", [InPlaceABN, fusedseg.BatchNormAct])
def test_batches_are_counted(backend, device, cls, shape):
    """If a kernel moves the running statistics, it also counts the batches, and autograd sees the change."""
    module = cls(4, dtype=torch.float64).to(device)
    count, x = module.num_batches_tracked, torch.randn(shape, dtype=torch.float64, device=device)
    for n in (1, 2):
        version = count._version
        module(x.clone())
        assert count.item() == n
        assert count._version > version
    module.eval()(x.clone())
    assert module.num_batches_tracked is count
    assert count.item() == 2


def test_batches_that_no_kernel_can_count(backend, device):
    module = InPlaceABN(4, dtype=torch.float64).to(device)
    module.num_batches_tracked = torch.zeros((), dtype=torch.int32, device=device)
    module(torch.randn(2, 4, 5, 3, dtype=torch.float64, device=device))
    assert module.num_batches_tracked.item() == 1


def test_parametrized_weight(device):
    """A parametrized weight is no longer in ``_parameters``, which the module reads first."""

    class Doubled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    stock, ours = pair("batch")
    with torch.no_grad():
        stock.weight.mul_(2)
    nn.utils.parametrize.register_parametrization(ours, "weight", Doubled())
    x = torch.randn(2, 4, 5, 3, dtype=torch.float64)
    torch.testing.assert_close(ours(x.clone()), nn.functional.leaky_relu(stock(x), 0.01))


def test_frozen(backend, device):
    stock, ours = (module.to(device).requires_grad_(False) for module in pair("batch"))
    assert_same_step(stock, ours, torch.randn(2, 4, 5, 3, dtype=torch.float64, device=device))


def test_parameters_changed_between_calls_are_seen():
    module = InPlaceABN(3)
    x = torch.randn(2, 3, 4, 4)
    for change, count in (
        (lambda: nn.init.zeros_(module.weight), 3),
        (lambda: nn.init.ones_(module.weight), 0),
        (lambda: module.load_state_dict(module.state_dict() | {"weight": torch.tensor([1.0, 0.0, 1.0])}), 1),
        (lambda: setattr(module, "weight", nn.Parameter(torch.zeros(3))), 3),
    ):
        change()
        module(x.clone().requires_grad_() * 1)
        assert (module._kept.kept.count if module._kept.kept else 0) == count


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


class ResidualNet(nn.Module):
    """A convolution, then norm + residual + activation twice; weights of norms start at 0, as in many networks."""

    def __init__(self, kind, fused):
        super().__init__()
        self.stem, self.head = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 1, 1)
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(2))
        stock, ours = zip(*(pair(*kind, dtype=torch.float32, affine=True) for _ in range(2)), strict=True)
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


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (("batch",), torch.float32), (("batch", 1), torch.bfloat16), (("instance",), torch.bfloat16),
        (("group",), torch.float32),
    ],
    ids=str,
)  # fmt: skip
def test_five_steps_from_zero_weights(backend, device, kind, dtype):
    tolerance = 1e-3 if dtype == torch.float32 else 2e-2
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
    nets = [ResidualNet(("instance",), fused).to(device) for fused in (False, True)]
    for net in nets:
        for norm in net.norms:
            nn.init.ones_(norm.weight)
    stock, ours = (measure(net, x).saved for net in nets)
    tensor = 2 * 4 * 16 * 16 * 4
    # Kept are the input, the input of each convolution, and mean and 1 / sqrt(var + eps) of each channel of a sample.
    assert ours <= x.nbytes + 3 * tensor + 2 * 2 * 4 * 8
    assert stock >= x.nbytes + 5 * tensor


@by_kind
@pytest.mark.parametrize("slopes", [1, 4])
def test_prelu_learns_its_slope(kind, slopes):
    groups, prelu = (2,) if kind == "group" else (), nn.PReLU(slopes, 0.3)
    ours = OURS[kind][1](*groups, 4, affine=True, activation="prelu", activation_param=0.3, num_slopes=slopes)
    stock = nn.Sequential(STOCK[kind][2](*groups, 4, affine=True), prelu)
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


@pytest.mark.parametrize(
    ("cls", "stock"),
    [
        (InPlaceABN, nn.BatchNorm2d(4)),
        (InPlaceABNSync, nn.BatchNorm2d(4, affine=False)),
        (InPlaceInstanceNormAct, nn.InstanceNorm2d(4, affine=True, track_running_stats=True)),
        (InPlaceInstanceNormAct, nn.InstanceNorm2d(4)),
        (InPlaceGroupNormAct, nn.GroupNorm(2, 4)),
        (InPlaceGroupNormAct, nn.GroupNorm(2, 4, affine=False)),
        (BatchNormAct, nn.BatchNorm2d(4)),
        (InstanceNormAct, nn.InstanceNorm2d(4, affine=True)),
        (GroupNormAct, nn.GroupNorm(2, 4)),
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
    if not cls.__name__.startswith("InPlace"):
        prelu = nn.PReLU(4)
        learned = cls.from_norm(stock, "prelu", slope=prelu.weight)
        assert learned.slope is prelu.weight
        assert torch.equal(learned(x), prelu(stock(x)))


def test_from_norm_without_parameters_and_of_other_dimensions():
    ours = BatchNormAct.from_norm(nn.BatchNorm1d(3, affine=False, track_running_stats=False), "relu")
    assert list(ours.state_dict()) == []
    assert type(ours.to_norm(1)) is nn.BatchNorm1d
    assert type(InstanceNormAct(3).to_norm(3)) is nn.InstanceNorm3d
    assert BatchNormAct.from_norm(nn.BatchNorm3d(3)).num_batches_tracked == 0


@pytest.mark.parametrize("make", [InstanceNormAct, fusedseg.InPlaceInstanceNormAct])
def test_running_statistics_of_one_channel_move_once(make):
    """The running statistics moved twice for a batch of two samples, because every sample wrote to the same number."""
    x = torch.randn(2, 1, 6, 6)
    stock, ours = nn.InstanceNorm2d(1, track_running_stats=True), make(1, track_running_stats=True)
    stock(x.clone())
    ours(x.clone())
    torch.testing.assert_close(ours.running_mean, stock.running_mean)
    torch.testing.assert_close(ours.running_var, stock.running_var)


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
