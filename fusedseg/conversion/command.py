"""``python -m fusedseg convert``: what conversion would do to a model, and what it would save."""

import argparse
import importlib

import torch
from torch import nn

from .convert import MODES, convert

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def add_convert(commands) -> None:
    command = commands.add_parser(
        "convert",
        help="what fusedseg.convert replaces in a model, why not the rest, and the memory before and after",
        description="Builds a model, converts it, and prints the report: what was replaced, what is rebuilt in "
        "backward, what was left and why, and the bytes of a training step before and after, counted on tensors "
        "without values. Nothing is trained or written.",
    )
    command.add_argument(
        "model", help="package.module:name of a model, or of a class or function that makes one without arguments"
    )
    command.add_argument(
        "--input",
        action="append",
        required=True,
        type=_shape,
        metavar="N,C,...",
        help="shape of an input; once for each argument of the model's forward",
    )
    command.add_argument("--dtype", choices=DTYPES, default="fp32", help="of model and inputs (default: fp32)")
    command.add_argument("--mode", choices=MODES, default="exact", help="leaky: ReLU after a norm becomes LeakyReLU")
    command.add_argument("--slope", type=float, default=0.01, help="of mode leaky (default: 0.01)")
    command.add_argument("--verify", action="store_true", help="also compare outputs and gradients on random inputs")
    command.add_argument("--json", action="store_true", help="print the report as JSON")
    command.set_defaults(run=lambda args: _run(command, args))


def _shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(size) for size in text.split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise argparse.ArgumentTypeError(f"must be positive sizes such as 2,3,64,64, got {text!r}")
    return shape


def load_model(spec: str) -> nn.Module:
    """The model that ``package.module:name`` names or makes; ValueError where it does not."""
    module_name, _, name = spec.partition(":")
    if not module_name or not name:
        raise ValueError(f"model must be given as package.module:name, got {spec!r}")
    try:
        found = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"model {spec!r}: cannot import {module_name}: {error}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"model {spec!r}: {module_name} has no {name}")
        found = getattr(found, part)
    if not isinstance(found, nn.Module):
        try:
            found = found()  # type: ignore[operator]
        except Exception as error:
            raise ValueError(f"model {spec!r}: {type(error).__name__}: {error}") from error
    if not isinstance(found, nn.Module):
        raise ValueError(f"model {spec!r}: must be or make an nn.Module, got {type(found).__name__}")
    return found


def _run(command: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    dtype = DTYPES[args.dtype]
    inputs = [torch.randn(shape, dtype=dtype) for shape in args.input]
    try:
        model = load_model(args.model).to(dtype)
        report = convert(model, example_inputs=inputs, mode=args.mode, slope=args.slope)
    except ValueError as error:
        command.error(str(error))
    print(report.to_json() if args.json else report)
    if args.verify:
        print(f"\n{report.verify(inputs)}")
    return 0
