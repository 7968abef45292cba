"""``fusedseg profile`` shows where the bytes of one training step go."""

import argparse
import importlib.util
from typing import Any

import torch

from ..memory.tables import write_json
from ..planning import profile
from ..progress import Progress
from .command import Parser, Refused, add_command, check_new, first_line
from .models import DTYPES, OPTIMIZERS, add_choice, add_json, add_model, batched, parse_model, place_of, shapes_text

CODEGENS = ("auto", "aten", "inductor")


def add_profile(commands) -> None:
    command = add_command(
        commands,
        "profile",
        summary="show what a training step keeps and needs, in each way to run it",
        description="Counts one training step in eager mode, converted by fusedseg.convert, with torch.compile and "
        'with its backend "fusedseg": what is kept for backward, by which module, and the most bytes at once. Nothing '
        "runs: tensors have no values, so neither a GPU nor the memory is needed.",
        examples=[
            "fusedseg profile unet3d_small --input 2,1,64,64,64",
            "fusedseg profile mypackage.nets:build --input 8,3,256,256 --amp --bits 8",
            "fusedseg profile nnUNetPlans.json --configuration 3d_fullres --amp",
        ],
        run=run,
    )
    add_model(command, "the batch, if SHAPE has none (default: 1)")
    add_choice(command, "--dtype", DTYPES, "fp32", "of parameters and inputs")
    command.add_argument("--amp", action="store_true", help="run forward under autocast to float16")
    add_options(command)
    command.add_argument("--bits", type=int, choices=(8, 4), help="the backend's option bits")
    command.add_argument("--budget", metavar="BUDGET", help="the backend's option budget: 0.3, 6GiB or 'peak 10GiB'")
    add_choice(command, "--optimizer", OPTIMIZERS, "none", "whose state is there before the step")
    command.add_argument("--plot", metavar="PATH", help="draw memory over the step; needs matplotlib")
    add_json(command)


def add_options(command: Parser) -> None:
    """Adds the options of the backend that every command has."""
    add_choice(command, "--codegen", CODEGENS, "auto", "the backend's option codegen")


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """The options of the backend that a user has asked for."""
    options: dict[str, Any] = {} if args.codegen == "auto" else {"codegen": args.codegen}
    if args.bits is not None:
        options["bits"] = args.bits
    if args.budget is not None:
        try:
            options["budget"] = float(args.budget)
        except ValueError:
            options["budget"] = args.budget
    return options


def run(args: argparse.Namespace) -> int:
    """Returns 0; raises Refused if the command cannot do its task."""
    for path in (args.json, args.plot):
        check_new(path, args.overwrite)
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        raise Refused('--plot needs matplotlib: pip install "fusedseg[plot]"')
    source = parse_model(args)
    shapes = batched(source, args)
    with Progress("fusedseg profile") as progress:
        try:
            found = profile(
                source.build,
                *(shape.without_values() for shape in shapes),
                options=options_of(args),
                autocast=torch.float16 if args.amp else None,
                dtype=DTYPES[args.dtype],
                optimizer=OPTIMIZERS[args.optimizer],
                convert=source.convert,
                progress=progress.update,
            )
        # A model, and the compiler, may raise any error.
        except Exception as error:
            raise Refused(
                f"{source.name} does not run on {shapes_text(shapes)} {args.dtype}: "
                f"{first_line(error)}{place_of(error)}"
            ) from error
    if args.json:
        write_json(found.to_dict(), args.json, args.overwrite)
    if args.plot:
        try:
            found.plot(args.plot, overwrite=args.overwrite)
        except ValueError as error:
            raise Refused(f"--plot: {first_line(error)}") from error
    print(f"{source.name} on {shapes_text(shapes)} {args.dtype}{', autocast to fp16' if args.amp else ''}\n\n{found}")
    written = [path for path in (args.json, args.plot) if path]
    texts = [source.meaning, f"wrote {', '.join(written)}" if written else ""]
    print(*(f"\n{text}" for text in texts if text), sep="")
    return 0
