"""The recompute scope with ``bits``: the gradient is right on average, and what stays as it is."""

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fusedseg
from fusedseg import recompute
from fusedseg.memory import SavedBytes
from fusedseg.unet import UNet
from tests.ops.low_bit_cases import IMAGE, error_of, gradient


def network(norm=nn.BatchNorm2d, act=nn.ReLU):
    """Three convolutions with 16,384 values each; the pool's output has 4,096."""
    torch.manual_seed(0)
    layers, channels = [], 3
    for _ in range(2):
        layers += [nn.Conv2d(channels, 8, 3, padding=1), norm(8), act()]
        channels = 8
    model = nn.Sequential(*layers, nn.MaxPool2d(2), nn.Conv2d(8, 4, 1))
    for module in model:
        if isinstance(module, (nn.BatchNorm2d, nn.GroupNorm, nn.InstanceNorm2d, fusedseg.InPlaceABN)):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)
    return model


class Residual(nn.Module):
    """ReLU follows a sum, which is rebuilt from rounded values."""

    def __init__(self, act=F.relu):
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.head, self.act = nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1), act

    def forward(self, x):
        x = self.act(self.stem(x))
        return self.head(self.act(x + self.norm(self.conv(x))))


class InPlaceResidual(Residual):
    """As the blocks of torchvision's ResNets: the sum and the ReLU overwrite their arguments."""

    def forward(self, x):
        for _ in range(3):
            x = x if x.shape[1] == 8 else self.act(self.stem(x))
            out = self.norm(self.conv(x))
            out += x
            x = self.act(out)
        return self.head(x)


def error(got, expected):
    return ((got - expected).norm() / expected.norm()).item()


# 8 bits: a step is 1 / 127 of half a range; 4 bits: 1 / 7 of it.
@pytest.mark.parametrize(("bits", "most"), [(8, 0.01), (4, 0.15)])
def test_forward_is_exact_and_the_gradient_is_near(bits, most):
    model = network()
    (out, expected), (rounded_out, got) = gradient(model), gradient(model, bits=bits)
    assert torch.equal(rounded_out, out)
    assert 0 < error(got, expected) < most


def group(channels):
    return nn.GroupNorm(2, channels)


def instance(channels):
    return nn.InstanceNorm2d(channels, affine=True)


class InPlace(fusedseg.InPlaceABN):
    def __init__(self, channels):
        super().__init__(channels, activation="leaky_relu", activation_param=0.01)


