"""Finds the model that MODEL names on the command line, its input, and its fused form."""

import argparse
import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from .. import unet
from ..convert import convert
from ..memory import fake
from .command import Parser, Refused, first_line

PRESETS: dict[str, Callable[..., nn.Module]] = {
    make.__name__: make for make in (unet.lidar_optical_unet, unet.unet3d_large, unet.unet3d_small)
}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
OPTIMIZERS = {"none": None, "sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
INTEGERS = {"int64": torch.int64, "int32": torch.int32, "uint8": torch.uint8}


class Shape(tuple[int, ...]):
    """The shape of an input.  ``dtype`` is that of an input of integers; None stands for the dtype of the command."""

    dtype: torch.dtype | None

    def __new__(cls, sizes: Iterable[int], dtype: torch.dtype | None = None) -> "Shape":
        shape = super().__new__(cls, sizes)
        shape.dtype = dtype
        return shape

    def sample(self) -> "Shape":
        """The shape without the batch."""
        return Shape(self[1:], self.dtype)

    def batch_of(self, batch: int) -> "Shape":
        return Shape((batch, *self), self.dtype)

    def without_values(self) -> "Shape | Tensor":
        """What ``fusedseg.profile`` takes as the shape of this input."""
        return self if self.dtype is None else torch.empty(self, dtype=self.dtype, device="meta")


Shapes = Sequence[Shape]


@dataclass(frozen=True)
class ModelSource:
    """The model of a command.

    name: MODEL as it was typed.  build: makes the model of stock modules.  convert: a function that is called with such
    a model and returns its fused form.  code: the line of Python that makes the fused form of a preset; None for other
    models, whose fused form ``fusedseg.convert`` makes.  sample, batch: the input that a plans file of nnU-Net names.
    """

    name: str
    build: Callable[[], nn.Module]
    convert: Callable[[nn.Module], nn.Module] = convert
    code: str | None = None
    sample: Shape | None = None
    batch: int | None = None

    @property
    def meaning(self) -> str:
        """What "convert" stands for, if not for ``fusedseg.convert``."""
        return "" if self.code is None else "convert stands for the preset's fused blocks."


def parse_model(args: argparse.Namespace) -> ModelSource:
    """The model that MODEL stands for; raises Refused if there is none."""
    text: str = args.model
    if text in PRESETS:
        make = PRESETS[text]
        return ModelSource(
            text, partial(make, plain=True), partial(_fused_preset, make), code=f"model = fusedseg.unet.{text}()"
        )
    if text.endswith(".json"):
        return _planned_by_nnunet(text, args.configuration)
    module, colon, name = text.partition(":")
    if not colon or not module or not name:
        raise Refused(
            f"MODEL must be a preset ({', '.join(PRESETS)}) or package.module:callable, or a plans file of nnU-Net in "
            f"JSON, got {text!r}{did_you_mean(text, PRESETS)}"
        )
    if module.endswith(".py") or "/" in module:
        dotted = module.removesuffix(".py").strip("./").replace("/", ".")
        raise Refused(f"MODEL {text!r} names a file; name the module, from the folder that holds it: {dotted}:{name}")
    found = _imported(text, module)
    for part in name.split("."):
        if not hasattr(found, part):
            raise Refused(f"MODEL {text!r}: {module} has no {name}{did_you_mean(part, dir(found))}")
        found = getattr(found, part)
    if isinstance(found, nn.Module):
        return ModelSource(text, lambda: found)
    if not callable(found):
        raise Refused(f"MODEL {text!r}: {name} must be a module or build one, and is a {type(found).__name__}")
    return ModelSource(text, found)


def _planned_by_nnunet(path: str, configuration: str) -> ModelSource:
    # The import stands here, because only plans files need nnU-Net.
    from ..integrations.nnunet.plans import read

    try:
        planned = read(path, configuration)
    except (ImportError, ValueError) as error:
        raise Refused(f"MODEL {path!r}: {first_line(error)}") from error
    return ModelSource(f"{path}, {configuration}", planned.build, sample=Shape(planned.sample), batch=planned.batch)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _imported(text: str, module: str) -> object:
    # Modules in the working folder can be imported, as under `python -m`.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(module)
    # The file of a user may raise any error.
    except Exception as error:
        # The name is misspelt only if the module itself was not found.
        missing = isinstance(error, ModuleNotFoundError) and module.startswith(error.name or "?")
        hint = did_you_mean(module, (path.stem for path in Path().glob("*.py"))) if missing else place_of(error)
        said = error if isinstance(error, ImportError) else first_line(error)
        raise Refused(f"MODEL {text!r}: cannot import {module}: {said}{hint}") from error


def place_of(error: BaseException) -> str:
    """The file and line of the user's own code that led to an error; "" if there is none."""
    if isinstance(error, SyntaxError):
        return f" ({error.filename}:{error.lineno})"
    ours = (str(Path(torch.__file__).parent), str(Path(unet.__file__).parents[1]), "<")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(ours)]
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


