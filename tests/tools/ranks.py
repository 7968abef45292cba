"""Runs a function in several processes that form a process group, and brings back what each returned.

    results = on_ranks(2, job, shapes)      # job(rank, world, shapes) in each; results[rank]

Jobs are functions of modules that can be imported (``tests.training.jobs``).  A server process imports PyTorch and
fusedseg once, runs nothing, and forks the processes.
"""

import datetime
import gc
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# Seconds after which a collective, or a whole job, counts as failed.
COLLECTIVE, JOB = 60, 240
# What the server imports; it passes over what is not installed.  Optimizers import the compiler in their first step.
# The compiler imports networkx, and many files of Inductor, when it divides its first graph.
PRELOADED = [
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "torch._functorch.partitioners",
    "torch._inductor.output_code",
    "torch._inductor.pattern_matcher",
    "networkx",
    "fusedseg.kernels.norm_act_bwd",
    "fusedseg.kernels.conv_abn",
    "tests.tools.ranks",
    "tests.training.backend_jobs",
]


class RankFailed(RuntimeError):
    """Holds the text that the first failed rank printed."""


def _main(rank: int, world: int, folder: str, job: Callable, args: tuple) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    # Otherwise the collector would look at all objects of the server, which copies the pages that hold them.
    gc.freeze()
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/meeting",
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=COLLECTIVE),
        )
        result = job(rank, world, *args)
        dist.barrier()
        dist.destroy_process_group()
        torch.save(result, f"{folder}/result{rank}")
    except BaseException:
        Path(f"{folder}/error{rank}").write_text(traceback.format_exc())
        raise


def on_ranks(world: int, job: Callable, *args: Any) -> list[Any]:
    """Returns the result of ``job(rank, world, *args)`` of each rank.

    Raises:
        RankFailed: with the traceback of a rank that failed, or was killed, or took too long.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=_main, args=(rank, world, folder, job, args)) for rank in range(world)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(JOB)
        late = [process for process in processes if process.is_alive()]
        for process in late:
            process.kill()
            process.join()
        codes = [process.exitcode for process in processes]
        if late or any(codes):
            errors = [path.read_text() for path in sorted(Path(folder).glob("error*"))]
            raise RankFailed(f"exit codes {codes}, {len(late)} ranks killed after {JOB} s\n" + "\n".join(errors))
        return [torch.load(f"{folder}/result{rank}", weights_only=False) for rank in range(world)]
