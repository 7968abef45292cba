"""What the processes of the distributed tests run; a forked process can import it."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fusedseg.compiler import backend
from fusedseg.memory.meter import SavedBytes


def block():
    layers = (nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU()) for _ in range(2))
    return nn.Sequential(*layers)


class Blocks(nn.Module):
    """A network whose blocks are ``nn.Sequential``, as in most code.

    Its own forward is not PyTorch's, so that the compiler takes it behind the hooks of a wrapper.
    """

    def __init__(self):
        super().__init__()
        self.stem, self.first, self.second, self.head = nn.Conv2d(2, 8, 3), block(), block(), nn.Conv2d(8, 3, 1)

    def forward(self, x):
        return self.head(self.second(self.first(self.stem(x))))


def net():
    torch.manual_seed(0)
    return Blocks().double()


def gradients_of_all(world):
    """The gradients of one process that has the whole batch, which is what the processes must find."""
    model = net()
    model(batch(world)).square().mean().backward()
    return [p.grad for p in model.parameters()]


def batch(world):
    return torch.randn(2 * world, 2, 32, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def wrapped_and_compiled(compiled):
    """Small buckets make the optimizer of DistributedDataParallel split the graph."""
    # The first bucket must not be larger than the others.
    dist._DEFAULT_FIRST_BUCKET_BYTES = 2**11
    return compiled(DistributedDataParallel(net(), bucket_cap_mb=0.002))


def compiled_and_wrapped(compiled):
    return DistributedDataParallel(compiled(net()))


def sharded(compiled):
    """The root alone is sharded."""
    return fully_shard(compiled(net()))


# How a model is spread over processes and compiled, by a name; each function gets what compiles a module.
WAYS = {
    "DDP, split": wrapped_and_compiled,
    "DDP of the compiled model": compiled_and_wrapped,
    "FSDP2": sharded,
}


def step(rank, world, way, codegen):
    """The gradients of a step, and the bytes that it keeps for backward; ``codegen`` None is eager mode."""

    def compiled(module):
        return torch.compile(module, backend=backend, options={"codegen": codegen}) if codegen else module

    model = WAYS[way](compiled)
    x = batch(world).chunk(world)[rank]
    # The compiler captures the model outside of hooks.
    model(x).square().mean().backward()
    model.zero_grad()
    with SavedBytes([*model.parameters(), x]) as saved:
        out = model(x)
    kept = saved.nbytes
    out.square().mean().backward()
    grads = [p.grad for p in model.parameters()]
    return [g.full_tensor() if isinstance(g, DTensor) else g for g in grads], kept
