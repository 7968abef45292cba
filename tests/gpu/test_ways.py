"""Compiled steps under what a program on a GPU may do around them, and which rewrites the graphs of this suite have.

Each test runs enough steps that ops are replayed, and compares every step with eager mode.  On a CPU the tests only
rehearse: there is one stream, and nothing is replayed.
"""

import contextlib
import copy
import importlib
import inspect
import pkgutil
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusedseg
from fusedseg import _backend, _torch
from fusedseg.compiler import codegen, rewrite, settings
from fusedseg.ops.layout import FORMATS
from fusedseg.ops.registry import FAMILIES
from tests.compiler.networks import compiled
from tests.gpu import test_compiler
from tests.ops.test_at_size import Net, alike, step
from tests.reference import relative_error
from tests.resnet import ResNet18
from tests.tools.marks import slow
from tests.tools.spy import spied
from tests.tools.threads import in_threads

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiled_afresh")]
# The third step notes launches at the earliest.
STEPS = 6


def images(device, count=STEPS, size=32):
    generator = torch.Generator().manual_seed(1)
    fmt = torch.channels_last
    return [torch.randn(2, 3, size, size, generator=generator).to(device, memory_format=fmt) for _ in range(count)]


def pair(device):
    torch.manual_seed(0)
    net = Net().to(device, memory_format=torch.channels_last)
    return net, compiled(net), copy.deepcopy(net)


def on(stream):
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def new_stream(device):
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Late:
    """The image arrives some 10 ms late, on one of two streams.  A launch on another stream would read NaN."""

    def __init__(self, device):
        self.streams, self.count = [new_stream(device) for _ in range(2)], 0

    def __call__(self, x, run_step):
        self.count += 1
        synchronize(x.device)
        with on(self.streams[self.count % 2]):
            late = torch.full_like(x, torch.nan)
            if x.is_cuda:
                _torch.cuda_sleep(20_000_000)
            found = run_step(late.copy_(x))
        synchronize(x.device)
        return found


class Overwritten:
    """The image is overwritten as soon as the host has queued the step, as a loader may do."""

    def __init__(self, device):
        self.buffer = None

    def __call__(self, x, run_step):
        self.buffer = x.clone(memory_format=torch.preserve_format) if self.buffer is None else self.buffer.copy_(x)
        found = run_step(self.buffer)
        self.buffer.fill_(torch.nan)
        return found


class OnTheHost:
    """What is kept goes to the host, whose copies of pinned memory are contiguous."""

    def __init__(self, device):
        self.pin = device.type == "cuda"

    def __call__(self, x, run_step):
        with torch.autograd.graph.save_on_cpu(pin_memory=self.pin):
            return run_step(x)


class OddAddresses:
    """Every second image begins at an odd address."""

    def __init__(self, device):
        self.odd = False

    def __call__(self, x, run_step):
        self.odd = not self.odd
        memory = torch.empty(x.numel() + 1, device=x.device)
        return run_step(memory[1:].as_strided(x.shape, x.stride()).copy_(x) if self.odd else x)


class LittleMemory:
    """The allocator frees what it has cached, and tries again, in the middle of steps; then nothing is compared."""

    def __init__(self, device):
        self.k = 0

    def __call__(self, x, run_step):
        self.k += 1
        if x.is_cuda and self.k == 2:
            share = torch.cuda.max_memory_reserved() * 1.1 / torch.cuda.get_device_properties(x.device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, share), x.device)
        try:
            # Blocks of this size are of no use for the step, so that they are freed in it.
            with contextlib.suppress(torch.OutOfMemoryError):
                torch.empty(2**24 + self.k * 2**20, device=x.device)
            return run_step(x)
        finally:
            if x.is_cuda and self.k == STEPS:
                torch.cuda.set_per_process_memory_fraction(1.0, x.device)


AROUND = (OnTheHost, Late, Overwritten, OddAddresses, LittleMemory)


# ``-m gpu`` runs all of them.  Without a GPU these are plain steps.
@pytest.mark.parametrize("around", slow(AROUND, *AROUND[1:]))
def test_steps(device, around):
    net, run, twin = pair(device)
    way = around(device)
    for x in images(device, size=256 if device.type == "cuda" else 32):
        wanted = step(twin, twin, x)
        alike(way(x, lambda given: step(net, run, given)), wanted)


