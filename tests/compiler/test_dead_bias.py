"""Biases of convolutions before norms of their own statistics: left out, with exact zeros as gradients."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fusedseg
from fusedseg.compiler.capture import dead_bias
from fusedseg.compiler.codegen import divided_norms as norms
from fusedseg.compiler.settings import Settings
from tests.compiler.networks import CODEGENS, close, compiled, in_both, results, same
from tests.compiler.test_passes import names, traced

aten = torch.ops.aten


@pytest.fixture
def counts(monkeypatch):
    """How many biases the pass has left out of each graph."""
    found, original = [], dead_bias.remove_dead_biases

    def counted(*args):
        found.append(original(*args))
        return found[-1]

    monkeypatch.setattr(dead_bias, "remove_dead_biases", counted)
    return found


@pytest.fixture
def codegen(request, monkeypatch):
    """aten, whose kernels the interpreter runs on a CPU, unless the test asks for Inductor."""
    name = getattr(request, "param", "aten")
    if name == "aten":
        request.getfixturevalue("needs_interpreter")
        monkeypatch.setattr(fusedseg, "backend", "triton")
    return name


BOTH = pytest.mark.parametrize("codegen", CODEGENS, indirect=True)


def shifted(net):
    """Biases and running statistics that are not zero, so that a bias that is lost changes something."""
    torch.manual_seed(0)
    for module in net.modules():
        if isinstance(getattr(module, "bias", None), nn.Parameter):
            nn.init.uniform_(module.bias, 1, 2)
        if isinstance(getattr(module, "running_mean", None), torch.Tensor):
            nn.init.uniform_(module.running_mean, 1, 2)
    return net, copy.deepcopy(net).double()


def block(dims, conv, norm, act=nn.ReLU):
    last = getattr(nn, f"Conv{dims}d")(4, 2, 1)
    return nn.Sequential(conv, norm, act(), last)


# The network, the shape of its input, and the place of the convolution's bias among the gradients.
DEAD = {
    "batch": lambda: (block(2, nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)), (2, 2, 9, 8)),
    "batch alone": lambda: (block(2, nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, track_running_stats=False)), (2, 2, 9, 8)),
    "instance": lambda: (block(2, nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4)), (2, 2, 9, 8)),
    "one sample": lambda: (block(2, nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, affine=True)), (1, 2, 9, 8)),
    "running instance": lambda: (
        block(2, nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, affine=True, track_running_stats=True)),
        (3, 2, 9, 8),
    ),
    "group of one": lambda: (block(2, nn.Conv2d(2, 4, 3), nn.GroupNorm(4, 4)), (2, 2, 9, 8)),
    "group of one, in place": lambda: (block(2, nn.Conv2d(2, 4, 3), fusedseg.InPlaceGroupNormAct(4, 4)), (2, 2, 9, 8)),
    "1d": lambda: (block(1, nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4)), (2, 2, 9)),
    "3d transposed": lambda: (block(3, nn.ConvTranspose3d(2, 4, 2, 2), nn.BatchNorm3d(4)), (2, 2, 3, 4, 3)),
    "gelu": lambda: (block(2, nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.GELU), (2, 2, 9, 8)),
}


@pytest.mark.parametrize(("name", "codegen"), in_both(DEAD, "batch", "3d transposed"), indirect=["codegen"])
def test_the_bias_has_no_effect(name, codegen, counts):
    """Outputs, gradients and running statistics of two steps are those of float64, and the gradient is exact zeros."""
    net, shape = DEAD[name]()
    net, twin = shifted(net)
    x = torch.randn(shape)
    found = results(net, compiled(net, codegen), [x])
    close(found, results(twin, twin, [x.double()]))
    assert counts == [1]
    of_bias = found[2]
    assert of_bias.shape == net[0].bias.shape
    assert of_bias.dtype == net[0].bias.dtype
    assert not of_bias.any()


class Kept(nn.Module):
    """Biases with an effect: a group norm of two channels, a frozen norm, an output that is read twice, no norm."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(2, 4, 3), *(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))])
        self.group, self.frozen, self.norm = nn.GroupNorm(2, 4), nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, x):
        x = F.relu(self.group(self.convs[0](x)))
        self.frozen.eval()
        x = F.relu(self.frozen(self.convs[1](x)))
        y = self.convs[2](x)
        return self.convs[3](F.relu(self.norm(y)) + y)


class OwnResidual(nn.Module):
    """A norm of this package whose residual is its input."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(2, 4, 3), fusedseg.InPlaceABN(4), nn.Conv2d(4, 2, 1)

    def forward(self, x):
        y = self.first(x)
        # Eager mode refuses one memory for both.
        return self.last(self.norm(y, y if torch.compiler.is_compiling() else y.clone()))


class Single(nn.Module):
    """An image without a batch: its convolution gives (C, L), whose channels are not those of the norm."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3), nn.BatchNorm1d(7)

    def forward(self, x):
        return F.relu(self.norm(self.conv(x)))


