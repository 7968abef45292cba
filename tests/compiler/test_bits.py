"""The option "bits": an exact forward, few kept bytes, and gradients that are right on average."""

import copy
import gc
import re
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fusedseg
from fusedseg import _torch
from fusedseg.compiler.settings import say_once
from fusedseg.ops.low_bit.spec import lines_of
from fusedseg.unet import UNet
from tests.compiler.networks import Attention, TwoBlocks, compiled, kept, make, needs_inductor
from tests.compiler.programs import Function, Net

# These networks judge the rounding, and are so small that some are exact without this; test_bits_peak.py has the bytes.
pytestmark = pytest.mark.usefixtures("packed")


IMAGE = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
MOST = 0.02


def spread(norm):
    """Weights and biases by which values pass all the places where an activation bends."""
    if norm.weight is not None:
        nn.init.uniform_(norm.weight, 1.0, 4.0)
        nn.init.uniform_(norm.bias, -1.0, 1.0)
    return norm


NORMS = {
    "batch": lambda: nn.BatchNorm2d(16),
    "instance": lambda: nn.InstanceNorm2d(16, affine=True),
    "group": lambda: nn.GroupNorm(4, 16),
    "ours, batch ReLU": lambda: fusedseg.BatchNormAct(16, activation="relu"),
}


class Error(NamedTuple):
    """The error of one rounding relative to the gradient, and bias² / error², whose noise is about .02."""

    size: float
    bias: float


def gradient(run, net, inputs):
    out = run(*inputs)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    grads = torch.autograd.grad((out * (weights + out)).mean(), [*net.parameters()])
    return out.detach(), torch.cat([g.flatten() for g in grads])


def error_of(net, inputs, bits, times, run=None, **options):
    """The error of one rounding relative to the gradient, and bias² / error²; forward is exact.

    ``run`` is the network if it is compiled already.
    """
    net, inputs = net.double(), [x.double() for x in inputs]
    out, expected = gradient(net, net, inputs)
    if run is None:
        run = compiled(net, bits=bits, **options)
    found = [gradient(run, net, inputs) for _ in range(times)]
    assert all(torch.allclose(of, out) if "codegen" in options else torch.equal(of, out) for of, _ in found)
    got = torch.stack([g for _, g in found])
    mean = got.mean(0)
    noise = (got - mean).square().sum() / (times - 1)
    squared = (got - expected).square().sum(1).mean()
    bias = (mean - expected).square().sum() - noise / times
    return Error((squared.sqrt() / expected.norm()).item(), (bias / squared).item())


def packed_bytes(t, bits):
    """The bytes of the codes of a dense tensor and of the two numbers of each group."""
    lines = lines_of(t, "")
    return lines.code_bytes(bits) + 2 * lines.I * lines.groups * lines.C * t.dtype.itemsize


def pooled():
    """A block of a residual encoder: the shortcut is an average, as in nnU-Net's."""

    def run(x, stem, body, shortcut, last):
        h = stem(x)
        return last(body(h) + shortcut(h))

    return Net(
        run,
        stem=nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.InstanceNorm2d(16, affine=True), nn.LeakyReLU()),
        body=nn.Sequential(nn.Conv2d(16, 16, 3, 2, 1), nn.InstanceNorm2d(16, affine=True)),
        shortcut=nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(16, 16, 1)),
        last=nn.Sequential(nn.LeakyReLU(), nn.Conv2d(16, 8, 3, padding=1)),
    )


def attention_and_block():
    return nn.Sequential(Attention(), nn.Conv2d(4, 32, 3), nn.GroupNorm(4, 32), nn.SiLU(), nn.Conv2d(32, 4, 3))


@pytest.mark.parametrize(("build", "most"), [(pooled, 0.2), (attention_and_block, 0.33)])
def test_a_gradient_passes_an_op_that_reads_exact_values(build, most):
    """The op is linear in the gradient, so that values behind it need not be exact; a pool reads the size alone."""
    torch.manual_seed(0)
    net, x = build(), torch.randn(2, 3, 40, 40)
    assert kept(net, compiled(net, bits=4), [x]) < most * kept(net, net, [x])
    torch._dynamo.reset()
    # The error needs fewer values than the bytes.
    found = error_of(net, [x[..., :24, :24].clone()], 4, 32)
    assert 0 < found.size < 0.1
    assert found.bias < MOST


def block(norm, act):
    """A norm and an activation between two convolutions."""
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), spread(norm), act, nn.Conv2d(16, 8, 3, padding=1))


