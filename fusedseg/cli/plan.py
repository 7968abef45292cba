"""``fusedseg plan`` finds the largest batch that fits in a budget, or the cheapest way to a wanted batch."""

import argparse
from typing import Any

from ..memory.tables import write_json
from ..planning import plan
from ..progress import Progress
from .command import Parser, Refused, add_command, check_new, first_line
from .models import (
    DTYPES,
    OPTIMIZERS,
    add_choice,
    add_json,
    add_model,
    parse_model,
    place_of,
    split_batch,
)
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
        ],
        run=run,
    )
    add_model(command, "the wanted batch (default: find the largest one)")
    add_budget(command)
    add_choice(command, "--dtype", DTYPES, "fp32", "of parameters and inputs")
    add_options(command)
    add_choice(command, "--optimizer", OPTIMIZERS, "adamw", "whose state has to fit")
    add_json(command)


def add_budget(command: Parser) -> None:
    help_text = "memory of the GPU, such as 16GiB; both names mean the same"
    command.add_argument("--budget", "--gpu", required=True, metavar="SIZE", help=help_text)
    command.add_argument(
        "--reserve",
        type=float,
        default=0.1,
        metavar="SHARE",
        help="share of the budget kept back for fragmentation and unknown workspaces (default: 0.1)",
    )


def run(args: argparse.Namespace) -> int:
    """Returns 0; raises Refused if nothing fits."""
    if any(shape.dtype is not None for shape in args.input):
        raise Refused("--input: plan takes no inputs of integers; `fusedseg profile` does")
    check_new(args.json, args.overwrite)
    source = parse_model(args.model)
    samples, batch = split_batch(source, args.input, args.batch, named=False)
    shapes = [shape.batch_of(batch or 2) for shape in samples]
    options: dict[str, Any] = {"code": source.code} if source.code is not None else {}
    try:
        with Progress("fusedseg plan") as progress:
            found = plan(
                source.build,
                samples,
                args.budget,
                batch=batch,
                convert=lambda model: source.convert(model, shapes),
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
    return 0
