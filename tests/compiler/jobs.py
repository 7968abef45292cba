"""What the processes of the distributed tests run; a forked process can import it."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fusedseg.compiler import backend


def net():
    torch.manual_seed(0)
    parts = (nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(True)) for _ in range(2))
    return nn.Sequential(nn.Conv2d(2, 8, 3), *parts, nn.Conv2d(8, 3, 1)).double()


def gradients_of_all(world):
    """The gradients of one process that has the whole batch, which is what the processes must find."""
    model = net()
    model(batch(world)).square().mean().backward()
    return [p.grad for p in model.parameters()]


def batch(world):
    return torch.randn(2 * world, 2, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def ddp(rank, world, codegen, bucket_mb):
    """A step of DistributedDataParallel; small buckets make its optimizer split the graph."""
    # The first bucket must not be larger than the others.
    dist._DEFAULT_FIRST_BUCKET_BYTES = min(dist._DEFAULT_FIRST_BUCKET_BYTES, int(bucket_mb * 2**20))
    model = DistributedDataParallel(net(), bucket_cap_mb=bucket_mb)
    run = torch.compile(model, backend=backend, options={"codegen": codegen})
    run(batch(world).chunk(world)[rank]).square().mean().backward()
    return [p.grad for p in model.parameters()]


def fsdp(rank, world, codegen):
    model = net()
    for part in model[1:3]:
        fully_shard(part)
    fully_shard(model)
    run = torch.compile(model, backend=backend, options={"codegen": codegen})
    run(batch(world).chunk(world)[rank]).square().mean().backward()
    return [p.grad.full_tensor() for p in model.parameters()]


def rounded(rank, world):
    """The gradient of one batch with bits, and whether PyTorch's generator stayed where it was."""
    torch.manual_seed(0)
    # With fewer values kept, the step would peak higher with bits, and so be exact.
    inner = [nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    model = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), *inner, nn.Conv2d(8, 3, 1)).double()
    x = torch.randn(2, 2, 32, 32, dtype=torch.float64)
    before = torch.get_rng_state()
    torch.compile(model, backend=backend, options={"codegen": "aten", "bits": 4})(x).square().mean().backward()
    return model[-1].weight.grad, torch.equal(before, torch.get_rng_state())