def wide():
    """A ReLU of another dtype, as Inductor's graphs have it."""
    return Function(lambda x: x.double().relu().float())


@pytest.mark.parametrize("act", [nn.ReLU, nn.LeakyReLU, wide], ids=["ReLU", "LeakyReLU", "a ReLU behind a cast"])
@pytest.mark.parametrize("norm", ["batch", "instance", "group"])
def test_the_rounding_keeps_the_sign_before_an_activation(norm, act):
    """Group norm took a bit a value for it, and kept its output too."""
    net, x = block(NORMS[norm](), act()), torch.randn(2, 3, 32, 32)
    numbers = 5 * 2 * 16 * 4  # statistics and kinks of channels
    assert kept(net, compiled(net, bits=4), [x]) <= packed_bytes(net[0](x), 4) + numbers


def gradients_of_the_bias(net, x, autocast=False):
    """The gradient of the bias of a norm, in eager mode and with 4 bits."""
    found = []
    for run in (net, compiled(net, bits=4)):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = run(x)
        loss = (out.float() * torch.linspace(-1, 1, out.numel()).view_as(out)).sum()
        found += torch.autograd.grad(loss, net[1].bias)
    return found


@pytest.mark.parametrize("act", [nn.ReLU, wide])
def test_signs_after_a_group_norm_are_exact_under_autocast(act):
    """Its mean was rounded to bf16, and the error of 4 bits was 1.7 times what it had been."""
    torch.manual_seed(0)
    net, x = block(NORMS["group"](), act()), torch.randn(2, 3, 32, 32)
    assert torch.equal(*gradients_of_the_bias(net, x, autocast=True))


def test_signs_are_exact_where_samples_have_as_many_groups_as_there_are_channels():
    """Statistics of 4 samples of 4 groups were taken for those of 16 channels: signs of whole channels were wrong."""
    torch.manual_seed(0)
    net, x = block(NORMS["group"](), nn.ReLU()), torch.randn(4, 3, 32, 32)
    # Means of the groups lie far from those of the samples together.
    torch.testing.assert_close(*gradients_of_the_bias(net, x + torch.arange(4.0).view(4, 1, 1, 1) * 4))


def rows(h):
    return F.layer_norm(h, h.shape[-1:])


# What stands between two layers.
EXACT = {
    "a layer norm": rows,
    "behind few values": lambda h: rows((h - 1.5).relu()),
    "rows and columns": lambda h: rows(rows(h).mT),
    "an activation behind": lambda h: rows(h).sigmoid(),
    "a difference behind": lambda h: rows(h) - rows(h).mean(1, keepdim=True),
}


@pytest.mark.parametrize("name", EXACT)
def test_layer_norms_read_exact_rows(name):
    """Rows of few values had gradients that were wrong by a factor of a million."""
    net = nn.Sequential(nn.Linear(12, 64), Function(EXACT[name]), nn.Linear(64, 8))
    assert error_of(net, [torch.randn(2, 64, 12)], 4, 8).size < 1e-12


# What stands between two layers, and whether the norm in it reads packed values.
SEGMENTS = {
    "steady": (lambda h, norm: norm(h).relu(), True),
    "a product before": (lambda h, norm: norm(h * h.sigmoid()), False),
    "a quotient behind": (lambda h, norm: F.normalize(norm(h)), False),
}


@pytest.mark.parametrize("name", SEGMENTS)
def test_norms_read_packed_values_in_steady_segments(name):
    """Quotients made the gradient large in a few places, whose errors the norm spread."""
    piece, packed = SEGMENTS[name]
    layers = {"first": nn.Conv2d(3, 16, 1), "norm": nn.BatchNorm2d(16), "last": nn.Conv2d(16, 4, 1)}
    net, found = Net(lambda x, first, norm, last: last(piece(first(x), norm)), **layers).double(), []
    for run in (net, compiled(net, bits=4)):
        x = IMAGE.double()
        run(x).square().mean().backward()
        found.append(layers["first"].weight.grad.clone())
        net.zero_grad()
    assert torch.allclose(*found, rtol=1e-10, atol=0) != packed


# What stands between two layers, and reads the input x too.
PARTS = {
    # A factor from the input counted as a parameter.
    "divided by the size of the input": lambda h, x: F.leaky_relu(h, 0.1) / (x.abs().mean(1, keepdim=True) + 1e-4),
    # Views of packed values counted as these values.
    "cropped": lambda h, x: h[..., :16],
    "a part": lambda h, x: F.relu(h).chunk(2, -1)[0],
    # The columns of both halves alternate, and the pool takes every second one.
    "pooled": lambda h, x: F.max_pool2d(h.unflatten(-1, (2, 16)).mT.flatten(-2), (1, 1), (1, 2)),
}


