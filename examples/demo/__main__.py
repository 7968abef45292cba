"""The command line of the demo: ``python -m examples.demo --help``."""

import sys
from collections.abc import Sequence
from pathlib import Path

from fusedseg.cli.command import Parser

from .run import run

DEMOS = ("slices", "volume", "encoders")


def parser() -> Parser:
    found = Parser(
        prog="demo",
        description="Trains a network on the MNI152 brain template twice, in eager mode and with the backend of "
        "fusedseg, from the same weights on the same batches. It prints the overlap with held-out truth, the memory "
        "and the time of both, and writes a picture and the figures. Nothing is downloaded, and no GPU is needed.",
        epilog="examples:\n"
        "  python -m examples.demo slices\n"
        "  python -m examples.demo volume --steps 20 --out volume_demo\n"
        "  python -m examples.demo slices --bits 4 --out bits_demo",
    )
    found.add_argument(
        "name",
        nargs="?",
        default=DEMOS[0],
        choices=DEMOS,
        metavar="NAME",
        help="slices: a 2D U-Net; volume: a 3D U-Net on patches of 48×48×48; encoders: two encoders, for the T1 image "
        "and a motor activation map (default: slices)",
    )
    found.add_argument("--steps", type=int, metavar="N", help="training steps (default: those of the demo)")
    found.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", metavar="NAME", help="cpu or cuda (default: cpu)"
    )
    found.add_argument(
        "--out",
        type=Path,
        default=Path("fusedseg_demo"),
        metavar="FOLDER",
        help="where to write (default: fusedseg_demo)",
    )
    found.add_argument("--overwrite", action="store_true", help="replace the files of an earlier run")
    found.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and batches (default: 0)")
    found.add_argument(
        "--bits",
        type=int,
        choices=(8, 4),
        help="fusedseg's network keeps its activations in so many bits a value, with noise in the gradient "
        "(default: exact)",
    )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(sys.argv[1:] if argv is None else argv)
    return run(args.name, args.device, args.steps, args.out, args.seed, args.overwrite, args.bits)


if __name__ == "__main__":
    sys.exit(main())
