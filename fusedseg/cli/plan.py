"""``fusedseg plan`` finds the largest batch that fits in a budget, or the cheapest way to a wanted batch."""

import argparse
import importlib.util
from typing import Any

from ..memory import curve, plan
from ..memory.export import write_json
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


def add_plan(commands) -> None:
    command = add_command(
        commands,
        "plan",
        summary="find the largest batch that fits in a GPU's memory, or the cheapest way to a wanted batch",
        description="Without a batch: the largest one that fits, as the model is, with fusedseg, under autocast, with "
        "checkpoints, and with all combinations of these. With a batch, in --batch or in the shape: what each "
        "combination needs for it, and the cheapest that fits. Estimated on tensors without values, so no GPU is "
        "needed.",
        examples=[
            "fusedseg plan unet3d_small --input 1,64,64,64 --budget 16GiB",
            "fusedseg plan unet3d_small --input 8,1,64,64,64 --budget 16GiB",
            "fusedseg plan unet3d_small --input 1,64,64,64 --curve curve.png",
        ],
        run=run,
    )
    add_model(command, "the wanted batch (default: find the largest one)")
    add_budget(command, needed=False)
    command.add_argument(
        "--curve",
        metavar="PATH",
        help="draw the bytes that a step keeps against the arithmetic that it repeats, for the budgets of "
        "fusedseg's backend, those of torch.compile, and checkpoints; with or without --budget; needs matplotlib",
    )
    add_choice(command, "--dtype", DTYPES, "fp32", "of parameters and inputs")
    add_choice(command, "--optimizer", OPTIMIZERS, "adamw", "whose state has to fit")
    add_json(command)


def add_budget(command: Parser, needed: bool) -> None:
    help_text = "memory of the GPU, such as 16GiB; both names mean the same"
    command.add_argument("--budget", "--gpu", required=needed, metavar="SIZE", help=help_text)
    command.add_argument(
        "--reserve",
        type=float,
        default=0.1,
        metavar="SHARE",
        help="share of the budget kept back for workspaces and fragmentation (default: 0.1)",
    )


def run(args: argparse.Namespace) -> int:
    """Returns 0; raises Refused if nothing fits."""
    check(args)
    source = parse_model(args.model)
    samples, batch = split_batch(source, args.input, args.batch, named=False)
    found, drawn, figures = None, None, dict[str, Any]()
    try:
        with Progress("fusedseg plan") as progress:
            shapes = [shape.batch_of(batch or 2) for shape in samples]
            common: dict[str, Any] = {
                "convert": lambda model: source.convert(model, shapes),
                "backend": partitions,
                "dtype": DTYPES[args.dtype],
                "progress": progress.update,
            }
            if args.budget is not None:
                options = {"optimizer": OPTIMIZERS[args.optimizer], "reserve": args.reserve, "code": source.code}
                found = plan(source.build, samples, args.budget, batch=batch, **options, **common)
                figures |= found.to_dict()
            if args.curve:
                drawn = curve(source.build, samples, batch=batch or 2, **common)
                figures["curve"] = drawn.to_dict()
                drawn.plot(args.curve, overwrite=args.overwrite)
    except ValueError as error:
        raise Refused(f"{first_line(error)}{place_of(error)}") from error
    # A model may raise any error.
    except Exception as error:
        raise Refused(f"{source.name} does not run: {first_line(error)}{place_of(error)}") from error
    if args.json:
        write_json(figures, args.json, args.overwrite)
    texts = [f"{drawn}\n\nwrote {args.curve}" if drawn else "", str(found) if found else "", source.meaning]
    print("\n\n".join(text for text in texts if text))
    return 0


def check(args: argparse.Namespace) -> None:
    """Raises Refused for all that can be checked before a step runs."""
    if args.budget is None and args.curve is None:
        raise Refused("--budget or --curve is needed; see fusedseg plan --help")
    if any(shape.dtype is not None for shape in args.input):
        raise Refused("--input: plan takes no inputs of integers; `fusedseg profile` does")
    for path in (args.json, args.curve):
        check_new(path, args.overwrite)
    if args.curve and importlib.util.find_spec("matplotlib") is None:
        raise Refused('--curve needs matplotlib: pip install "fusedseg[plot]"')


def partitions(*args: Any) -> Any:
    """``fusedseg.compiler.partitions``, whose import takes seconds."""
    from ..compiler import partitions

    return partitions(*args)