NETWORKS = {
    "BN ReLU": lambda: network(),
    "BN ReLU in place": lambda: network(act=lambda: nn.ReLU(inplace=True)),
    "IN LeakyReLU": lambda: network(instance, nn.LeakyReLU),
    "GN ReLU": lambda: network(group),
    "BN SiLU": lambda: network(act=nn.SiLU),
    "BN ReLU6": lambda: network(act=nn.ReLU6),
    "dropout between": lambda: network(lambda c: nn.Sequential(nn.BatchNorm2d(c), nn.Dropout(0.0))),
    "no norm": lambda: network(lambda c: nn.Identity()),
    "in place": lambda: network(InPlace, nn.Identity),
    "residual": Residual,
    "residual LeakyReLU": lambda: Residual(F.leaky_relu),
    "residual PReLU": lambda: Residual(nn.PReLU()),
    "residual in place": lambda: InPlaceResidual(nn.ReLU(inplace=True)),
    "residual LeakyReLU in place": lambda: InPlaceResidual(nn.LeakyReLU(inplace=True)),
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("converted", [False, True], ids=["stock", "converted"])
def test_the_gradient_is_right_on_average(name, converted):
    """The bias² is at most a twentieth of the error²: within noise of 0 for 32 roundings.

    Wrong signs of activations, maxima of rounded values, or smooth functions of 4 bits make it .2 to .5.
    """
    found = error_of(NETWORKS[name](), IMAGE, bits=4, converted=converted)
    print(f"\n{name}, {'converted' if converted else 'stock'}: error {found.size:.4f}, bias² / error² {found.bias:.4f}")
    assert found.size > 0
    assert found.bias < 0.05


@pytest.mark.parametrize("kernel", [2, 3, 5, (1, 3)], ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
def test_codes_of_pools_take_few_bits(kernel, channels_last):
    positions = kernel**2 if isinstance(kernel, int) else 3
    x, bits = torch.randn(2, 8, 33, 31), 2 if positions <= 4 else 4 if positions <= 16 else 8
    x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
    x.requires_grad_()
    with SavedBytes() as saved, recompute(bits=4):
        z = F.max_pool2d(x, kernel)
    assert saved.nbytes == -(-z.numel() * bits // 8)
    dz = torch.randn_like(z)
    expected = torch.autograd.grad(F.max_pool2d(x, kernel), x, dz)[0]
    assert torch.equal(torch.autograd.grad(z, x, dz)[0], expected)


@pytest.mark.parametrize("bits", [8, 4])
def test_signs_are_exact(bits):
    """The gradient of a ReLU's input is 0 or not, as without the scope."""
    norm, x = nn.BatchNorm2d(8), torch.randn(4, 8, 32, 32, requires_grad=True)
    nn.init.uniform_(norm.bias, -1, 1)
    found = []
    for scope in (nullcontext(), recompute(bits=bits)):
        with scope:
            y = norm(x * 1)
            y.retain_grad()
            F.relu(y).sum().backward()
        found.append(y.grad != 0)
    assert torch.equal(*found)


def test_seeds():
    model = network()
    before = torch.get_rng_state()
    first, same, other = (gradient(model, bits=4, seed=seed)[1] for seed in (1, 1, 2))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert not torch.equal(gradient(model, bits=4)[1], gradient(model, bits=4)[1])
    assert torch.equal(torch.get_rng_state(), before)


def test_each_step_rounds_anew():
    model, scope = network(), recompute(bits=4, seed=0)
    steps = []
    for _ in range(2):
        with scope:
            out = model(IMAGE)
        steps.append(torch.autograd.grad(out.square().mean(), model[0].weight)[0])
    assert not torch.equal(*steps)


def test_ranks_round_differently(monkeypatch):
    model, found = network(), []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for rank in range(2):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        found.append(gradient(model, bits=4, seed=0)[1])
    assert not torch.equal(*found)


def test_a_second_backward_sees_the_same_values():
    model = network()
    with recompute(bits=4):
        loss = model(IMAGE).square().mean()
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(model.parameters()))
    assert all(map(torch.equal, first, second))


def counted(run):
    """What a scope with 4 bits makes, and the bytes that are kept."""
    with SavedBytes() as saved, recompute(bits=4):
        out = run()
    return out, saved.nbytes


def test_two_consumers_pack_once():
    x = torch.randn(2, 8, 32, 32, requires_grad=True)
    weights = [torch.randn(8, 8, 1, 1) for _ in range(2)]
    with SavedBytes(owned=weights) as saved, recompute(bits=4):
        y = x * 2
        outs = [F.conv2d(y, w.requires_grad_()) for w in weights]
    # 16,384 values in half a byte, and 2 fp32 numbers for each 256 of them.
    assert saved.nbytes == 2**14 // 2 + 2**14 // 256 * 8
    del outs


def test_a_change_after_saving_does_no_harm():
    x, w = torch.randn(2, 8, 32, 32, requires_grad=True), torch.randn(4, 8, 1, 1, requires_grad=True)
    found = []
    for changes in (False, True):
        with recompute(bits=8, seed=0):
            y = x * 2
            loss = F.conv2d(y, w).sum()
            if changes:
                y.detach().zero_()
        if changes:
            y.detach().fill_(3.0)
        found.append(torch.autograd.grad(loss, w)[0])
    assert torch.equal(*found)


def kept_by(function, *shape):
    """The bytes that ``function`` of a computed tensor keeps, as a share of that tensor."""
    x = torch.randn(*shape, requires_grad=True)
    out, nbytes = counted(lambda: function(x * 1))
    del out
    return nbytes / (x.numel() * 4)


# 4 bits and two fp32 numbers for 256 values.
PACKED = 4 / 32 + 2 / 256


@pytest.mark.parametrize(
    ("function", "shape", "share"),
    [
        (lambda x: F.conv2d(x, torch.ones(1, 8, 1, 1, requires_grad=True)), (2, 8, 32, 32), PACKED),
        # The scope does not know these functions.
        (lambda x: F.log_softmax(x, 1), (2, 8, 32, 32), 1),
        (torch.exp, (2, 8, 32, 32), 1),
        # The rebuilt output of a norm would be read by a function that is not known.
        (lambda x: torch.exp(F.batch_norm(x, None, None, training=True)), (2, 8, 32, 32), PACKED + 1),
        # Small, and a vector.
        (lambda x: F.conv2d(x, torch.ones(1, 8, 1, 1, requires_grad=True)), (1, 8, 16, 31), 1),
        (lambda x: x.mul(x), (2**14,), 1),
        # Smooth functions keep 8 bits.
        (F.silu, (2, 8, 32, 32), 8 / 32 + 2 / 256),
    ],
    ids=["convolution", "log_softmax", "exp", "exp of a norm", "small", "vector", "silu"],
)
def test_what_is_packed(function, shape, share):
    small = 2 * 8 * 4 * 4
    assert kept_by(function, *shape) == pytest.approx(share, abs=small / (4 * torch.Size(shape).numel()))


def test_the_input_stays_as_it_is():
    conv, found = nn.Conv2d(3, 4, 3), []
    for scope in (nullcontext(), recompute(bits=4)):
        with scope:
            loss = conv(IMAGE).square().sum()
        found += torch.autograd.grad(loss, conv.weight)
    assert torch.equal(*found)


def test_a_computed_weight_stays_as_it_is():
    w, x = torch.randn(64, 16, 3, 3, requires_grad=True), torch.randn(1, 16, 8, 8, requires_grad=True)
    found = []
    for scope in (nullcontext(), recompute(bits=4)):
        with scope:
            loss = F.conv2d(x, w * 1).square().sum()
        found.append(torch.autograd.grad(loss, x)[0])
    assert torch.equal(*found)


def test_modules_that_stay_unrounded():
    model = network()
    _, expected = gradient(model)
    assert torch.equal(gradient(model, bits=4, unrounded=[model])[1], expected)
    first = model[0].weight.numel()
    assert not torch.equal(gradient(model, bits=4, unrounded=[model[3]])[1][:first], expected[:first])


def test_names_that_stay_unrounded():
    model = network()
    sizes = []
    for names in ((), "0", ("[01]", "3"), "*"):
        report = fusedseg.convert(copy.deepcopy(model), example_inputs=IMAGE, bits=4, unrounded=names)
        sizes.append(report.after.saved)
    assert sizes[0] < sizes[2] < sizes[3]
    # The codes of the pool are exact in fewer bits: 2 of 8, for 4,096 positions.
    assert sizes[3] == fusedseg.convert(copy.deepcopy(model), example_inputs=IMAGE).after.saved - 4096 * 6 // 8
    with pytest.raises(ValueError, match="unrounded 'stem' matches no module; the model's modules are 0, 1, 2"):
        fusedseg.convert(model, bits=4, unrounded="stem")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_and_a_scaler(dtype):
    model = network()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    found = []
    for scope in (nullcontext(), recompute(bits=8)):
        model.zero_grad()
        with torch.autocast("cpu", dtype), scope:
            loss = model(IMAGE.contiguous(memory_format=torch.channels_last)).float().square().mean()
        scaler.scale(loss).backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert 0 < error(found[1], found[0]) < 0.02


@pytest.mark.parametrize("around", [True, False], ids=["around", "inside"])
def test_checkpoints_keep_all_as_it_is(around):
    model = network()
    _, expected = gradient(model)
    if around:
        inner = recompute(bits=4)(model)
        out = checkpoint(inner, IMAGE, use_reentrant=False)
    else:
        with recompute(bits=4):
            out = checkpoint(model, IMAGE, use_reentrant=False)
    weights = torch.linspace(-1, 1, out.numel()).view_as(out)
    grads = torch.autograd.grad((out * (weights + out)).mean(), list(model.parameters()))
    assert torch.equal(torch.cat([g.flatten() for g in grads]), expected)


@pytest.mark.parametrize("name", ["BN ReLU", "residual in place"])
def test_hooks_around_the_scope_get_the_codes(name):
    model = NETWORKS[name]()
    expected = gradient(model, bits=4, seed=0)[1]
    sizes = []

    def away(t):
        sizes.append((t.dtype, t.nbytes))
        return t.clone()

    with torch.autograd.graph.saved_tensors_hooks(away, torch.clone):
        out, got = gradient(model, bits=4, seed=0)
    assert torch.equal(got, expected)
    # The loss keeps the output as it is.
    assert max(nbytes for dtype, nbytes in sizes if dtype != torch.uint8) == max(IMAGE.nbytes, out.nbytes)


def test_converted():
    torch.manual_seed(0)
    model = UNet(3, 4, widths=(4, 8), plain=True)
    stock, x = copy.deepcopy(model), torch.randn(2, 3, 64, 64)
    report = fusedseg.convert(model, example_inputs=x, bits=4)
    assert "kept in 4 bits" in str(report)
    assert '"bits": 4' in report.to_json()
    assert report.after.saved < 0.2 * report.before.saved
    (out, expected), (rounded_out, got) = gradient(stock, x), gradient(model, x)
    assert torch.allclose(rounded_out, out, atol=1e-5)
    assert 1e-3 < error(got, expected) < 0.15
    # Copies go on from the same step.
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    grads = [gradient(each, x)[1] for each in (model, *copies)]
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[2])
    assert not torch.equal(grads[0], gradient(model, x)[1])
    stock.load_state_dict(model.state_dict())
    model.eval()
    stock.eval()
    assert error(gradient(model, x)[1], gradient(stock, x)[1]) < 1e-5
    with torch.no_grad():
        assert not model(x).requires_grad


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"bits": 2}, ValueError, "bits must be 8, 4 or None, got 2"),
        ({"bits": "4"}, TypeError, "bits must be 8, 4 or None, got str"),
        ({"bits": True}, TypeError, "bits must be 8, 4 or None, got bool"),
        ({"bits": 4, "seed": 0.5}, TypeError, "seed must be an integer or None, got float"),
        ({"seed": 1}, ValueError, "seed is given without bits"),
        ({"bits": 4, "unrounded": (3,)}, TypeError, "unrounded must be .*modules, got int"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_refused(arguments, kind, text):
    for call in (recompute, lambda **given: fusedseg.convert(nn.Conv2d(3, 4, 3), **given)):
        with pytest.raises(kind, match=text):
            call(**arguments)


def test_instance_norm_with_running_statistics_has_a_kink_for_each_channel_of_each_sample():
    """Network 651 of the hunt: "kink must have shape".  The gradient of the bias is the sum of exact gates."""
    norm = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
    net = nn.Sequential(nn.Conv2d(3, 4, 1), norm.eval(), nn.ReLU())
    nn.init.normal_(norm.bias)
    x = torch.randn(2, 3, 32, 32)
    net(x).sum().backward()
    expected, norm.bias.grad = norm.bias.grad, None
    with recompute(bits=4):
        out = net(x)
    out.sum().backward()
    assert torch.equal(norm.bias.grad, expected)
