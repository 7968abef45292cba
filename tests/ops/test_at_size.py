"""The first call of each kind of kernel is compared with PyTorch's ops at its real size.

In the interpreter a CPU stands for a GPU.  ``draws.py`` has the random calls.
"""

import contextlib
import copy
import importlib
import itertools
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
from fusedseg.ops.norm import sync
from fusedseg.ops.norm.call import BackwardCall, Exchange, Norm, Operands
from fusedseg.ops.norm.dispatch import implementation_of
from fusedseg.ops.segmentation import launches
from tests.compiler.networks import compiled
from tests.ops import draws
from tests.ops.test_replay import direct as direct
from tests.tools.spy import spied

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
    return net, copy.deepcopy(net), torch.randn(2, 3, 16, 16).to(device, memory_format=fmt)


# Kinds of a step: three norms forward, backward, and computed again in backward, the pool, the enlarged map, and the
# concatenation, which adds a bias.
KINDS = 14


def test_each_kind_is_compared_once(watched, compiled_afresh, device):
    net, twin, x = nets(device, torch.channels_last)
    run = compiled(net)
    found = [step(net, run, x)]
    assert watched == {"compared": KINDS}
    found.append(step(net, run, x))
    assert watched == {"compared": KINDS}
    for of in found:
        alike(of, step(twin, twin, x))


def of_norms(x, rows, labels):
    """The passes, an output computed again, statistics, and the sums of two processes with the same values."""
    ones = torch.ones(8, device=x.device)
    norm, needs = Norm("input", Activation("silu", 0.0)), (True, True, True, False, False)
    given, twice = Operands(x.detach(), ones, ones), Exchange(lambda s1, s2: (2 * s1, 2 * s2))
    z, stats = implementation_of(x).forward(given, norm, None, None)
    found = [z, implementation_of(x).recompute(given, stats, norm, None)]
    for dz, exchange in ((given.x, None), (torch.ones_like(given.x), twice)):
        call = BackwardCall(dz, given, stats, norm, None, needs, exchange=exchange)
        of_x = implementation_of(x).backward(call)
        found += of_x[:3]
    return [*found, *sync.merge(implementation_of(x).moments(given.x).double())]


def of_pools(x, rows, labels):
    pooled = max_pool(x, 3, 2, 1)
    return [pooled, *torch.autograd.grad(pooled.square().sum(), x)]


def of_upsampling(x, rows, labels):
    large = upsample(rows, scale_factor=2.0)
    return [large, *torch.autograd.grad(large.square().sum(), rows)]


def of_concatenations(x, rows, labels):
    return [concat.concat([rows.detach(), rows.detach()], 1, [None, torch.ones(8, device=x.device)])]


def of_packing(x, rows, labels):
    packed, ones = low_bit.pack(x.detach(), None, 8, "", 5), torch.ones(8, device=x.device)
    unpacked = low_bit.unpack(packed, None, 8, "", x.shape, x.stride())
    return [*(t.float() for t in packed), unpacked, low_bit.kink_of(x, ones, ones, ones, ones, False)]


def of_sums(x, rows, labels):
    sums = segmentation_sums(x, labels, likelihood="smoothed")
    return [*sums, *torch.autograd.grad(sums.overlap.sum() + sums.nll.sum(), x), argmax_labels(x).float()]


OPS = {
    "norm": of_norms, "pool": of_pools, "upsample": of_upsampling, "concat": of_concatenations, "low_bit": of_packing,
    "sums": of_sums,
}  # fmt: skip


def results_of(family, device, dtype=torch.float32):
    """Results of all ops of a family."""
    generator = torch.Generator().manual_seed(1)
    x, rows = (torch.randn(2, 8, 12, 12, generator=generator).to(device, dtype) for _ in range(2))
    rows, labels = rows.to(memory_format=torch.channels_last), torch.randint(8, (2, 12, 12), generator=generator)
    return [t.detach().clone() for t in OPS[family](x.requires_grad_(), rows.requires_grad_(), labels.to(device))]