def test_two_threads_and_streams(device):
    """Each thread trains a network of its own; the allocator gives both what the other one has freed."""
    pairs = [pair(device) for _ in range(2)]
    for net, run, twin in pairs:
        alike(step(net, run, images(device)[0]), step(twin, twin, images(device)[0]))

    def train(net, run, twin):
        with on(new_stream(device)):
            for x in images(device, 2 * STEPS):
                found = step(net, run, x)
                alike(found, step(twin, twin, x))

    synchronize(device)
    in_threads(*[partial(train, *of) for of in pairs])


def test_infinite_gradients_of_a_scaled_loss(device):
    """A scaler skips the step whose gradients overflow, and the next gradients are finite again."""
    net, run, twin = pair(device)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**127, growth_interval=10**6)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    begin = copy.deepcopy(net.state_dict())
    for x in images(device, 2):
        optimizer.zero_grad()
        scaler.scale(run(x).square().sum() * 1e3).backward()
        scaler.step(optimizer)
        scaler.update()
    assert all(torch.equal(p, begin[name]) for name, p in net.named_parameters())
    net.load_state_dict(begin)
    for x in images(device):
        alike(step(net, run, x), step(twin, twin, x))


def test_a_captured_step(device):
    """``torch.cuda.graph`` around a compiled step: launches go to the stream of the capture."""
    if device.type != "cuda":
        pytest.skip("needs --device cuda")
    net, run, twin = pair(device)
    every = images(device)
    x = every[0].clone(memory_format=torch.preserve_format)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(STEPS):
            step(net, run, x)
    torch.cuda.current_stream().wait_stream(side)
    net.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(x)
        (y * y.detach().sign()).mean().backward()
    net.load_state_dict(twin.state_dict())
    for image in every:
        for p in net.parameters():
            p.grad.zero_()
        x.copy_(image)
        graph.replay()
        wanted, buffers = step(twin, twin, image), list(net.buffers())
        alike([y, *buffers], [wanted[0], *wanted[-len(buffers) :]])


class Volumes(nn.Module):
    """A network of volumes of one channel, as nnU-Net builds them, with a residual block."""

    def __init__(self):
        super().__init__()

        def block(C, K, stride=1):
            conv = nn.Conv3d(C, K, 3, stride, padding=1)
            return nn.Sequential(conv, nn.InstanceNorm3d(K, affine=True), nn.LeakyReLU(0.01, inplace=True))

        self.first = nn.Sequential(block(1, 16), block(16, 32))
        self.down, self.rest = block(32, 32, 2), nn.Sequential(*block(32, 32)[:2])
        self.up, self.last = nn.ConvTranspose3d(32, 32, 2, 2), nn.Sequential(block(64, 32), nn.Conv3d(32, 3, 1))

    def forward(self, x):
        skip = self.first(x)
        down = self.down(skip)
        down = F.leaky_relu(self.rest(down) + down, 0.01)
        return self.last(torch.cat([self.up(down), skip], 1))


def volumes(device, given):
    torch.manual_seed(0)
    fmt = torch.channels_last_3d if given == "rows" else torch.contiguous_format
    return Volumes().to(device, memory_format=fmt), fmt, [torch.randn(2, 1, 8, 16, 24) for _ in range(2)]


@pytest.mark.parametrize("given", slow(["planes", "rows"], "planes"))
def test_volumes_under_autocast(device, given, strides_of_a_gpu):
    """Casts, biases that a concatenation adds, the view of an image of one channel, residuals, sums of gradients,
    kernels of volumes, and replays: beside float64 on the CPU, on two images in turn."""
    net, fmt, every = volumes(device, given)
    exact = copy.deepcopy(net).cpu().double()
    run, twin = compiled(net), copy.deepcopy(net)
    wanted = [step(exact, exact, x.double()) for x in every]

    def half_step(of, call, k):
        """The norms of the errors of the output and of the gradients."""
        of.zero_grad()
        dtype = torch.float16 if device.type == "cuda" else torch.bfloat16
        with torch.autocast(device.type, dtype):
            y = call(every[k].to(device, memory_format=fmt))
        assert y.dtype == dtype
        (y.float() * wanted[k][0].sign().to(device).float()).mean().backward()
        found = [y.detach(), *(p.grad for p in of.parameters())]
        return [(mine.double().cpu() - of).norm().item() for mine, of in zip(found, wanted[k], strict=False)]

    # The gradient of a bias before a norm is 0.
    most = []
    for k in range(2):
        errors = zip(half_step(twin, twin, k), wanted[k], strict=False)
        most.append([1.5 * error + 0.02 * of.norm().item() + 1e-4 for error, of in errors])
    for k in range(STEPS):
        errors = half_step(net, run, k % 2)
        assert all(error <= limit for error, limit in zip(errors, most[k % 2], strict=True)), (k, errors, most)