# The op alone read the convolution of ``OwnResidual``, as its input and as its residual, which lost the bias.
@pytest.mark.parametrize(
    ("make", "shape"), [(Kept, (2, 2, 9, 8)), (OwnResidual, (2, 2, 9, 8)), (Single, (2, 9, 8))], ids=str
)
def test_biases_with_an_effect_stay(make, shape, codegen, counts):
    net, twin = shifted(make())
    x = torch.randn(shape)
    close(results(net, compiled(net, codegen), [x]), results(twin, twin, [x.double()]))
    assert counts == [0]


class Shared(nn.Module):
    """One bias for two convolutions; with ``dead`` a norm stands after both of them."""

    def __init__(self, dead):
        super().__init__()
        self.first, self.second, self.dead = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3), dead
        self.second.bias = self.first.bias
        self.norms = nn.ModuleList([nn.BatchNorm2d(4), nn.BatchNorm2d(4)])

    def forward(self, x):
        y = self.second(F.relu(self.norms[0](self.first(x))))
        # The second norm has an effect in both cases.
        return F.gelu(self.norms[1](y)) if self.dead else self.norms[1](F.gelu(y))


@pytest.mark.parametrize("dead", [True, False])
def test_a_shared_bias(dead, codegen, counts):
    net, twin = shifted(Shared(dead))
    x = torch.randn(2, 2, 9, 8)
    found = results(net, compiled(net, codegen), [x])
    close(found, results(twin, twin, [x.double()]))
    assert counts == [2 if dead else 0]
    assert dead != bool(found[2].any())


def test_eval_mode(codegen, counts):
    """With running statistics the bias has an effect; a norm of a sample removes it in eval mode too."""
    for norm, count in ((nn.BatchNorm2d(4), 0), (nn.InstanceNorm2d(4, affine=True), 1)):
        net, twin = shifted(block(2, nn.Conv2d(2, 4, 3), norm).eval())
        x = torch.randn(2, 2, 9, 8)
        close(results(net, compiled(net, codegen), [x]), results(twin, twin, [x.double()]))
        with torch.no_grad():
            close([compiled(net, codegen)(x)], [twin(x.double())])
        assert set(counts) == {count}
        counts.clear()
        torch._dynamo.reset()


def test_a_frozen_bias_has_no_gradient(codegen, counts):
    net, twin = shifted(block(2, nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)))
    run, x = compiled(net, codegen), torch.randn(2, 2, 9, 8)
    for model in (net, twin):
        model[0].bias.requires_grad_(False)
    run(x).square().mean().backward()
    twin(x.double()).square().mean().backward()
    assert counts == [1]
    assert net[0].bias.grad is None
    close([net[0].weight.grad, net[1].running_mean], [twin[0].weight.grad, twin[1].running_mean])


@BOTH
def test_autocast(codegen, counts):
    """The bias is fp32 and its convolution is not; the running mean gets all bits of the bias."""
    net, twin = shifted(block(2, nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)))
    run, x = compiled(net, codegen), torch.randn(2, 2, 9, 8)
    with torch.autocast("cpu", torch.bfloat16):
        out = run(x)
    out.float().square().mean().backward()
    twin(x.double()).square().mean().backward()
    assert counts == [1]
    assert net[0].bias.grad.dtype == torch.float32
    assert not net[0].bias.grad.any()
    for found, wanted in ((net[0].weight.grad, twin[0].weight.grad), (net[1].running_mean, twin[1].running_mean)):
        torch.testing.assert_close(found.double(), wanted, rtol=2e-2, atol=2e-2)


@BOTH
@pytest.mark.parametrize("options", [{"budget": 0.4}, {"bits": 8}], ids=str)
def test_with_a_budget_and_with_bits(options, codegen, counts):
    torch.manual_seed(0)
    body = [nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.InstanceNorm2d(4), nn.LeakyReLU()]
    net, twin = shifted(nn.Sequential(*body, nn.Conv2d(4, 2, 1)))
    x = torch.randn(2, 2, 40, 40)
    found = results(net, compiled(net, codegen, **options), [x])
    assert counts == [2]
    for a, b in zip(found, results(twin, twin, [x.double()]), strict=True):
        assert (a - b).double().norm() <= 0.03 * b.double().norm() + 1e-3


