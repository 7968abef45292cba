"""``python -m fusedseg``: the command line."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .cli import add_convert, add_plan, add_profile
from .doctor import doctor

DEMOS = ("slices", "volume", "encoders")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fusedseg", description=sys.modules["fusedseg"].__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    add_doctor(commands)
    add_demo(commands)
    add_convert(commands)
    add_profile(commands)
    add_plan(commands)
    args = parser.parse_args(argv)
    return args.run(args)


def add_doctor(commands) -> None:
    command = commands.add_parser(
        "doctor",
        help="versions, the backend of each device and why, and whether the kernels work here",
        description="Prints versions, the backend that serves each device and why, and whether the kernels work: run "
        "and compared with PyTorch on each GPU, or compiled for absent ones. Exits with 1 where something fails.",
    )
    command.set_defaults(run=lambda args: doctor())


def add_demo(commands) -> None:
    command = commands.add_parser(
        "demo",
        help="trains a network on real images with eager PyTorch and with fusedseg, and compares them",
        description="Trains a network on the MNI152 brain template twice, of stock modules and of fusedseg's, from the "
        "same weights on the same batches; prints the overlap with held-out truth, memory and time of both, and "
        "writes a picture and the figures. Nothing is downloaded. A few minutes on two CPU cores.",
    )
    command.add_argument(
        "name",
        nargs="?",
        default=DEMOS[0],
        choices=DEMOS,
        help="slices: 2D U-Net; volume: 3D U-Net on patches of 48x48x48; "
        "encoders: two encoders, for the T1 image and a motor activation map",
    )
    command.add_argument("--steps", type=int, help="training steps (default: those of the demo)")
    command.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to train (default: cpu)")
    command.add_argument(
        "--out", type=Path, default=Path("fusedseg_demo"), help="folder to write to (default: fusedseg_demo)"
    )
    command.add_argument("--overwrite", action="store_true", help="replace files of an earlier run")
    command.add_argument("--seed", type=int, default=0, help="of weights and batches (default: 0)")
    command.add_argument(
        "--distributed",
        action="store_true",
        help="instead, train fusedseg's network alone in the processes of torchrun, with synchronised statistics, and "
        "compare its losses with those of one process: torchrun --nproc-per-node=2 -m fusedseg demo --distributed",
    )
    command.set_defaults(run=_demo)


def _demo(args: argparse.Namespace) -> int:
    # needs the packages of fusedseg[demo], and nobody else does
    from .demo import run

    return run(args.name, args.device, args.steps, args.out, args.seed, args.overwrite, args.distributed)


if __name__ == "__main__":
    sys.exit(main())
