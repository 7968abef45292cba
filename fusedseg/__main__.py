"""The command line: ``fusedseg``, or ``python -m fusedseg``."""

import argparse
import errno
import io
import os
import sys
from collections.abc import Sequence

from . import __version__
from .cli import Parser, add_command, add_plan, add_profile
from .cli.command import Refused
from .cli.models import add_json, place_of
from .doctor import doctor


def main(argv: Sequence[str] | None = None) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        # An encoding without × or █ prints ? there.
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            return _run(parser().parse_args(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        print("fusedseg: interrupted", file=sys.stderr)
        # Shells report 130 for a program that SIGINT has ended.
        return 130
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        # Python writes the rest of the output when it ends, and that would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:
            # The reader, such as `head -1`, wants no more.  Shells report 141 for a program that SIGPIPE has ended.
            return 141
        print(f"fusedseg: {error.strerror}", file=sys.stderr)
        return 1


def _run(args: argparse.Namespace) -> int:
    try:
        return args.run(args)
    except Refused as refusal:
        print(f"{args.command}: {refusal}", file=sys.stderr)
        return 2
    except SystemExit as end:
        # No command raises it: the code of MODEL has.
        print(f"{args.command}: MODEL called sys.exit({end.code!r}){place_of(end)}", file=sys.stderr)
        return 2


def parser() -> Parser:
    top = Parser(
        prog="fusedseg",
        description="fusedseg: training of segmentation networks in less memory. `python -m fusedseg` is the same "
        "command.",
        epilog="examples:\n"
        "  fusedseg doctor\n"
        "  fusedseg profile unet3d_small --input 2,1,64,64,64\n"
        "  fusedseg COMMAND --help",
    )
    top.add_argument("--version", action="version", version=f"fusedseg {__version__}")
    commands = top.add_subparsers(required=True, metavar="COMMAND", title="commands")
    add_doctor(commands)
    add_profile(commands)
    add_plan(commands)
    add_trainers(commands)
    return top


def add_doctor(commands) -> None:
    command = add_command(
        commands,
        "doctor",
        summary="check this installation: versions, backends, and whether the kernels work",
        description="Prints versions, and the backend that serves each device and why. With --gpu it also tests the "
        "kernels and a compiled network on each GPU, within two minutes. Where the network is wrong, it says what to "
        "leave out. The last line says whether all is well; if not, the exit status is 1.",
        examples=["fusedseg doctor", "fusedseg doctor --gpu --json fusedseg.json"],
        run=lambda args: doctor(args.gpu, args.json, args.overwrite),
    )
    command.add_argument(
        "--gpu",
        action="store_true",
        help="test every family of kernels, and a compiled network, on each kind of GPU, in another process, against "
        "PyTorch in float64",
    )
    add_json(command)


def add_trainers(commands) -> None:
    add_command(
        commands,
        "nnunet-trainers",
        summary="print the folder in which nnU-Net v2 finds fusedseg's trainers",
        description="Prints the folder for nnU-Net's environment variable nnUNet_extTrainer. The name of the trainer, "
        "for nnUNetv2_train -tr, is nnUNetTrainerFusedseg.",
        examples=["fusedseg nnunet-trainers"],
        run=_print_trainers,
    )


def _print_trainers(args: argparse.Namespace) -> int:
    # The compiler, which the trainers import, takes seconds.
    from .integrations.nnunet import TRAINERS

    print(TRAINERS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
