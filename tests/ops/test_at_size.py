"""The first call of each kind of kernel is compared with PyTorch's ops at its real size.

In the interpreter a CPU stands for a GPU.  ``draws.py`` has the random calls.
"""

import contextlib
import copy
import importlib
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fusedseg
from fusedseg import _backend, _torch
from fusedseg.activation import Activation
from fusedseg.functional import argmax_labels, max_pool, segmentation_sums, upsample
from fusedseg.ops import at_size, concat
from fusedseg.ops.low_bit import graph as low_bit
from fusedseg.ops.norm.call import Exchange, Norm, Operands, OutputGradient, Statistics
from fusedseg.ops.norm.passes import implementation_of
from tests.compiler.networks import compiled
from tests.ops import draws
from tests.ops.test_replay import direct as direct

pytestmark = pytest.mark.gpu


@pytest.fixture
def watched(monkeypatch, device):
    """As on a GPU with backend "auto": kernels serve CPU tensors, and their first calls are compared."""
    if device.type == "cpu":
        pytest.importorskip("triton")
        monkeypatch.setattr(_backend, "explain", lambda device: ("triton", ""))
        monkeypatch.setattr(_backend, "is_tested", lambda device: _backend.self_test_wanted())
        monkeypatch.setattr(_backend, "_first_use", None)
    monkeypatch.setattr(_backend, "_name", "auto")
    monkeypatch.setattr(_backend, "_reasons", {})
    at_size.forget()
    at_size.report.clear()
    yield at_size.report
    at_size.forget()


@pytest.fixture
def by_aten(monkeypatch):
    """A context in which PyTorch's ops serve all tensors."""

    @contextlib.contextmanager
    def serving():
        before = _backend.get()
        _backend.set("aten")
        yield
        _backend.set(before)

    return serving


