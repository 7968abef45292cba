"""``python -m fusedseg plan``: the largest batch that fits in a budget, or what it takes to make one fit."""

import argparse
import sys
from pathlib import Path

from ..memory import plan
from ..memory.export import write_json
from ..memory.plan import parse_budget
from .models import DTYPES, FUSED, OPTIMIZERS, Refused, add_common, first_line, parse_model


def add_plan(commands) -> None:
    command = commands.add_parser(
        "plan",
        help="the largest batch that fits in a budget of memory, and the cheapest way to a wanted batch",
        description="The largest batch that fits, as the model is, with fusedseg, under autocast, with checkpoints, "
        "and with all combinations; or, with --batch, what each needs for that batch and the cheapest that fits. "
        "Estimated on tensors without values: no GPU is needed. Takes a minute for a large network.",
    )
    add_common(command, "of one sample, without the batch, such as 3,256,256")
    command.add_argument("--budget", required=True, help="memory of the GPU, such as 16GiB")
    command.add_argument("--batch", type=int, help="the wanted batch (default: the largest that fits)")
    command.add_argument("--optimizer", choices=list(OPTIMIZERS), default="adamw", help="(default: adamw)")
    command.add_argument(
        "--reserve",
        type=float,
        default=0.1,
        help="share of the budget kept back for workspaces and fragmentation (default: 0.1)",
    )
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Returns 0, or 2 where it was refused, as where nothing fits."""
    try:
        if args.json and Path(args.json).exists() and not args.overwrite:
            raise Refused(f"{args.json} exists: choose another path, or pass --overwrite")
        spec = parse_model(args.model, [(2, *shape) for shape in args.input])
        try:
            parse_budget(args.budget)
            found = plan(
                spec.build,
                args.input,
                args.budget,
                batch=args.batch,
                convert=spec.convert,
                converted=FUSED,
                dtype=DTYPES[args.dtype],
                autocast=DTYPES[args.amp_dtype],
                optimizer=OPTIMIZERS[args.optimizer],
                reserve=args.reserve,
            )
        except ValueError as error:
            raise Refused(str(error)) from error
        # whatever a stranger's model raises
        except Exception as error:
            raise Refused(f"{spec.name} does not run: {first_line(error)}") from error
        if args.json:
            write_json(found.to_dict(), args.json, args.overwrite)
    except (Refused, OSError) as refusal:
        print(f"fusedseg plan: {refusal}", file=sys.stderr)
        return 2
    print(found)
    print(f"fusedseg stands for {spec.how}.")
    return 0