# The launcher of each family's kernels: its module and name, the place of a result among its arguments, or None for the
# (first) thing that it returns, and the family.
LAUNCHERS = {
    "forward": ("norm_act", "norm_act_fwd", 1, "norm"),
    "recompute": ("norm_act", "norm_act_rebuild", 1, "norm"),
    "backward": ("norm_act_bwd", "norm_act_bwd", None, "norm"),
    "backward of several processes": ("norm_act_bwd", "norm_act_bwd_of_all_processes", None, "norm"),
    "moments": ("norm_stats", "norm_stats", None, "norm"),
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


HALF = (torch.float16, torch.bfloat16)


def falsify(monkeypatch, name):
    """One value of thousands is off by a hundredth of the largest one, behind a launcher."""
    file, function, place, _ = LAUNCHERS[name]

    def change(result, *given, **options):
        t = given[place] if place is not None else result if isinstance(result, torch.Tensor) else result[0]
        with _torch.no_dispatch_modes():
            t[tuple(n // 2 for n in t.shape)] += 5 if t.dtype == torch.uint8 else 0.01 * t.abs().max() + 1e-3

    spied(monkeypatch, importlib.import_module(f"fusedseg.kernels.{file}"), function, change)


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_wrong_kernel_is_replaced_in_the_call_that_finds_it(
    watched, by_aten, compiled_afresh, monkeypatch, name, device
):
    """Outputs, gradients and buffers are right all the same, and one warning tells."""
    family = LAUNCHERS[name][3]
    net, twin, x = nets(device, torch.channels_last)
    run = compiled(net) if name == "forward" else None

    def results():
        return results_of(family, device) if run is None else step(net, run, x)

    with by_aten():
        wanted = results_of(family, device) if run is None else step(twin, twin, x)
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


@pytest.mark.parametrize(("name", "dtype"), [*zip(LAUNCHERS, itertools.cycle(HALF), strict=False)], ids=str)
def test_a_wrong_kernel_of_half_precision_is_found(watched, monkeypatch, name, dtype, device):
    """An error of a hundredth of the largest value is more than rounding can explain."""
    falsify(monkeypatch, name)
    with pytest.warns(RuntimeWarning, match=f"its {LAUNCHERS[name][3]} kernels in .* were wrong") as said:
        results_of(LAUNCHERS[name][3], device, dtype)
    assert sum("fusedseg" in str(one.message) for one in said) == 1


def test_a_wrong_number_of_batches_is_replaced(watched, monkeypatch, device):
    """A kernel of a module in eager mode counts the batch."""
    from fusedseg.kernels import norm_act

    spied(monkeypatch, norm_act, "norm_act_fwd", lambda result, *given, batches, **options: batches.add_(5))
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


def test_an_odd_address_is_another_kind(watched, device):
    """Triton compiles other code for addresses that are no multiples of 16."""
    from fusedseg.kernels import launcher

    shape = (2, 4, 12, 12)
    x, view = torch.randn(shape, device=device), torch.randn(2 * 4 * 12 * 12 + 1, device=device)[1:].view(shape)
    for first, second in ((view, x), (x, view)):
        at_size.forget()
        watched.clear()
        max_pool(first, 2)
        # The interpreter compiles nothing, so that its launches do not tell.
        launcher.addresses_and_kind([second], 0)
        for _ in range(2):
            max_pool(second, 2)
            max_pool(first, 2)
        assert watched == {"compared": 2}


@pytest.mark.parametrize("why", ["captured", "no memory", "off"])
def test_nothing_is_compared(watched, monkeypatch, why, device):
    """While a graph is captured, where memory is short, and with FUSEDSEG_SELF_TEST=0."""
    if why == "off":
        monkeypatch.setenv("FUSEDSEG_SELF_TEST", "0")
    name, value = {"captured": ("_is_captured", True), "no memory": ("_has_memory", False), "off": ("PART", 1)}[why]
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


@pytest.fixture
def rounding_otherwise(monkeypatch):
    """A function that makes tiles of kernels small, and the parts in which PyTorch's ops compute."""
    from fusedseg.kernels import launch, launcher, norm_act, norm_act_bwd, norm_stats, segmentation_sums

    def change():
        launcher.forget_plans()
        for module in (at_size, low_bit, launches):
            monkeypatch.setattr(module, "PART", 128)
        for module, name, value in (
            (norm_act, "ONCHIP_FWD", 0), (norm_act_bwd, "ONCHIP_BWD", 0), (launch, "TILE_BYTES", 512),
            (norm_stats, "MAX_PARTIALS", 2), (norm_stats, "MAX_SPLITS", 2), (segmentation_sums, "TILE", 64),
        ):  # fmt: skip
            monkeypatch.setattr(module, name, value)

    yield change
    launcher.forget_plans()


# On a GPU each draw would compile kernels of its own; there every test of the suite fails if a comparison does.
@pytest.mark.usefixtures("only_in_the_interpreter")
@pytest.mark.parametrize(
    ("family", "seed"), [*((name, 0) for name in draws.FAMILIES), *((name, 2) for name in ("norm", "low_bit", "sums"))]
)
def test_right_kernels_raise_no_alarm(watched, monkeypatch, rounding_otherwise, family, seed, device):
    """Values from denormal to large, far from 0, constant and infinite, in all dtypes and formats.

    Seed 2 rounds otherwise: kernels that add do so in small tiles, and PyTorch's ops in small parts.
    """
    draw = draws.Draw(100 * seed, device)
    compared = spied(monkeypatch, at_size, "_judged", lambda result, check, *call: check.kind)
    count = draws.COUNTS[family]
    if seed == 2:
        rounding_otherwise()
        # Launches have many programs.
        count //= 2
    with warnings.catch_warnings():
        # The interpreter computes by numpy, which warns of overflows.
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message="fusedseg: its")
        for _ in range(count):
            at_size.forget()
            draws.FAMILIES[family](draw)
    assert watched["compared"] >= count // 2
    assert set(compared) == {check.kind for check in at_size._checks if check.family == family}
