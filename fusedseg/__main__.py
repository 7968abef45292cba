"""``python -m fusedseg``: the command line."""

import argparse
import sys
from collections.abc import Sequence

from .doctor import doctor


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fusedseg", description=sys.modules["fusedseg"].__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    command = commands.add_parser(
        "doctor",
        help="versions, the backend of each device and why, and whether the kernels work here",
        description="Prints versions, the backend that serves each device and why, and whether the kernels work: run "
        "and compared with PyTorch on each GPU, or compiled for absent ones. Exits with 1 where something fails.",
    )
    command.set_defaults(run=doctor)
    return parser.parse_args(argv).run()


if __name__ == "__main__":
    sys.exit(main())
