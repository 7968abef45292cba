"""The command line of the hunt: ``python -m tests.hunt --seeds 0:20000 --jobs 2``."""

import argparse
import resource
import sys
from pathlib import Path

import torch

from tests.hunt.crew import KINDS, hunt, text_of, work

MEMORY = 4 << 30


def seeds_of(text: str) -> range:
    first, _, last = text.partition(":")
    return range(int(first), int(last))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hunt", description=__doc__)
    of_kinds = (
        "networks that are converted; programs and networks that are compiled, networks also with a budget or with "
        "bits; bits: pieces of networks and losses with bits"
    )
    parser.add_argument("--kind", choices=KINDS, default="networks", help=of_kinds)
    parser.add_argument(
        "--seeds", type=seeds_of, default=range(200), help="first:last, without the last; default 0:200"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--print", type=int, metavar="SEED", help="prints one program, shrunk if it fails, and no more")
    parser.add_argument("--whole", action="store_true", help="with --print: as it was made")
    # The crew passes this to its workers.
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    # A shrunk program may ask for much larger tensors.
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    if options.print is not None:
        print(text_of(options.kind, options.print, options.whole))
        return 0
    if options.worker is not None:
        work(options.kind, options.seeds, options.worker)
        return 0
    report = hunt(options.kind, options.seeds, options.jobs)
    print(report)
    print(report.programs())
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
