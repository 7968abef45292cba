"""``fusedseg plan`` finds the largest batch that fits in a budget, or the cheapest way to a wanted batch."""

import argparse
import math
from typing import Any

from ..memory.tables import wrapped, write_json
from ..planning import Plan, plan
from ..planning.ways import BACKEND, EAGER, Way
from ..progress import Progress
from .command import Refused, add_command, check_new, first_line
from .models import DTYPES, OPTIMIZERS, add_choice, add_json, add_model, parse_model, place_of, split_batch
from .profile import add_options


def add_plan(commands) -> None:
    command = add_command(
        commands,
        "plan",
        summary="find the largest batch that fits in a GPU's memory, or the cheapest way to a wanted batch",
        description="Without a batch: the largest one that fits, as the model is, converted, compiled by the backend "
        "fusedseg with its bits and budgets, and all of these under autocast. With a batch, in --batch or in the "
        "shape: what each way needs for it, and the cheapest that fits. Estimated on tensors without values, so no "
        "GPU is needed.",
        examples=[
            "fusedseg plan unet3d_small --input 1,64,64,64 --budget 16GiB",
            "fusedseg plan unet3d_small --input 8,1,64,64,64 --budget 16GiB",
            "fusedseg plan nnUNetPlans.json --configuration 3d_fullres --budget 24GiB",
        ],
        run=run,
    )
    add_model(command, "the wanted batch (default: find the largest one)")
    help_text = "memory of the GPU, such as 16GiB; both names mean the same"
    command.add_argument("--budget", "--gpu", required=True, metavar="SIZE", help=help_text)
    command.add_argument(
        "--reserve",
        type=float,
        default=0.1,
        metavar="SHARE",
        help="share of the budget kept back for fragmentation and unknown workspaces (default: 0.1)",
    )
    add_choice(command, "--dtype", DTYPES, "fp32", "of parameters and inputs")
    add_options(command)
    add_choice(command, "--optimizer", OPTIMIZERS, "adamw", "whose state has to fit")
    add_json(command)


def run(args: argparse.Namespace) -> int:
    """Returns 0; raises Refused if nothing fits."""
    if any(shape.dtype is not None for shape in args.input):
        raise Refused("--input: plan takes no inputs of integers; `fusedseg profile` does")
    check_new(args.json, args.overwrite)
    source = parse_model(args)
    samples, batch = split_batch(source, args, named=False)
    options: dict[str, Any] = {"code": source.code} if source.code is not None else {}
    try:
        with Progress("fusedseg plan") as progress:
            found = plan(
                source.build,
                samples,
                args.budget,
                batch=batch,
                convert=source.convert,
                codegen=None if args.codegen == "auto" else args.codegen,
                dtype=DTYPES[args.dtype],
                optimizer=OPTIMIZERS[args.optimizer],
                reserve=args.reserve,
                progress=progress.update,
                **options,
            )
    except ValueError as error:
        raise Refused(f"{first_line(error)}{place_of(error)}") from error
    # A model may raise any error.
    except Exception as error:
        raise Refused(f"{source.name} does not run: {first_line(error)}{place_of(error)}") from error
    if args.json:
        write_json(found.to_dict(), args.json, args.overwrite)
    print(found)
    if source.meaning:
        print(f"\n{source.meaning}")
    if source.sample is not None:
        print(for_nnunet(found))
    return 0


def for_nnunet(found: Plan) -> str:
    """With which budget nnU-Net's planner, which knows what stock networks need, plans a step that fits with fusedseg.

    It is told the budget, enlarged by the ratio of the stock step's bytes to ours; both train under autocast.  "" if
    one of them has not been counted.
    """
    totals = {option.label: option.total for option in found.options}
    stock, ours = (totals.get(Way(kind, amp=True).label) for kind in (EAGER, BACKEND))
    if stock is None or ours is None:
        return ""
    return wrapped(
        "\nA larger network input for this GPU, trained by nnUNetTrainerFusedseg: `nnUNetv2_plan_experiment "
        f"-gpu_memory_target {math.floor(found.budget / 1e9 * stock / ours)}` and a name of your own for the plans "
        "(`-overwrite_plans_name`). The loss is not counted: nnU-Net's own needs more with many classes, ours does not."
    )
