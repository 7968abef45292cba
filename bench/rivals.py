"""The table of the page docs/results.md: other ways to train in less memory beside this package, on the same networks.

Bytes are real allocations of one training step in fp32, without parameters.  Steps are timed in turns.  The command
counts and times the networks that are named, or all; ``--seconds 0`` only counts::

    python -m bench.rivals [NAME ...] [--seconds 15]

All ways run PyTorch's own kernels, also the compiler's budget (``aot_eager_decomp_partition``).  Inductor would take a
C++ compiler minutes for each network; ``test_compiler.py`` has its bytes and times.

Activation offload (``torch.autograd.graph.save_on_cpu``) moves tensors from a GPU to the host.  On a CPU its hooks are
imitated by copies in NumPy's memory, which PyTorch's allocator does not count, so its bytes are those on the GPU.  Its
time here is that of copies within the host, and says nothing about a GPU's bus.
"""

import argparse
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import _VersionWrapper, checkpoint, create_selective_checkpoint_contexts

import fusedseg
from fusedseg.memory.checkpoint import _blocks

from .contenders import Compiled, Treat, as_it_is, checkpointed
from .harness import Timing, count_bytes, interleave
from .jobs import step_results
from .networks import NETWORKS, title_of
from .results import markdown, spread
from .test_compiler import Contest, with_backend

NAMES = ("U-Net", "PlainConvUNet")
MIB = 2**20


class Selective(nn.Module):
    """Checkpoints of the same blocks that keep the results of convolutions and matrix products."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.caches = net, []
        for _, block in _blocks(net, "", 4):
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=self.contexts)

    def contexts(self) -> tuple[Any, Any]:
        aten = torch.ops.aten
        kept = [aten.convolution.default, aten.mm.default, aten.addmm.default, aten.bmm.default]
        caching, cached = create_selective_checkpoint_contexts(kept)
        self.caches.append(caching.storage)
        return caching, cached

    def cached(self) -> int:
        """The bytes of the results in the caches of the last forward; hooks of saved tensors do not see them."""
        values = tree_leaves([list(cache.values()) for cache in self.caches])
        return sum(value.val.nbytes for value in values if isinstance(value, _VersionWrapper))

    def forward(self, x: Tensor) -> Tensor:
        self.caches.clear()
        return self.net(x)


class Offloaded(nn.Module):
    """Saved tensors lie in NumPy's memory between forward and backward; parameters stay, as a user would let them."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.moved = net, 0
        self.owned = {p.untyped_storage().data_ptr() for p in (*net.parameters(), *net.buffers())}

    def pack(self, x: Tensor) -> object:
        if x.untyped_storage().data_ptr() in self.owned:
            return x
        self.moved += x.nbytes
        return x.detach().numpy().copy()

    def unpack(self, x: object) -> Tensor:
        return x if isinstance(x, Tensor) else torch.from_numpy(x).clone()

    def forward(self, x: Tensor) -> Tensor:
        self.moved = 0
        with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            return self.net(x)


def with_partitioner(budget: float) -> Treat:
    from torch._dynamo.backends.debugging import aot_eager_decomp_partition

    return lambda net: Compiled(net, aot_eager_decomp_partition, activation_memory_budget=budget)


WAYS: dict[str, Treat] = {
    "eager PyTorch": as_it_is,
    "checkpoints of each block": checkpointed,
    "selective checkpoints": Selective,
    "offload to the host": Offloaded,
    "the compiler's partitioner": with_partitioner(1.0),
    "the compiler's budget 0.5": with_partitioner(0.5),
    "**ours**, `convert`": fusedseg.convert,
    "**ours**, backend, `aten`": with_backend("aten"),
    "**ours**, backend, `aten`, budget 0.3": with_backend("aten", budget=0.3),
    "**ours**, backend, `aten`, 8 bits": with_backend("aten", bits=8),
}


def contest(name: str, seconds: float) -> None:
    device = torch.device("cpu")
    of = Contest(NETWORKS[name], device)
    counted, jobs = {}, {}
    torch.compiler.reset()
    for way, make in WAYS.items():
        jobs[way] = of.of(make, True)
        kept, peak, _ = count_bytes(jobs[way], device)
        if isinstance(net := jobs[way].net, Selective):
            out = jobs[way].forward(jobs[way].prepare())
            kept += net.cached()
            del out
        counted[way] = kept, peak
    results = {way: step_results(job) for way, job in jobs.items()}
    errors = {way: difference(found, results["eager PyTorch"]) for way, found in results.items()}
    del results
    timed = interleave(jobs, Timing(device, seconds)) if seconds else {}
    rows = []
    for way, (kept, peak) in counted.items():
        net = jobs[way].net
        moved = f" ({net.moved / MIB:.1f} moved)" if isinstance(net, Offloaded) else ""
        row = [way, f"{kept / MIB:.1f}{moved}", f"{peak / MIB:.1f}", errors[way]]
        if timed:
            base = median(timed["eager PyTorch"].step)
            row += ["{median_ms:.0f} ({p20_ms:.0f} to {p80_ms:.0f})".format(**spread(timed[way].step))]
            row += [f"{median(timed[way].step) / base:.2f}"]
        rows.append(row)
    heads = ["way", "kept MiB", "peak MiB", "error of the gradient", "step ms (middle three fifths)", "/ eager"]
    print(f"\n{title_of(name)}\n", *markdown(heads[: len(rows[0])], rows), sep="\n", flush=True)


def difference(found: dict[str, Tensor], stock: dict[str, Tensor]) -> str:
    got, expected = found["gradients"], stock["gradients"]
    return "0" if torch.equal(got, expected) else f"{(got - expected).norm() / expected.norm():.0e}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.rivals", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", default=NAMES, metavar="NAME")
    parser.add_argument("--seconds", type=float, default=15.0, help="for the times of each network; 0 counts only")
    args = parser.parse_args(argv)
    for name in args.names:
        contest(name, args.seconds)


if __name__ == "__main__":
    main()
