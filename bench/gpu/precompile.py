"""Compiles kernels in parallel, one process a core, so that a bench finds them in Triton's cache.

    python -m bench.gpu.precompile bench.gpu.norm_variants:LAUNCHES tests.kernels.norm_act_launches:CASES

Each argument names a dict of functions that call launchers with CPU tensors.  The kernels are compiled for the GPU of
this machine, and none of them runs.
"""

import importlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

TARGET = "sm_90"


def target() -> str:
    """The architecture of this machine's GPU; without a GPU, ``TARGET``."""
    import torch

    return "sm_{}{}".format(*torch.cuda.get_device_capability()) if torch.cuda.is_available() else TARGET


def precompile(*sources: str, processes: int | None = None) -> list[str]:
    """Compiles all launches of the sources; returns one line for each launch that failed."""
    count = processes or os.cpu_count() or 1
    arch = target()
    command = [sys.executable, "-m", "bench.gpu.precompile", "--share"]

    def share(k: int) -> list[str]:
        arguments = [*command, f"{k}/{count}", arch, *sources]
        run = subprocess.run(arguments, capture_output=True, text=True, check=False)
        return run.stdout.splitlines() + ([run.stderr] if run.returncode else [])

    with ThreadPoolExecutor(count) as pool:
        return [line for lines in pool.map(share, range(count)) for line in lines]


def compile_share(k: int, count: int, target: str, sources: list[str]) -> None:
    """Compiles every ``count``-th launch, starting with the k-th, and prints one line for each failure."""
    from fusedseg.kernels.dry_run import dry_run

    launches = []
    for source in sources:
        module, _, name = source.partition(":")
        launches += getattr(importlib.import_module(module), name or "CASES").items()
    for name, launch in launches[k::count]:
        try:
            with dry_run(target):
                launch()
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--share"]:
        k, count = map(int, arguments[1].split("/"))
        compile_share(k, count, arguments[2], arguments[3:])
        return 0
    failed = precompile(*arguments)
    print("\n".join(failed) or f"compiled for {target()}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