@pytest.mark.parametrize("name", PARTS)
def test_what_leaves_the_small_values_of_a_group_is_exact(name):
    """Where half of each row is far larger, gradients were off by up to fourteen times their size."""
    x = IMAGE.clone()
    x[..., 16:] *= 1e4
    layers = {"first": nn.Conv2d(3, 16, 1, bias=False), "last": nn.Conv2d(16, 4, 1)}
    net = Net(lambda x, first, last: last(PARTS[name](first(x), x)), **layers)
    assert error_of(net, [x], 8, 2).size < 0.01


def test_the_search_for_exact_values_ends():
    """Each round wrote |x| anew for the norm, and found the new nodes to be exact values that no round had seen."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), Function(torch.abs), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1))
    assert error_of(net, [torch.randn(2, 3, 32, 32)], 8, 2).size < 0.1


POOLS = {
    "2x2": (2, nn.MaxPool2d(2), 2),
    "3x3, overlapping": (2, nn.MaxPool2d(3, 2, 1), 4),
    "2x2x2": (3, nn.MaxPool3d(2), 3),
    "dropout": (2, nn.Dropout(0.3), 1),
}


@pytest.mark.parametrize("name", POOLS)
def test_positions_and_masks_take_as_few_bits_as_number_them(name):
    """A pool kept a byte for each position."""
    dims, layer, bits = POOLS[name]
    conv = (nn.Conv2d, nn.Conv3d)[dims - 2]
    net = nn.Sequential(conv(1, 8, 3, padding=1), layer, conv(8, 2, 1))
    x = torch.randn(2, 1, *((64, 64) if dims == 2 else (32, 16, 16)))
    y = net[0](x)
    count = layer(y).numel()
    assert kept(net, compiled(net, bits=4), [x]) == packed_bytes(layer(y), 4) + count // 8 * bits
    if name != "dropout":
        torch._dynamo.reset()
        assert error_of(net, [x], 4, 32).bias < MOST


def test_changing_sizes():
    """Tensors of symbolic sizes stayed as they are."""
    net = block(NORMS["group"](), nn.ReLU())
    run = compiled(net, bits=4, dynamic=True)
    graphs = torch._dynamo.utils.counters["stats"]
    graphs.clear()
    for size in (32, 40):
        images = [torch.randn(2, 3, size, size)]
        assert kept(net, run, images) < 0.2 * kept(net, net, images)
        out, expected = gradient(net, net, images)
        got, found = gradient(run, net, images)
        torch.testing.assert_close(got, out)
        assert 0 < (found - expected).norm() < 0.3 * expected.norm()
    assert graphs["unique_graphs"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("bits", [None, 4])
def test_memory_of_many_steps_is_constant(bits):
    """With sizes that change, and some that the graph has not met.

    The fake tensors of graphs are not counted: a sum of their symbolic sizes made 25,000 objects in sympy's caches.
    """
    net, _ = make("U-Net")
    run = compiled(net, dynamic=True, bits=bits)

    def alive(steps):
        for step in steps:
            net.zero_grad()
            run(torch.randn(1 + step % 2, 3, 16 + 4 * (step % 7), 32)).square().mean().backward()
        gc.collect()
        tensors = [t for t in gc.get_objects() if isinstance(t, torch.Tensor) and not isinstance(t, _torch.FakeTensor)]
        return len(tensors), sum(t.untyped_storage().nbytes() for t in tensors), len(gc.get_objects())

    alive(range(28))
    first, last = alive(range(28)), alive(range(200 - 200 % 28 + 28))
    assert last[:2] == first[:2]
    # An object more in each step would be 196 more.
    assert last[2] < first[2] + 100


@needs_inductor
@pytest.mark.usefixtures("kernels_that_do_nothing")
def test_inductor_keeps_codes_of_half_precision():
    """The partitioner kept the convolutions: in 8 bits and a range for each group they are no smaller, as it counts.

    The compiler writes norms and LeakyReLU as simple ops.  Their means are those of many roundings, and what backward
    asks of LeakyReLU's result in 16 bits is the question of forward.
    """
    torch.manual_seed(0)
    block = [nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.LeakyReLU(0.01)]
    net, x = nn.Sequential(nn.Conv2d(3, 8, 3), *block, *copy.deepcopy(block)), torch.randn(2, 3, 40, 40)
    found = {}
    for codegen in ("aten", "inductor"):
        torch._dynamo.reset()
        with torch.autocast("cpu", torch.bfloat16):
            found[codegen] = kept(net, compiled(net, bits=8, codegen=codegen), [x])
    # Inductor's graph keeps the answer of each gate, of one bit; with aten the rounding keeps the sign.
    assert found["inductor"] < 1.25 * found["aten"]


@pytest.mark.parametrize(
    ("build", "size", "most"),
    [(lambda: UNet(3, 4, widths=(8, 16)), 32, 0.14), (lambda: make("ResNet")[0], 128, 0.16)],
    ids=["modules of this package", "a ResNet"],
)
def test_whole_networks_keep_few_bytes(build, size, most):
    """The norms of this package, and the concatenations of its convolutions, once kept exact values.

    ``test_small_networks`` has the errors of such norms and of residual blocks, ``test_programs.py`` that of every
    module, and ``test_budget.py`` nnU-Net's network.
    """
    net, inputs = build(), [torch.randn(2, 3, size, size)]
    assert kept(net, compiled(net, bits=4), inputs) < most * kept(net, net, inputs)


def test_a_checkpoint_of_products_is_told_of():
    """What a checkpoint rules keeps its values; the option is not ignored in silence."""
    net, x = nn.Conv2d(3, 8, 3), torch.randn(2, 3, 8, 8)
    say_once.cache_clear()
    with pytest.warns(UserWarning, match="inside of a checkpoint"):
        compiled(lambda x: checkpoint(net, x, use_reentrant=False).relu(), bits=4)(x).mean().backward()


def test_each_step_rounds_anew_and_a_second_backward_does_not():
    """PyTorch's generator is not moved."""
    net, x = block(NORMS["batch"](), nn.ReLU()), torch.randn(2, 3, 32, 32)
    run, before, found = compiled(net, bits=4), torch.get_rng_state(), []
    for _ in range(2):
        loss = run(x).square().mean()
        one, other = (torch.autograd.grad(loss, net[0].weight, retain_graph=True) for _ in range(2))
        assert torch.equal(*one, *other)
        found += one
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(*found)