def rewrites():
    """Every public function of the compiler that rewrites a graph, and returns how often."""
    for package in (codegen, rewrite):
        for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            module = importlib.import_module(found.name)
            for name, function in inspect.getmembers(module, inspect.isfunction):
                first = next(iter(inspect.signature(function).parameters), "")
                counts = function.__annotations__.get("return") is int
                if function.__module__ == found.name and not name.startswith("_") and first == "graph" and counts:
                    yield module, name


# Families that a graph may not have: ``ConvABN2d`` is a module, whose tests are in ``test_kernels.py``; a graph has the
# convolution of volumes on Hopper alone, whose tests are in ``tests/ops/test_conv3d.py``; and a norm inside of a
# convolution needs cuDNN's package, ``tests/kernels/test_norm_sums.py``.
ELSEWHERE = {"conv", "conv3d", "norm_sums"}
# Rewrites that no graph of this suite has, and why.
ABSENT = {"simplify.split_shared_calls": "parts calls that PyTorch has joined although both results are returned"}


class Case(NamedTuple):
    """A network, its image, the options of the backend, and whether it runs under autocast."""

    net: nn.Module
    x: Tensor
    options: dict[str, Any]
    half: bool = False


def cases():
    torch.manual_seed(0)
    image = torch.randn(2, 3, 32, 32)
    rows = image.to(memory_format=torch.channels_last)
    return {
        "planes": Case(Net(), image, {"budget": 0.3}),
        "rows": Case(Net(), rows, {}, half=True),
        "volumes in planes": Case(Volumes(), torch.randn(2, 1, 8, 16, 24), {}, half=True),
        "bits": Case(test_compiler.Net(), torch.randn(2, 3, 16, 24), {"bits": 8}),
        "norms in convolutions": Case(Net(), rows, {"fused_convolutions": True}, half=True),
        "bits of residuals": Case(ResNet18(3, width=16, stages=1), torch.randn(2, 3, 64, 64), {"bits": 8}),
    }


def test_every_rewrite_and_every_family_is_in_some_graph(device, strides_of_a_gpu, monkeypatch):
    """By the rules of a GPU, so that a CPU counts what a GPU will run; gradients are those of eager mode."""
    from fusedseg.compiler.codegen import concatenation, shorter
    from fusedseg.compiler.rewrite import channels_last
    from fusedseg.ops.conv import cudnn_graphs

    results = {
        f"{module.__name__.split('.')[-1]}.{name}": spied(monkeypatch, module, name) for module, name in rewrites()
    }
    results["zeros in one call"] = spied(monkeypatch, shorter, "put_together")
    monkeypatch.setattr(concatenation, "SLAB_BYTES", 1024)
    # Without the package such a convolution computes what it computes without the option.
    monkeypatch.setattr(cudnn_graphs, "is_installed", lambda: True)
    if device.type == "cpu":
        pytest.importorskip("triton")
        monkeypatch.setattr(_backend, "_name", "auto")
        monkeypatch.setattr(_backend, "explain", lambda device: ("triton", ""))
        monkeypatch.setattr(channels_last, "is_faster", lambda x: x.dtype in (torch.float16, torch.bfloat16))
    asked = spied(monkeypatch, _backend, "why_not", lambda result, x, family: family)
    loss = fusedseg.DiceCELoss(to_onehot_y=True, softmax=True)
    settings.written.clear()
    for name, (net, x, options, half) in cases().items():
        torch._dynamo.reset()
        fmt = torch.contiguous_format if name.endswith("planes") else FORMATS[x.dim()]
        net, x = net.to(device, memory_format=fmt), x.to(device)
        twin, grads = copy.deepcopy(net), []
        for of, run in ((net, compiled(net, **options)), (twin, twin)):
            with torch.autocast(device.type, torch.bfloat16, enabled=half):
                out = run(x)
            if out.dim() > 2:
                loss(out, torch.zeros_like(out[:, :1], dtype=torch.long)).backward()
            else:
                out.square().sum().backward()
            grads.append(test_compiler.flat(p.grad for p in of.parameters()))
        assert relative_error(*grads) <= (0.06 if half or "bits" in options else 1e-4), name
    # ``put_together`` returns nothing.
    assert {name for name, of in results.items() if not any(one is None or one for one in of)} == set(ABSENT), results
    # What can be left out is named in one table, and nothing of it may be missing here either.
    assert {name for name, count in settings.written.items() if count} == {*settings.OPTIONAL}, settings.written
    assert {*asked} - {None} | ELSEWHERE == {name for name, family in FAMILIES.items() if not family.instead}
