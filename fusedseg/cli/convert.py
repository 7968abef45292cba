"""``python -m fusedseg convert``: what conversion would do to a model, and what it would save."""

import argparse
import sys

import torch
from torch import nn

from ..conversion import convert
from ..conversion.convert import MODES
from .models import DTYPES, Refused, add_model, first_line, parse_model

CONVERTED_DTYPES = {**DTYPES, "fp64": torch.float64}


def add_convert(commands) -> None:
    command = commands.add_parser(
        "convert",
        help="what fusedseg.convert replaces in a model, why not the rest, and the memory before and after",
        description="Builds a model, converts it, and prints the report: what was replaced, what is rebuilt in "
        "backward, what was left and why, and the bytes of a training step before and after, counted on tensors "
        "without values. Nothing is trained or written.",
    )
    add_model(command, "with the batch, such as 8,3,256,256")
    command.add_argument(
        "--dtype", choices=list(CONVERTED_DTYPES), default="fp32", help="of model and inputs (default: fp32)"
    )
    command.add_argument("--mode", choices=MODES, default="exact", help="leaky: ReLU after a norm becomes LeakyReLU")
    command.add_argument("--slope", type=float, default=0.01, help="of mode leaky (default: 0.01)")
    command.add_argument("--verify", action="store_true", help="also compare outputs and gradients on random inputs")
    command.add_argument("--json", action="store_true", help="print the report as JSON")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Returns 0, or 2 where it was refused."""
    dtype = CONVERTED_DTYPES[args.dtype]
    inputs = [torch.randn(shape, dtype=dtype) for shape in args.input]
    try:
        spec = parse_model(args.model, args.input)
        try:
            model = spec.build()
        # whatever a stranger's model raises
        except Exception as error:
            raise Refused(f"{spec.name} cannot be built: {first_line(error)}") from error
        if not isinstance(model, nn.Module):
            raise Refused(f"MODEL {spec.name!r} must be a module or build one, and built a {type(model).__name__}")
        try:
            report = convert(model.to(dtype), example_inputs=inputs, mode=args.mode, slope=args.slope)
        except ValueError as error:
            raise Refused(str(error)) from error
    except Refused as refusal:
        print(f"fusedseg convert: {refusal}", file=sys.stderr)
        return 2
    print(report.to_json() if args.json else report)
    if args.verify:
        print(f"\n{report.verify(inputs)}")
    return 0
