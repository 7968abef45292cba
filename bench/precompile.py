"""Compiles kernels ahead, as many at a time as there are cores, so that what is timed finds them in Triton's cache.

    python -m bench.precompile bench.norm_variants:LAUNCHES tests.kernels.norm_act_launches:CASES

Each argument names a dict of functions that call launchers with CPU tensors, which are not touched: nothing runs on the
device that it compiles for, that of this machine.
"""

import importlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

TARGET = "sm_90"


def target() -> str:
    """Of the GPU here, or of the one that is meant where there is none."""
    import torch

    return "sm_{}{}".format(*torch.cuda.get_device_capability()) if torch.cuda.is_available() else TARGET


def precompile(*sources: str, processes: int | None = None) -> list[str]:
    """Returns what failed, one line each."""
    count = processes or os.cpu_count() or 1
    arch = target()
    command = [sys.executable, "-m", "bench.precompile", "--share"]

    def share(k: int) -> list[str]:
        arguments = [*command, f"{k}/{count}", arch, *sources]
        run = subprocess.run(arguments, capture_output=True, text=True, check=False)
        return run.stdout.splitlines() + ([run.stderr] if run.returncode else [])

    with ThreadPoolExecutor(count) as pool:
        return [line for lines in pool.map(share, range(count)) for line in lines]


def compile_share(k: int, count: int, target: str, sources: list[str]) -> None:
    """Every ``count``-th launch from the k-th; prints what failed."""
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
