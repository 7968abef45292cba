"""Functions of distributed tests whose ranks choose different backends; a forked process can import them."""

import torch
from torch.nn.parallel import DistributedDataParallel

import fusedseg
from fusedseg.ops.norm import sync
from tests.training import jobs

# Each rank: (the backend of the package, the backend of convolutions).
MIXED = (("triton", "triton"), ("aten", "aten"))
SAME = (("aten", "aten"), ("aten", "aten"))


def choose(rank, choices) -> str:
    fusedseg.backend, conv_backend = choices[rank]
    return conv_backend


def sync_step(rank, world, choices, name, dtype, affine):
    """A step of a synchronised norm, and the shape and dtype of each tensor that was gathered."""
    choose(rank, choices)
    gathered, gather = [], sync.gather

    def noted(t, group):
        gathered.append((tuple(t.shape), t.dtype))
        return gather(t, group)

    sync.gather = noted
    sizes, spatial = (2, 3), (5, 4)
    x, dz = (t.split(sizes)[rank] for t in jobs.joint(sizes, spatial, dtype))
    made = getattr(fusedseg, name)(jobs.CHANNELS, affine=affine)
    found = jobs.step(fusedseg.convert_sync(made), x, dz.to(dtype))
    sync.gather = gather
    return found, gathered


def train_convolutions(rank, world, choices):
    """Losses and parameters of a network of ``ConvABN2d`` under DistributedDataParallel."""
    conv_backend = choose(rank, choices)
    torch.manual_seed(5)
    net = torch.nn.Sequential(
        fusedseg.ConvABN2d(2, 4, 3, padding=1, conv_backend=conv_backend),
        fusedseg.ConvABN2d(4, 3, 1, conv_backend=conv_backend),
    )
    x, target = (t.chunk(world)[rank] for t in jobs.images(4, torch.float32))
    wrapped = DistributedDataParallel(net, broadcast_buffers=False)
    losses = jobs.train(wrapped, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9), x, target, 3)
    return losses, {name: p.detach() for name, p in net.named_parameters()}
