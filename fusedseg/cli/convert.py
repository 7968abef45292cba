"""``fusedseg convert`` shows what conversion would change in a model, and how many bytes it would save."""

import argparse

import torch

from ..conversion import convert
from ..conversion.convert import MODES
from ..memory.export import open_new
from ..progress import Progress
from .command import Refused, add_command, check_new, first_line
from .models import DTYPES, add_choice, add_json, add_model, batched, build, parse_model, place_of

# The options of the command that are arguments of ``fusedseg.convert`` under the same name.
OPTIONS = ("mode", "slope", "inplace")
CONVERTED_DTYPES = {**DTYPES, "fp64": torch.float64}


def add_convert(commands) -> None:
    command = add_command(
        commands,
        "convert",
        summary="show what fusedseg.convert replaces in a model, and what it saves",
        description="Builds a model, converts it, and prints the report: what was replaced, what is rebuilt in "
        "backward, what was left as it is and why, and the bytes of a training step before and after, counted on "
        "tensors without values. Nothing is trained.",
        examples=[
            "fusedseg convert mypackage.nets:build --input 8,3,256,256 --verify",
        ],
        run=run,
    )
    add_model(command, "the batch, if SHAPE has none (default: 1)")
    add_choice(command, "--dtype", CONVERTED_DTYPES, "fp32", "of the model and its inputs")
    command.add_argument(
        "--mode",
        choices=MODES,
        default="exact",
        metavar="NAME",
        help="exact: the function stays the same; leaky: ReLU after a norm becomes LeakyReLU (default: exact)",
    )
    command.add_argument(
        "--slope", type=float, default=0.01, metavar="NUMBER", help="of the LeakyReLU of mode leaky (default: 0.01)"
    )
    command.add_argument(
        "--no-inplace",
        dest="inplace",
        action="store_false",
        help="let no norm write over its input, for a model whose flow changes later",
    )
    command.add_argument(
        "--verify", action="store_true", help="also compare outputs and gradients, on real random inputs"
    )
    add_json(command)


def run(args: argparse.Namespace) -> int:
    """Returns 0; raises Refused if the command cannot do its task."""
    dtype = CONVERTED_DTYPES[args.dtype]
    verified = None
    check_new(args.json, args.overwrite)
    spec = parse_model(args.model)
    shapes = batched(spec, args)
    model = build(spec)
    with Progress("fusedseg convert") as progress:
        try:
            options = {name: getattr(args, name) for name in OPTIONS}
            inputs = [shape.example(dtype) for shape in shapes]
            report = convert(model.to(dtype), example_inputs=inputs, **options)
            if args.verify:
                progress.update("comparing outputs and gradients")
                verified = report.verify(inputs)
        # A model may raise any error.
        except Exception as error:
            raise Refused(f"{first_line(error)}{place_of(error)}") from error
    print(report)
    if verified is not None:
        print(f"\n{verified}")
    if args.json:
        with open_new(args.json, args.overwrite) as file:
            file.write(report.to_json().encode())
        print(f"\nwrote {args.json}")
    return 0