class Net(nn.Module):
    """Norms of each kind, a residual, a pool, an enlarged map, and a bias before a concatenation."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
        self.down = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(16, 16, 3, padding=1), nn.InstanceNorm2d(16, affine=True))
        self.next = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU())
        self.up, self.last = nn.ConvTranspose2d(16, 16, 2, 2), nn.Conv2d(48, 4, 1)

    def forward(self, x):
        skip = self.first(x)
        down = self.next(F.leaky_relu(self.down(skip) + F.avg_pool2d(skip, 2), 0.01))
        return self.last(torch.cat([skip, self.up(down), F.interpolate(down, scale_factor=2.0, mode="bilinear")], 1))


def step(net, run, x):
    """The output, the gradients and the buffers after a step."""
    net.zero_grad()
    y = run(x)
    (y * y.detach().sign()).mean().backward()
    return [y.detach().clone(), *(p.grad.clone() for p in net.parameters()), *(b.clone() for b in net.buffers())]


def alike(found, wanted):
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-3, atol=2e-5)


def nets(device, fmt=torch.contiguous_format):
    torch.manual_seed(0)
    net = Net().to(device, memory_format=fmt)
    return net, copy.deepcopy(net), torch.randn(2, 3, 24, 24).to(device, memory_format=fmt)


# Kinds of a step: three norms forward, backward, and computed again in backward, the pool and the enlarged map.  In
# channels_last the concatenation, which adds a bias, is a kernel too.
KINDS = {torch.contiguous_format: 13, torch.channels_last: 14}


@pytest.mark.parametrize("fmt", KINDS)
def test_each_kind_is_compared_once(watched, compiled_afresh, fmt, device):
    net, twin, x = nets(device, fmt)
    run = compiled(net)
    found = [step(net, run, x)]
    assert watched == {"compared": KINDS[fmt]}
    found += [step(net, run, x) for _ in range(3)]
    assert watched == {"compared": KINDS[fmt]}
    for of in found:
        alike(of, step(twin, twin, x))


def several_ops(device):
    """Results of ops that a network of this size does not need."""
    generator = torch.Generator().manual_seed(1)
    x, rows = (torch.randn(2, 8, 24, 24, generator=generator).to(device).requires_grad_() for _ in range(2))
    rows = rows.to(memory_format=torch.channels_last)
    labels = torch.randint(8, (2, 24, 24), generator=generator).to(device)
    pooled, large = max_pool(x, 3, 2, 1), upsample(rows, scale_factor=2.0)
    sums = segmentation_sums(x, labels, likelihood="smoothed")
    loss = pooled.square().sum() + large.square().sum() + sums.overlap.sum() + sums.nll.sum()
    grads = torch.autograd.grad(loss, [x, rows])
    packed = low_bit.pack(x.detach(), None, 8, "", 5)
    unpacked = low_bit.unpack(packed, None, 8, "", x.shape, x.stride())
    bias = torch.ones(8, device=device)
    kink = low_bit.kink_of(x, bias, bias, bias, bias, False)
    joined = concat.concat([rows.detach(), rows.detach()], 1, [None, bias])
    # The sums of two processes with the same values.
    of_two = implementation_of(x).backward(
        OutputGradient(torch.ones_like(x.detach())), Operands(x.detach(), bias, bias), Statistics(bias, bias),
        Norm("input", Activation("silu", 0.0)), None, (True, True, True, False, False),
        Exchange(lambda s1, s2: (2 * s1, 2 * s2)),
    )  # fmt: skip
    results = [pooled, large, *grads, *of_two[:3], *sums, *(t.float() for t in packed), unpacked, kink, joined]
    return [t.detach().clone() for t in results] + [argmax_labels(x).float()]


# The launcher of each family's kernels: its module and name, the place of a result among its arguments, or None for the
# (first) thing that it returns, and the family.
LAUNCHERS = {
    "forward": ("norm_act", "norm_act_fwd", 1, "norm"),
    "recompute": ("norm_act", "norm_act_rebuild", 1, "norm"),
    "backward": ("norm_act_bwd", "norm_act_bwd", None, "norm"),
    "backward of several processes": ("norm_act_bwd", "norm_act_bwd_of_all_processes", None, "norm"),
    "pool": ("max_pool", "max_pool_fwd", 1, "pool"),
    "codes of a pool": ("max_pool", "max_pool_fwd", 2, "pool"),
    "gradient of a pool": ("max_pool", "max_pool_bwd", 2, "pool"),
    "upsampling": ("upsample", "upsample_fwd", 1, "upsample"),
    "gradient of upsampling": ("upsample", "upsample_bwd", 1, "upsample"),
    "concatenation": ("concat", "concat", 2, "concat"),
    "packing": ("low_bit", "low_bit_pack", None, "low_bit"),
    "unpacking": ("low_bit", "low_bit_unpack", 6, "low_bit"),
    "kinks": ("low_bit", "low_bit_kink", 4, "low_bit"),
    "sums": ("segmentation_sums", "segmentation_sums_fwd", None, "sums"),
    "gradient of sums": ("segmentation_sums", "segmentation_sums_bwd", 4, "sums"),
    "labels": ("segmentation_sums", "segmentation_argmax", 1, "sums"),
}


def falsify(monkeypatch, name):
    """One value of thousands is off by a hundredth of the largest one, behind a launcher."""
    file, function, place, _ = LAUNCHERS[name]
    module = importlib.import_module(f"fusedseg.kernels.{file}")
    launch = getattr(module, function)

    def wrong(*given, **options):
        result = launch(*given, **options)
        t = given[place] if place is not None else result if isinstance(result, torch.Tensor) else result[0]
        with _torch.no_dispatch_modes():
            t[tuple(n // 2 for n in t.shape)] += 5 if t.dtype == torch.uint8 else 0.01 * t.abs().max() + 1e-3
        return result

    monkeypatch.setattr(module, function, wrong)


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_wrong_kernel_is_replaced_in_the_call_that_finds_it(
    watched, by_aten, compiled_afresh, monkeypatch, name, device
):
    """Outputs, gradients and buffers are right all the same, and one warning tells."""
    family = LAUNCHERS[name][3]
    net, twin, x = nets(device, torch.channels_last)
    run = compiled(net) if name in ("forward", "recompute", "backward") else None

    def results():
        return several_ops(device) if run is None else step(net, run, x)

    with by_aten():
        wanted = several_ops(device) if run is None else step(twin, twin, x)
    falsify(monkeypatch, name)
    with pytest.warns(
        RuntimeWarning, match=f"its {family} kernels in float32 were wrong for a tensor .* report this"
    ) as said:
        alike(results(), wanted)
    # The interpreter computes by numpy, which warns of overflows.
    assert sum("fusedseg" in str(one.message) for one in said) == 1
    assert "were wrong" in _backend.why_not(x, family)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="fusedseg: its")
        alike(results(), wanted if run is None else step(twin, twin, x))


def test_a_wrong_number_of_batches_is_replaced(watched, monkeypatch, device):
    """A kernel of a module in eager mode counts the batch."""
    from fusedseg.kernels import norm_act

    launch = norm_act.norm_act_fwd

    def wrong(*given, batches, **options):
        found = launch(*given, batches=batches, **options)
        batches += 5
        return found

    monkeypatch.setattr(norm_act, "norm_act_fwd", wrong)
    norm = fusedseg.BatchNormAct(4).to(device)
    with pytest.warns(RuntimeWarning, match="1 values of batches are off by up to 5.0"):
        norm(torch.randn(2, 4, 6, 6, device=device))
    assert norm.num_batches_tracked == 1


def test_a_wrong_kernel_is_not_replayed(watched, direct, compiled_afresh, monkeypatch):
    """The call that finds it is the one whose launches would be noted."""
    monkeypatch.setattr(_backend, "_name", "auto")
    net, twin, x = nets(torch.device("cpu"))
    run = compiled(net)
    falsify(monkeypatch, "forward")
    with pytest.warns(RuntimeWarning, match="its norm kernels"):
        step(net, run, x)
    step(twin, twin, x)
    for _ in range(4):
        alike(step(net, run, x), step(twin, twin, x))


def test_with_backend_triton_a_wrong_result_raises(watched, monkeypatch, device):
    monkeypatch.setattr(_backend, "_name", "triton")
    falsify(monkeypatch, "pool")
    with (
        pytest.warns(RuntimeWarning, match="its pool kernels"),
        pytest.raises(RuntimeError, match=r"backend is 'triton', but .* were wrong"),
    ):
        max_pool(torch.randn(2, 4, 12, 12, device=device), 2)


def test_gradients_that_overflow_say_nothing(watched, device):
    """As the first ones of a scaled loss; finite ones that come later are compared."""
    x = torch.randn(2, 4, 6, 6, device=device, requires_grad=True)
    norm = fusedseg.BatchNormAct(4).to(device)
    (norm(x) * torch.inf).sum().backward()
    assert watched == {"compared": 1, "not finite": 1}
    norm(x).square().sum().backward()
    assert watched == {"compared": 2, "not finite": 1}
    for _ in range(at_size.MOST_TRIES + 2):
        upsample(x.detach() * torch.inf, scale_factor=2.0)
    assert watched["not finite"] == 1 + at_size.MOST_TRIES


@pytest.mark.parametrize("why", ["captured", "no room", "off"])
def test_nothing_is_compared(watched, monkeypatch, why, device):
    """While a graph is captured, where memory is short, and with FUSEDSEG_SELF_TEST=0."""
    if why == "off":
        monkeypatch.setenv("FUSEDSEG_SELF_TEST", "0")
    name, value = {"captured": ("_is_captured", True), "no room": ("_has_room", False), "off": ("PART", 1)}[why]
    x = torch.randn(2, 4, 12, 12, device=device)
    with monkeypatch.context() as patch:
        patch.setattr(at_size, name, value if why == "off" else lambda x: value)
        max_pool(x, 2)
    assert not watched["compared"]
    max_pool(x, 2)
    assert watched["compared"] == (why != "off")


def test_an_error_of_the_comparison_ends_no_step(watched, monkeypatch, device):
    monkeypatch.setattr(at_size, "_judged", lambda *call: 1 / 0)
    x = torch.randn(2, 4, 12, 12, device=device)
    with pytest.warns(RuntimeWarning, match="its pool kernels could not be compared .*ZeroDivisionError"):
        assert torch.equal(max_pool(x, 2), F.max_pool2d(x, 2))
    assert watched == {"failed": 1}


def test_new_sizes_are_not_compared_for_ever(watched, monkeypatch, device):
    monkeypatch.setattr(at_size, "MOST_KINDS", 3)
    for n in range(6):
        max_pool(torch.randn(1, 1, 2, 2 + n, device=device), 2)
    assert watched["compared"] == 3


# On a GPU each draw would compile kernels of its own; there every test of the suite fails if a comparison does.
@pytest.mark.usefixtures("only_in_the_interpreter")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", draws.FAMILIES)
def test_right_kernels_raise_no_alarm(watched, family, seed, device):
    """Values from denormal to large, far from 0, constant and infinite, in all dtypes and formats."""
    draw = draws.Draw(100 * seed, device)
    with warnings.catch_warnings():
        # The interpreter computes by numpy, which warns of overflows.
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message="fusedseg: its")
        for _ in range(draws.COUNTS[family]):
            at_size.forget()
            draws.FAMILIES[family](draw)
    assert watched["compared"] >= draws.COUNTS[family] // 2