@pytest.mark.parametrize("norm", ["batch", "instance", "group", "ours, batch ReLU", "running", "running, instance"])
def test_gates_after_a_norm_are_exact(norm):
    """The gradient of the bias is a sum of exact gates.  Network 651 of the hunt: an instance norm in eval mode has a
    kink for each channel of each sample."""
    running = {
        "running": lambda: nn.BatchNorm2d(16).eval(),
        "running, instance": lambda: nn.InstanceNorm2d(16, affine=True, track_running_stats=True).eval(),
    }
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 16, 1), spread((NORMS | running)[norm]()), nn.ReLU())
    found = []
    for run in (net, compiled(net, bits=4)):
        found += torch.autograd.grad(run(IMAGE).sum(), net[1].bias)
    assert torch.equal(*found)


def test_inputs_and_weights_stay_as_they_are():
    conv, weight, found = nn.Conv2d(3, 4, 3), torch.randn(64, 16, 3, 3, requires_grad=True), []
    x = torch.randn(1, 16, 8, 8, requires_grad=True)

    def step(image, x):
        return conv(image).sum() + nn.functional.conv2d(x, weight * 1).sum()

    for run in (step, compiled(step, bits=4)):
        found.append(torch.autograd.grad(run(IMAGE, x), [x, conv.weight]))
    assert all(map(torch.equal, *found))


def test_a_value_that_is_not_finite_reaches_the_gradient():
    conv, x = nn.Conv2d(8, 4, 3), torch.randn(2, 8, 32, 32, requires_grad=True)
    with torch.no_grad():
        x[0, 0, 0, 0] = torch.inf
    first = nn.Conv2d(8, 8, 1)
    nn.init.dirac_(first.weight)
    compiled(lambda x: conv(first(x)).nan_to_num(0.0, 0.0, 0.0).sum(), bits=4)(x).backward()
    assert not conv.weight.grad[:, 0].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_and_a_scaler(dtype):
    net = TwoBlocks(lambda: spread(nn.BatchNorm2d(4)), nn.ReLU())
    scaler, found = torch.amp.GradScaler("cpu", init_scale=4.0), []
    x = IMAGE.contiguous(memory_format=torch.channels_last)
    for run in (net, compiled(net, bits=8)):
        net.zero_grad()
        with torch.autocast("cpu", dtype):
            loss = run(x).float().square().mean()
        scaler.scale(loss).backward()
        found.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
    assert 0 < (found[1] - found[0]).norm() < 0.02 * found[0].norm()