@pytest.mark.parametrize("instance", [False, True], ids=["batch", "instance"])
def test_modules_of_this_package(instance, codegen, counts):
    """The op of an in-place norm returns the mean by which the module moves its own."""
    norm = fusedseg.InPlaceInstanceNormAct(4, affine=True) if instance else fusedseg.InPlaceABN(4)
    stock = nn.InstanceNorm2d(4, affine=True) if instance else nn.BatchNorm2d(4)
    net = nn.Sequential(nn.Conv2d(2, 4, 3), norm, nn.Conv2d(4, 2, 1))
    twin = nn.Sequential(copy.deepcopy(net[0]), nn.Sequential(stock, nn.LeakyReLU(0.01)), copy.deepcopy(net[2]))
    for model in (net, twin):
        torch.manual_seed(0)
        nn.init.uniform_(model[0].bias, 1, 2)
    x = torch.randn(2, 2, 9, 8)
    found = results(net, compiled(net, codegen), [x])
    close(found, results(twin.double(), twin, [x.double()]))
    assert counts == [1]
    assert not found[2].any()


@BOTH
def test_a_convolution_and_norm_in_one_module(codegen, counts):
    net = nn.Sequential(fusedseg.ConvABN2d(2, 4, 3), nn.Conv2d(4, 2, 1))
    stock = nn.Sequential(*copy.deepcopy(net[0]).to_modules(), copy.deepcopy(net[1])).double()
    x = torch.randn(2, 2, 9, 8)
    found = results(net, compiled(net, codegen), [x])
    close(found, results(stock, stock, [x.double()]))
    assert counts == [1]
    assert not found[2].any()


def test_the_code_of_aten_keeps_the_bits_of_a_cpu(counts):
    """Without Triton's kernels, outputs and gradients are eager mode's, its rounding errors around zero included."""
    net, _ = shifted(block(2, nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)))
    twin, x = copy.deepcopy(net), torch.randn(2, 2, 9, 8)
    assert same(results(net, compiled(net), [x]), results(twin, twin, [x]))
    assert counts == [0]


def written(forward):
    """The ops of a norm that writes its statistics, which gives each of three vectors the value that it has to have."""
    x, vectors = torch.randn(2, 4, 3, 3), [torch.rand(4) for _ in range(3)]
    wanted = [v.clone() for v in vectors]
    forward(x, *wanted)
    module = traced(forward, x, *vectors)
    norms.write_statistics(module.graph)
    module.recompile()
    module(x, *vectors)
    torch.testing.assert_close(vectors, wanted)
    return names(module.graph)


def test_running_means_are_written_in_place():
    """The bias is added after the norm has written the mean where it is."""

    def forward(x, mean, var, bias):
        out = aten._native_batch_norm_legit_functional(x, None, None, mean, var, True, 0.1, 1e-5)
        aten.copy_(mean, aten.add(out[3], bias, alpha=0.1))
        aten.copy_(var, out[4])
        return out[0]

    assert [name for name in written(forward) if name in ("copy_", "add", "add_")] == ["add_"]


def test_what_is_added_keeps_its_value():
    """What is added to a running mean is read before it gets its own next value."""

    def forward(x, mean, var, other):
        out = aten._native_batch_norm_legit_functional(x, None, None, mean, var, True, 0.1, 1e-5)
        added = aten.add(out[3], other)
        aten.copy_(other, out[1])
        aten.copy_(mean, added)
        return out[0]

    written(forward)


def test_one_rule_says_where_bits_may_change(monkeypatch, needs_interpreter):
    cpu = torch.device("cpu")
    assert Settings(codegen="inductor").may_round(cpu)
    assert not Settings(codegen="aten").may_round(cpu)
    monkeypatch.setattr(fusedseg, "backend", "triton")
    assert Settings(codegen="aten").may_round(cpu)


def test_an_empty_batch_moves_no_mean(codegen, counts):
    """The mean moved by the part of the bias, although there were no values."""
    net, twin = shifted(nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)))
    x = torch.randn(0, 2, 6, 6)
    found = compiled(net, codegen)(x)
    assert found.shape == twin(x.double()).shape
    torch.testing.assert_close([b.double() for b in net.buffers()], [b.double() for b in twin.buffers()])
    assert counts == [0]


def test_with_bits_the_gradient_is_zeros_and_outputs_keep_their_bits():
    """Rounded values gave it errors of the size of other gradients (programs 163 and 307 of the hunt for bits)."""
    torch.manual_seed(0)
    net, x = (
        nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 3)),
        torch.randn(2, 3, 32, 32),
    )
    expected = copy.deepcopy(net)(x)
    out = compiled(net, bits=4)(x)
    out.square().mean().backward()
    assert torch.equal(out, expected)
    assert not net[0].bias.grad.any()
    assert net[3].bias.grad.any()
