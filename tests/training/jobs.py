"""Functions that the processes of the distributed tests run; a forked process can import them."""

import os
import signal
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fusedseg
from fusedseg.compiler import backend

CHANNELS = 5


def each(rank, world, job, calls):
    """The results of several calls of a job, for which the processes start once."""
    return [job(rank, world, *call) for call in calls]


def module(name, **options):
    """Makes a module of CHANNELS channels for ``convert_sync``.

    One weight is negative, and one is 0, so that a module that inverts its output keeps the channel.
    """
    torch.manual_seed(1)
    args = (CHANNELS, CHANNELS, 3) if name.startswith("Conv") else (CHANNELS,)
    made = getattr(fusedseg, name)(*args, **options).double()
    norm = made.norm if name.startswith("Conv") else made
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.3, -0.7, 0.0, 0.4, 1.0]))
        norm.bias.uniform_(-0.5, 0.5)
    return made


def joint(sizes, spatial, dtype=torch.float64, channels_last=False):
    """Makes x and dz of all processes together; ``sizes`` are the batch sizes of the processes."""
    generator = torch.Generator().manual_seed(2)
    pair = torch.randn(2, sum(sizes), CHANNELS, *spatial, generator=generator, dtype=torch.float64).to(dtype)
    x, dz = pair[0] * 2 + 3, pair[1]
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    return x, dz


def step(made, x, dz, residual=False, run=None) -> dict[str, Any]:
    """Returns the tensors of the batch's size, the gradients of parameters, and the buffers.

    ``run`` is called in place of ``made``, for example its compiled form.
    """
    x = x.clone().requires_grad_()
    r = x.detach().flip(-1).requires_grad_() if residual else None
    # The product is not a leaf, so the module may overwrite it.
    z = (made if run is None else run)(x * 1, *([] if r is None else [r]))
    # A convolution makes z smaller than dz.
    z.backward(dz[(..., *(slice(n) for n in z.shape[2:]))])
    of_batch = {"z": z.detach(), "dx": x.grad} | ({} if r is None else {"dresidual": r.grad})
    return {
        "of_batch": of_batch,
        "grads": {name: p.grad for name, p in made.named_parameters()},
        "buffers": dict(made.named_buffers()),
    }


def sync_step(rank, world, name, sizes, spatial, channels_last, residual, options, way="eager"):
    """Runs a step of a synchronised module; ``way`` is "eager", "checkpoint", or the name of a compiler."""
    x, dz = joint(sizes, spatial, channels_last=channels_last)
    made = fusedseg.convert_sync(module(name, **options))
    run = None
    if way == "checkpoint":
        # The checkpoint also computes the tensor that the module overwrites.
        run = partial(checkpoint, lambda *inputs: made(inputs[0] * 1, *inputs[1:]), use_reentrant=False)
    elif way != "eager":
        run = torch.compile(made, fullgraph=True, backend=way)
    return step(made, x.split(sizes)[rank], dz.split(sizes)[rank], residual, run)


def sync_and_stock(rank, world, name, sizes, spatial):
    """Runs our module and ``nn.SyncBatchNorm`` on a GPU; returns results, gradients and buffers of each on the CPU."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    x, dz = (t.split(sizes)[rank].to(device) for t in joint(sizes, spatial))
    made = module(name).to(device)
    stock = nn.Sequential(nn.SyncBatchNorm(CHANNELS).double(), nn.LeakyReLU(0.01)).to(device)
    stock[0].load_state_dict(made.state_dict())
    found = []
    for net in (fusedseg.convert_sync(made), stock):
        of = step(net, x, dz)
        tensors = [*of["of_batch"].values(), *of["grads"].values(), *of["buffers"].values()]
        found.append([t.cpu() for t in tensors])
    return found


def small_net(converted=False):
    """Makes a network of fused blocks, or of stock blocks that ``fusedseg.convert`` has converted."""
    torch.manual_seed(3)
    # ``convert_sync`` makes PyTorch's norms of a converted model, which run on a GPU alone.
    norm = "instance" if converted else "batch"
    net = fusedseg.unet.UNet(2, 3, widths=(4, 8), dims=2, plain=converted, norm_act=norm).double()
    if converted:
        fusedseg.convert(net)
    return net


def images(count, dtype=torch.float64):
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(count, 2, 8, 8, generator=generator, dtype=dtype)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()


def train(net, optimizer, x, target, steps, accumulate=1):
    """Trains a network and returns the loss of every step; a step adds the gradients of ``accumulate`` parts."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        parts = list(zip(x.chunk(accumulate), target.chunk(accumulate), strict=True))
        total = 0.0
        for i, (xs, ts) in enumerate(parts):
            quiet = accumulate > 1 and i < len(parts) - 1 and hasattr(net, "no_sync")
            with net.no_sync() if quiet else nullcontext():
                loss = nn.functional.cross_entropy(net(xs), ts) / accumulate
                loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses


def shard(t, world, rank, accumulate=1):
    """Returns this process's samples; every part of an accumulated step is divided between all processes."""
    return torch.cat([part.chunk(world)[rank] for part in t.chunk(accumulate)])


# The number of parts whose gradients a step adds, and options of DistributedDataParallel.
PARALLEL: dict[str, tuple[int, dict[str, bool]]] = {
    "plain": (1, {}),
    "no broadcast, unused sought": (1, {"broadcast_buffers": False, "find_unused_parameters": True}),
    "static graph": (1, {"gradient_as_bucket_view": True, "static_graph": True}),
    "no_sync": (2, {}),
}


def ddp(rank, world, steps, name):
    accumulate, options = PARALLEL[name]
    net = fusedseg.convert_sync(small_net())
    wrapped = DistributedDataParallel(net, **options)
    x, target = (shard(t, world, rank, accumulate) for t in images(8))
    losses = train(wrapped, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9), x, target, steps, accumulate)
    return losses, net.state_dict()


def fsdp(rank, world, steps, converted):
    """Trains with FSDP2, which shards every block by itself; returns the state dict of the whole network."""
    # These imports take seconds, and collecting the tests imports this file.
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    net = fusedseg.convert_sync(small_net(converted=converted))
    for module in net.modules():
        if isinstance(module, fusedseg.unet.DoubleConv):
            fully_shard(module)
    fully_shard(net)
    x, target = (shard(t, world, rank) for t in images(8))
    losses = train(net, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9), x, target, steps)
    return losses, get_model_state_dict(net, options=StateDictOptions(full_state_dict=True))


def packed_net(bits):
    """Makes a small network; with ``bits`` the backend keeps its activations in so many bits a value."""
    torch.manual_seed(5)
    net = fusedseg.unet.UNet(2, 3, widths=(4, 8), plain=True)
    if bits is not None:
        net.compile(backend=backend, options={"codegen": "aten", "bits": bits})
    return net


def packed_loss(net):
    """Returns the loss on a batch whose activations have enough values to be packed."""
    x = torch.randn(2, 2, 32, 32, generator=torch.Generator().manual_seed(6))
    return nn.functional.cross_entropy(net(x).float(), (x[:, 0] > 0).long())


def parameters_of(net):
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def overflowing_steps(net, loss_of, device="cpu"):
    """Two steps in half precision of which the first one overflows: whether each moves parameters; the last scale."""
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**40, backoff_factor=2.0**-36)
    before, moved = parameters_of(net), []
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast(device, torch.float16):
            loss = loss_of(net)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        moved.append(not torch.equal(parameters_of(net), before))
        assert all(t.isfinite().all() for t in (*net.parameters(), *net.buffers()))
    return moved, scaler.get_scale()


def gradient_of(net):
    """Returns all gradients as one vector, gathered from all processes if they are sharded."""
    grads = [p.grad for p in net.parameters()]
    return torch.cat([(g.full_tensor() if hasattr(g, "full_tensor") else g).flatten() for g in grads])


def packed(rank, world, sharded):
    """Two steps of backward on the same batch in every process, without an optimizer."""
    net, own = packed_net(bits=4), None
    state = torch.get_rng_state()
    if sharded:
        from torch.distributed.fsdp import fully_shard

        for module in net.modules():
            if isinstance(module, fusedseg.unet.DoubleConv):
                fully_shard(module)
        wrapped = fully_shard(net)
    else:
        wrapped = DistributedDataParallel(net)
        with wrapped.no_sync():
            packed_loss(wrapped).backward()
        own = gradient_of(net)
        net.zero_grad()
    loss = packed_loss(wrapped)
    loss.backward()
    return {
        "loss": loss.item(),
        "own gradient": own,
        "gradient": gradient_of(net),
        "generator moved": not torch.equal(torch.get_rng_state(), state),
    }


def resumable(rank, world, folder, steps, dies_at=None):
    """Trains from the checkpoint, if there is one, and writes it after every step; can kill a process in a step."""
    net = fusedseg.convert_sync(small_net())
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    path, done, losses = Path(folder) / "checkpoint", 0, []
    if path.exists():
        state = torch.load(path)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        losses, done = state["losses"], len(state["losses"])
    wrapped = DistributedDataParallel(net, broadcast_buffers=False)
    x, target = (shard(t, world, rank) for t in images(8))
    for k in range(done, steps):
        if k == dies_at and rank == world - 1:
            # The process ends within a step, while the others wait for it in a collective of the first norm.
            os.kill(os.getpid(), signal.SIGKILL)
        losses += train(wrapped, optimizer, x, target, 1)
        if rank == 0:
            state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses}
            torch.save(state, f"{path}.new")
            os.replace(f"{path}.new", path)
    return losses