def test_hooks_get_the_codes():
    """The codes can move to the host, as by ``save_on_cpu``."""
    net, sizes = make("U-Net")[0], []
    x = torch.randn(2, 3, 32, 32)
    run = compiled(net, bits=4)
    run(x)

    def away(t):
        sizes.append((t.dtype, t.nbytes))
        return t.clone()

    with torch.autograd.graph.saved_tensors_hooks(away, torch.clone):
        out = run(x)
    _, expected = gradient(net, net, [x])
    weights = torch.linspace(-1, 1, out.numel()).view_as(out)
    grads = torch.autograd.grad((out * (weights + out)).mean(), [*net.parameters()])
    assert (torch.cat([g.flatten() for g in grads]) - expected).norm() < 0.3 * expected.norm()
    owned = {p.nbytes for p in net.parameters()}
    assert max(nbytes for dtype, nbytes in sizes if dtype != torch.uint8 and nbytes not in owned) <= x.nbytes


def test_nodes_have_the_same_names_in_every_compilation(sources):
    """Ops of backward that have a branch were written in the order of a set, so that caches of code could miss."""
    activations = (nn.Softplus, nn.ELU, nn.Mish, nn.GELU) * 3
    layers = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), make_one()) for make_one in activations]
    net = nn.Sequential(nn.Conv2d(3, 4, 1), *layers).double()
    for twin in (net, copy.deepcopy(net)):
        torch.compiler.reset()
        gradient(compiled(twin, bits=4), twin, [IMAGE.double()])
    half = len(sources) // 2
    assert half
    assert sources[:half] == sources[half:]


@needs_inductor
def test_inductor_is_right_on_average(compiled_afresh):
    """Inductor lays 2D tensors out as channels_last, which the graph's strides do not say.

    Triton refused 211628568015 on a GPU.  Inductor had multiplied the first index of the second half of a group by a
    constant of the hash; its code for a CPU had the same number.
    """
    from torch._inductor.utils import run_and_get_code

    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 2, 1)).double()
    run = compiled(net, bits=4, codegen="inductor")
    _, codes = run_and_get_code(lambda: run(IMAGE.double()).mean().backward())
    integers = [int(digits) for code in codes for digits in re.findall(r"(?<![\w.])(\d+)[LlUu]*\b(?!\.)", code)]
    assert max(integers) < 2**31
    found = error_of(net, [IMAGE], 4, 64, run, codegen="inductor")
    assert 0 < found.size < 0.05
    assert found.bias < MOST


def plain(norm=nn.BatchNorm2d, act=nn.ReLU):
    """Three convolutions with 16,384 values each; the pool's output has 4,096."""
    norms = [norm(8), norm(8)]
    convs = [nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)]
    model = nn.Sequential(convs[0], norms[0], act(), convs[1], norms[1], act(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 1))
    for parameters in (each.parameters() for each in norms):
        for parameter, middle in zip(parameters, (1.0, 0.0), strict=False):
            nn.init.uniform_(parameter, middle - 0.5, middle + 0.5)
    return model


class Residual(nn.Module):
    """The activation follows a sum, which is rebuilt from rounded values."""

    def __init__(self, act, blocks=1):
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.act, self.blocks = nn.BatchNorm2d(8), act, blocks
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x):
        x = self.act(self.stem(x))
        for _ in range(self.blocks):
            # As in torchvision's ResNets.
            out = self.norm(self.conv(x))
            out += x
            x = self.act(out)
        return self.head(x)


# Each network, and the error that an earlier engine, the recompute scope, had with the same weights (64 or 256
# roundings).
NETWORKS = {
    "BatchNorm, ReLU": (plain, 0.0285),
    "GroupNorm, ReLU": (lambda: plain(lambda channels: nn.GroupNorm(2, channels)), 0.0157),
    "`InPlaceABN`, LeakyReLU": (lambda: plain(fusedseg.InPlaceABN, nn.Identity), 0.0290),
    "ReLU in place after three sums": (lambda: Residual(nn.ReLU(inplace=True), 3), 0.0192),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_small_networks(name):
    build, of_scope = NETWORKS[name]
    torch.manual_seed(0)
    found = error_of(build(), [IMAGE], 4, 64)
    assert 0 < found.size <= 1.1 * of_scope
    assert found.bias < MOST
