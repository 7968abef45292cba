"""What the server process of ``tests/tools/ranks.py`` imports before it forks the processes of a job.

Optimizers import the compiler in their first step.  The compiler imports networkx, and many files of Inductor, when it
divides its first graph.
"""

import contextlib
import gc
import importlib

for name in (
    "torch",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "torch._functorch.partitioners",
    "torch._inductor.output_code",
    "torch._inductor.pattern_matcher",
    "networkx",
    "triton",
    "fusedseg.kernels.norm_act_bwd",
    "fusedseg.kernels.conv_abn",
    "tests.tools.ranks",
    "tests.training.backend_jobs",
):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
# Otherwise the collector of each process would look at all these objects, which copies the pages that hold them.
gc.collect()
gc.freeze()
