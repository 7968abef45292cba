"""What the command line has for nnU-Net: ``fusedseg nnunet-plan`` and ``nnunet-trainers``."""

import argparse

from ..progress import Progress
from .command import Refused, add_command, first_line
from .plan import add_budget


def add_nnunet(commands) -> None:
    command = add_command(
        commands,
        "nnunet-plan",
        summary="say which patch and batch of an nnU-Net plan fit in a GPU's memory",
        description="Reads a plans file of nnU-Net v2, and says which patch and batch fit as nnU-Net trains, and with "
        "nnUNetTrainerFusedseg. Estimated on tensors without values, so no GPU is needed.",
        examples=["fusedseg nnunet-plan nnUNetPlans.json --budget 24GiB"],
        run=_plan,
    )
    command.add_argument("plans", metavar="PLANS", help="a plans file, with dataset.json beside it")
    add_budget(command)
    command.add_argument(
        "--configuration",
        metavar="NAME",
        default="3d_fullres",
        help="the configuration in the plans file (default: 3d_fullres)",
    )
    add_command(
        commands,
        "nnunet-trainers",
        summary="print the folder in which nnU-Net v2 finds fusedseg's trainers",
        description="Prints the folder for nnU-Net's environment variable nnUNet_extTrainer. The name of the trainer, "
        "for nnUNetv2_train -tr, is nnUNetTrainerFusedseg.",
        examples=["fusedseg nnunet-trainers"],
        run=_print_folder,
    )


def _plan(args: argparse.Namespace) -> int:
    # The import stands here, because only this command needs nnU-Net.
    from ..integrations.nnunet.plan import plan

    try:
        with Progress("fusedseg nnunet-plan") as progress:
            options = {"configuration": args.configuration, "reserve": args.reserve, "progress": progress.update}
            print(plan(args.plans, args.budget, **options))
    except (ValueError, ImportError) as error:
        raise Refused(first_line(error)) from error
    return 0


def _print_folder(args: argparse.Namespace) -> int:
    from ..integrations.nnunet import TRAINERS

    print(TRAINERS)
    return 0
