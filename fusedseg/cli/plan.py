"""``fusedseg plan`` finds the largest batch that fits in a budget, or the cheapest way to a wanted batch."""

import argparse
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..memory import Curve, Plan, curve, plan
from ..memory.export import write_json
from ..memory.plan import parse_budget
from ..progress import Progress
from .command import Refused, add_command, first_line
from .models import (
    DTYPES,
    FUSED,
    OPTIMIZERS,
    ModelSource,
    Shapes,
    add_choice,
    add_common,
    check_new,
    parse_model,
    place_of,
    split_batch,
)
from .nnunet import run_plan


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
            "fusedseg plan --nnunet nnUNetPlans.json --budget 24GiB",
        ],
        run=run,
    )
    add_common(command, "the wanted batch (default: find the largest one)", needed=False)
    command.add_argument(
        "--budget",
        "--gpu",
        type=budget,
        metavar="SIZE",
        help="memory of the GPU, such as 16GiB; both names mean the same",
    )
    command.add_argument(
        "--curve",
        metavar="PATH",
        help="draw the bytes that a step keeps against the arithmetic that it repeats, for the budgets of "
        "fusedseg's backend, those of torch.compile, and checkpoints; with or without --budget; needs matplotlib",
    )
    add_choice(command, "--optimizer", OPTIMIZERS, "adamw", "whose state has to fit")
    command.add_argument(
        "--reserve",
        type=share,
        default=0.1,
        metavar="SHARE",
        help="share of the budget kept back for workspaces and fragmentation (default: 0.1)",
    )
    command.add_argument(
        "--nnunet",
        metavar="PLANS",
        help="instead of MODEL and --input: a plans file of nnU-Net v2 with dataset.json beside it; says which patch "
        "and batch fit as nnU-Net trains, and with nnUNetTrainerFusedseg",
    )
    command.add_argument(
        "--configuration",
        metavar="NAME",
        help="the configuration in the plans file of --nnunet (default: 3d_fullres)",
    )


def budget(text: str) -> int:
    try:
        return parse_budget(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(first_line(error)) from error


def share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < 1.0:
        raise argparse.ArgumentTypeError(f"expected a number of at least 0 and below 1, got {text!r}")
    return value


def run(args: argparse.Namespace) -> int:
    """Returns 0, or 2 if the command was refused or nothing fits."""
    try:
        check(args)
        if args.nnunet is not None:
            return run_plan(args)
        source = parse_model(args.model)
        samples, batch = split_batch(source, args.input, args.batch, named=False)
        try:
            with Progress("fusedseg plan") as progress:
                found, drawn = found_and_drawn(source, samples, batch, args, progress.update)
        except ValueError as error:
            raise Refused(f"{first_line(error)}{place_of(error)}") from error
        # A model may raise any error.
        except Exception as error:
            raise Refused(f"{source.name} does not run: {first_line(error)}{place_of(error)}") from error
        if args.json:
            figures = {} if found is None else found.to_dict()
            write_json(figures if drawn is None else {**figures, "curve": drawn.to_dict()}, args.json, args.overwrite)
        if drawn is not None:
            try:
                drawn.plot(args.curve, overwrite=args.overwrite)
            except (ImportError, ValueError) as error:
                raise Refused(f"--curve: {first_line(error)}") from error
    except (Refused, OSError) as refusal:
        print(f"fusedseg plan: {refusal}", file=sys.stderr)
        return 2
    if drawn is not None:
        print(f"{drawn}\n\nwrote {args.curve}\n" if found else f"{drawn}\n\nwrote {args.curve}")
    if found is not None:
        print(replace(found, remarks=(source.meaning,) if source.meaning else ()))
    return 0


def check(args: argparse.Namespace) -> None:
    """Raises Refused for all that can be checked before a step runs."""
    if args.budget is None and (args.curve is None or args.nnunet is not None):
        raise Refused("--budget is needed, or --curve with a model; see fusedseg plan --help")
    if args.nnunet is not None:
        return
    if args.model is None or args.input is None:
        raise Refused("MODEL and --input are needed, or --nnunet; see fusedseg plan --help")
    if args.configuration is not None:
        raise Refused("--configuration belongs to --nnunet")
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


def found_and_drawn(
    source: ModelSource, samples: Shapes, batch: int | None, args: argparse.Namespace, say: Callable[[str], None]
) -> tuple[Plan | None, Curve | None]:
    """The plan and the curve, as far as the arguments ask for them."""
    common: dict[str, Any] = {
        "convert": source.convert([shape.batch_of(batch or 2) for shape in samples]),
        "backend": partitions,
        "dtype": DTYPES[args.dtype],
        "progress": say,
    }
    found, drawn = None, None
    if args.budget is not None:
        found = plan(
            source.build,
            samples,
            args.budget,
            batch=batch,
            bits=(8, 4),
            converted=FUSED,
            code=source.code,
            autocast=DTYPES[args.amp_dtype],
            optimizer=OPTIMIZERS[args.optimizer],
            reserve=args.reserve,
            **common,
        )
    if args.curve:
        drawn = curve(source.build, samples, batch=batch or 2, **common)
    return found, drawn
