"""Tests that need a GPU (``pytest --device cuda``): no synchronisation, CUDA graphs, streams, several devices."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fusedseg
from fusedseg.unet import UNet
from tests.tools.ranks import on_ranks
from tests.training import jobs

WARM_UP = 3


pytestmark = pytest.mark.usefixtures("only_on_a_gpu")


def converted():
    net = nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(8, 3, 1)
    )
    fusedseg.convert(net)
    return net


NETWORKS = {
    "fused": lambda: UNet(2, 3, widths=(8, 16)),
    "instance": lambda: UNet(2, 3, widths=(8, 16), norm_act="instance"),
    "exact": lambda: UNet(2, 3, widths=(8, 16), norm_act=lambda C: fusedseg.BatchNormAct(C, activation="silu")),
    "converted": converted,
}


def network(name, device):
    torch.manual_seed(0)
    return NETWORKS[name]().to(device)


class Run:
    """Trains on one batch that stays at the same address."""

    def __init__(self, net, device):
        self.net = net
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(2, 2, 16, 16, generator=generator).to(device)
        self.optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)

    def step(self, half=False):
        self.optimizer.zero_grad(set_to_none=False)
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            loss = self.net(self.x).float().square().mean()
        loss.backward()
        self.optimizer.step()
        return loss

    def warm(self, half=False):
        """The first steps find kept channels, compile kernels and measure convolutions, and wait for the GPU."""
        for _ in range(WARM_UP):
            self.step(half)
        torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "half"), [*((name, False) for name in NETWORKS), ("fused", True)])
def test_a_step_does_not_wait_for_the_gpu(device, name, half):
    """In mixed precision only ``GradScaler`` itself may wait."""
    run = Run(network(name, device), device)
    run.warm(half)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            run.step(half)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("name", NETWORKS)
def test_captured_training_step(device, name):
    """A captured step that is replayed three times trains like three eager steps."""
    run = Run(network(name, device), device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run.warm()
    torch.cuda.current_stream().wait_stream(side)
    plain = Run(copy.deepcopy(run.net), device)
    plain.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = run.step()
    for _ in range(3):
        graph.replay()
        expected = plain.step()
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(run.net.state_dict(), plain.net.state_dict(), rtol=1e-4, atol=1e-5)


def test_several_streams(device):
    """Two networks run forward and backward at the same time, each on its own stream."""
    pairs = [(network("fused", device), torch.randn(4, 2, 64, 64, device=device)) for _ in range(2)]
    expected = []
    for net, x in pairs:
        other = copy.deepcopy(net)
        other(x).square().mean().backward()
        expected.append([p.grad for p in other.parameters()])
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in pairs]
    for _ in range(5):
        for (net, x), stream in zip(pairs, streams, strict=True):
            with torch.cuda.stream(stream):
                net.zero_grad()
                net(x).square().mean().backward()
    torch.cuda.synchronize()
    for (net, _), grads in zip(pairs, expected, strict=True):
        torch.testing.assert_close([p.grad for p in net.parameters()], grads, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", NETWORKS)
def test_another_device_than_the_current_one(name):
    """Kernels are launched on the device of the tensors."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    results = []
    for index in range(2):
        run = Run(network(name, f"cuda:{index}"), f"cuda:{index}")
        with torch.cuda.device(0):
            losses = torch.stack([run.step() for _ in range(3)])
        assert losses.device.index == index
        results.append(losses.detach().cpu())
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["fused", "exact"])
def test_reduce_overhead(device, name):
    """With Inductor's CUDA graphs, the gradients in training equal eager mode's."""
    torch._dynamo.reset()
    net = network(name, device)
    eager = copy.deepcopy(net)
    compiled = torch.compile(net, mode="reduce-overhead", fullgraph=True)
    x = torch.randn(2, 2, 16, 16, device=device)
    for _ in range(4):
        results = []
        for run, module in ((eager, eager), (compiled, net)):
            module.zero_grad()
            torch.compiler.cudagraph_mark_step_begin()
            z = run(x)
            F.mse_loss(z, torch.zeros_like(z)).backward()
            # The next run of a graph overwrites its outputs.
            results.append([z.detach().clone(), *(p.grad.clone() for p in module.parameters())])
        torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-5)
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["InPlaceABN", "BatchNormAct"])
def test_synchronised_as_stock(name):
    """Compares with ``nn.SyncBatchNorm``, which runs only on GPUs; two processes may share one GPU."""
    for mine, stock in on_ranks(2, jobs.sync_and_stock, name, (1, 3), (6, 5)):
        torch.testing.assert_close(mine, stock, rtol=1e-9, atol=1e-9)
