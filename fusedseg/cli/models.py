"""The model that MODEL names on the command line, and what fusedseg makes of it."""

import argparse
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from .. import unet
from ..conversion import convert
from ..memory.strategy import Convert

PRESETS: dict[str, Callable[..., nn.Module]] = {
    "lidar_optical_unet": unet.lidar_optical_unet,
    "unet3d_large": unet.unet3d_large,
    "unet3d_small": unet.unet3d_small,
}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
OPTIMIZERS = {"none": None, "sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
FUSED = "fusedseg"


class Refused(Exception):
    """What was asked for cannot be done; the message says why and what to do."""


@dataclass(frozen=True)
class Spec:
    """build: makes the model of stock modules.  convert: makes of such a model what fusedseg has to offer."""

    name: str
    build: Callable[[], nn.Module]
    convert: Convert
    how: str


def parse_model(text: str, shapes: Sequence[tuple[int, ...]]) -> Spec:
    """shapes: of the model's inputs, batch and all."""
    if text in PRESETS:
        make = PRESETS[text]
        return Spec(text, partial(make, plain=True), partial(_fused, make), "the preset's fused blocks")
    module, colon, name = text.partition(":")
    if not colon or not module or not name:
        presets = ", ".join(PRESETS)
        raise Refused(f"MODEL must be one of {presets}, or package.module:callable, got {text!r}")
    # as with any `python -m`: what lies in the working folder can be imported
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise Refused(f"MODEL {text!r}: cannot import {module}: {error}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise Refused(f"MODEL {text!r}: {module} has no {name}")
        found = getattr(found, part)
    if isinstance(found, nn.Module):
        return Spec(text, lambda: found, partial(converted, shapes), CONVERTED)
    if not callable(found):
        raise Refused(f"MODEL {text!r}: {name} must be a module or build one, and is a {type(found).__name__}")
    _check_signature(text, found)
    return Spec(text, found, partial(converted, shapes), CONVERTED)


CONVERTED = "fusedseg.convert(model)"


def converted(shapes: Sequence[tuple[int, ...]], model: nn.Module) -> nn.Module:
    """The model, which nobody else uses, after ``fusedseg.convert``."""
    convert(model, example_inputs=[torch.empty(shape, dtype=_dtype(model)) for shape in shapes])
    return model


def _fused(make: Callable[[], nn.Module], model: nn.Module) -> nn.Module:
    """The preset in the plain twin's dtype; built in it, since parameters without values are not converted."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(_dtype(model))
    try:
        return make()
    finally:
        torch.set_default_dtype(before)


def _dtype(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def _check_signature(text: str, build: Callable) -> None:
    try:
        inspect.signature(build).bind()
    except TypeError as error:
        raise Refused(f"MODEL {text!r} is called without arguments, and needs some: {error}") from error
    except ValueError:
        # a builtin without a signature: calling it will tell
        return


def parse_shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(size) for size in text.replace("x", ",").replace("×", ",").split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise argparse.ArgumentTypeError(f"a shape is positive integers joined by commas, got {text!r}")
    return shape


def add_model(command: argparse.ArgumentParser, shape: str) -> None:
    command.add_argument(
        "model", metavar="MODEL", help=f"{', '.join(PRESETS)}, or package.module:callable that returns a model"
    )
    command.add_argument(
        "--input",
        type=parse_shape,
        action="append",
        required=True,
        metavar="SHAPE",
        help=f"{shape}; again for each input",
    )


def add_common(command: argparse.ArgumentParser, shape: str) -> None:
    add_model(command, shape)
    command.add_argument(
        "--dtype", choices=list(DTYPES), default="fp32", help="of parameters and inputs (default: fp32)"
    )
    command.add_argument("--amp-dtype", choices=["fp16", "bf16"], default="fp16", help="of autocast (default: fp16)")
    command.add_argument("--json", metavar="PATH", help="writes the figures")
    command.add_argument("--overwrite", action="store_true", help="replace files that exist")


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
