"""``torchrun --nproc-per-node=2 -m examples.demo slices --distributed``: one network, trained by several processes.

Every process draws the same batch and takes its part of it.  ``DistributedDataParallel`` averages gradients, and with
``fusedseg.convert_sync`` the norms take the statistics of the whole batch.  The first process then trains the same
network alone on whole batches.  Both curves of losses are equal up to rounding.
"""

import os
import sys
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from fusedseg.cli.command import write_json
from fusedseg.nn import convert_sync

from .problem import Batch, Problem
from .training import ADAM_EPS, weigh

# The largest allowed relative difference of two losses in float64, whose sums are added up in different orders.
AGREEMENT = 1e-6
STEPS = 20


def part(batch: Batch, rank: int, world: int) -> Batch:
    """The part of a batch that process ``rank`` of ``world`` sees.  It may be empty if there are few samples."""
    (images, labels) = ([t.tensor_split(world)[rank] for t in of] for of in (batch.images, (batch.labels,)))
    return Batch(tuple(images), labels[0])


def train(problem: Problem, net: nn.Module, steps: int, seed: int, rank: int, world: int) -> list[float]:
    """Trains, and returns the losses over whole batches, added up over all processes."""
    wrapped = DistributedDataParallel(net) if world > 1 else net
    optimizer = torch.optim.Adam(net.parameters(), lr=problem.size.learning_rate, eps=ADAM_EPS)
    class_weight = weigh(problem.split.trained(problem.whole).labels, len(problem.classes)).double()
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        batch = problem.batch(generator)
        mine = part(batch, rank, world)
        logits = wrapped(*(image.double() for image in mine.images))
        share = F.cross_entropy(logits, mine.labels, class_weight, reduction="sum") / class_weight[batch.labels].sum()
        optimizer.zero_grad()
        # The gradients must be added up, but DistributedDataParallel averages them over the processes.
        (share * world).backward()
        optimizer.step()
        losses.append(_total(share.detach(), world))
    return losses


def _total(share: Tensor, world: int) -> float:
    if world > 1:
        distributed.all_reduce(share)
    return share.item()


def run_distributed(name: str, problem: Problem, device: torch.device, steps: int, seed: int, path: Path,
                    overwrite: bool) -> int:  # fmt: skip
    """Trains, prints both curves and writes them.  Returns 0 if they agree, otherwise 1."""
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        rank, world = distributed.get_rank(), distributed.get_world_size()

        def network() -> nn.Module:
            torch.manual_seed(seed)
            return problem.network(False).to(device).double()

        together = train(problem, convert_sync(network()), steps, seed, rank, world)
        if rank > 0:
            return 0
        alone = train(problem, network(), steps, seed, 0, 1)
        difference = max(abs(a - b) / abs(b) for a, b in zip(together, alone, strict=True))
        print(f"{problem.title} in float64, {world} processes with synchronised statistics, and one over whole batches")
        print(f"{'step':>6}{'together':>14}{'alone':>14}")
        for step, losses in enumerate(zip(together, alone, strict=True)):
            if step % max(1, steps // 10) == 0 or step == steps - 1:
                print(f"{step:6d}{losses[0]:14.9f}{losses[1]:14.9f}")
        print(f"largest relative difference of a loss: {difference:.1e}")
        figures = {"demo": name, "processes": world, "seed": seed, "together": together, "alone": alone}
        write_json(figures, path, overwrite)
        print(f"wrote {path}")
        if difference > AGREEMENT:
            print(f"demo {name}: the curves differ by more than {AGREEMENT:.0e}", file=sys.stderr)
            return 1
        return 0
    finally:
        distributed.destroy_process_group()


def launched() -> bool:
    """Whether ``torchrun`` has started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def claim(device: torch.device) -> None:
    """Selects one GPU for this process."""
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
