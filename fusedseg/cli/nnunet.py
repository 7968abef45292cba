"""What the command line has for nnU-Net: ``fusedseg nnunet-trainers``, and ``fusedseg plan --nnunet``."""

import argparse
import sys

from ..progress import Progress
from .command import Refused, add_command, first_line


def add_nnunet_trainers(commands) -> None:
    add_command(
        commands,
        "nnunet-trainers",
        summary="print the folder in which nnU-Net v2 finds fusedseg's trainers",
        description="Prints the folder for nnU-Net's environment variable nnUNet_extTrainer. The name of the trainer, "
        "for nnUNetv2_train -tr, is nnUNetTrainerFusedseg.",
        examples=["fusedseg nnunet-trainers"],
        run=_print_folder,
    )


def _print_folder(args: argparse.Namespace) -> int:
    from ..integrations.nnunet import TRAINERS

    print(TRAINERS)
    return 0


def run_plan(args: argparse.Namespace) -> int:
    """Runs ``fusedseg plan --nnunet``.  Returns 0, or 2 if the command was refused."""
    # The import stands here, because only this command needs nnU-Net.
    from ..integrations.nnunet.plan import plan

    try:
        for option in ("model", "input", "batch", "json", "curve"):
            if getattr(args, option) is not None:
                name = "MODEL" if option == "model" else f"--{option}"
                raise Refused(f"{name} does not belong to --nnunet, which reads the plans file")
        with Progress("fusedseg plan") as progress:
            found = plan(
                args.nnunet,
                args.budget,
                configuration=args.configuration or "3d_fullres",
                reserve=args.reserve,
                progress=progress.update,
            )
    except (Refused, ValueError, ImportError) as error:
        print(f"fusedseg plan: {error if isinstance(error, Refused) else first_line(error)}", file=sys.stderr)
        return 2
    print(found)
    return 0