def _fused_preset(make: Callable[[], nn.Module], model: nn.Module) -> nn.Module:
    """The fused preset, built in the dtype of the stock preset.

    It is not cast afterwards, because PyTorch cannot cast parameters without values.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(next(p.dtype for p in model.parameters() if p.is_floating_point()))
    try:
        return make()
    finally:
        torch.set_default_dtype(before)


def build(source: ModelSource) -> nn.Module:
    """The stock model without values; raises Refused if the constructor fails, or returns no module."""
    try:
        with fake.fake_mode():
            return fake.build(source.build)
    # A constructor may raise any error.
    except Exception as error:
        raise Refused(f"{source.name} cannot be built: {first_line(error)}{place_of(error)}") from error


def split_batch(source: ModelSource, args: argparse.Namespace, named: bool) -> tuple[list[Shape], int | None]:
    """The shapes of one sample, and the batch: ``--batch``, or the first number of the shapes, or None.

    Let d be the number of spatial dimensions of the model's first convolution.  A shape of d + 2 numbers contains the
    batch, and a shape of d + 1 numbers does not.  For any other shape ``named`` says whether it contains the batch.
    """
    shapes, batch = args.input, args.batch
    if not shapes:
        if source.sample is None:
            raise Refused("--input is needed, unless MODEL is a plans file of nnU-Net")
        return [source.sample], batch or source.batch
    convs = (module for module in build(source).modules() if isinstance(module, _ConvNd))
    dims = next((len(conv.kernel_size) for conv in convs), None)
    if dims is not None and len(shapes[0]) in (dims + 1, dims + 2):
        named = len(shapes[0]) == dims + 2
    if not named:
        return list(shapes), batch
    batches = {shape[0] for shape in shapes} | ({batch} if batch is not None else set())
    if len(batches) > 1:
        raise Refused(f"--input and --batch name different batches: {', '.join(map(str, sorted(batches)))}")
    return [shape.sample() for shape in shapes], batches.pop()


def batched(source: ModelSource, args: argparse.Namespace) -> list[Shape]:
    """The shapes of ``--input`` with their batch, which is 1 if the user names none."""
    samples, batch = split_batch(source, args, named=True)
    return [shape.batch_of(batch or 1) for shape in samples]


def shapes_text(shapes: Shapes) -> str:
    return " and ".join("×".join(map(str, shape)) for shape in shapes)


def parse_shape(text: str) -> Shape:
    sizes, colon, name = text.partition(":")
    if colon and name not in INTEGERS:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(INTEGERS)} after the colon, got {text!r}")
    try:
        shape = Shape((int(size) for size in sizes.replace("x", ",").replace("×", ",").split(",")), INTEGERS.get(name))
    except ValueError:
        shape = Shape(())
    if not shape or min(shape) < 1:
        raise argparse.ArgumentTypeError(f"a shape is positive integers joined by commas, got {text!r}")
    return shape


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return int(text)


def add_model(command: Parser, batch: str) -> None:
    """Adds MODEL, --input and --batch to a command; ``batch`` is the help of --batch."""
    command.add_argument(
        "model",
        metavar="MODEL",
        help=f"{', '.join(PRESETS)}, package.module:callable, which returns a model, or a plans file of nnU-Net, "
        "with dataset.json beside it",
    )
    command.add_argument(
        "--input",
        type=parse_shape,
        action="append",
        default=[],
        metavar="SHAPE",
        help="shape of the input, with the batch or without it: 8,3,256,256 or 3,256,256; repeat the option for each "
        "further input; 2,128:int64 is an input of integers; by default what the plans file says",
    )
    command.add_argument(
        "--configuration",
        metavar="NAME",
        default="3d_fullres",
        help="the configuration in the plans file (default: 3d_fullres)",
    )
    command.add_argument("--batch", type=positive, metavar="N", help=batch)


def add_choice(command: Parser, option: str, names: Iterable[str], default: str, meaning: str) -> None:
    """Adds an option that takes one of ``names``.  Its help is the meaning, the names and the default."""
    names = list(names)
    text = f"{meaning}: {', '.join(names)} (default: {default})"
    command.add_argument(option, choices=names, default=default, metavar="NAME", help=text)


def add_json(command: Parser) -> None:
    command.add_argument("--json", metavar="PATH", help="write the figures to this file, as JSON")
    command.add_argument("--overwrite", action="store_true", help="replace files that exist")
