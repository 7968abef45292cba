"""``fusedseg profile`` shows where the bytes of one training step go."""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..memory import MemoryReport, compare, profile
from ..memory.export import write_json
from ..memory.fake import fake_inputs, fake_mode, fake_model, profile_fake
from ..memory.strategy import Strategy
from ..memory.tables import wrapped
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
    batched,
    build,
    check_new,
    parse_model,
    place_of,
    shapes_text,
)

# The ways that are counted on the graphs of a compiler; the second one may have options.
COMPILED = ("compile", "fusedseg-compile")
FILES = ("csv", "json", "plot")


def number_or_text(text: str) -> float | str:
    """A budget: a share such as 0.3, or a text such as 6GiB."""
    try:
        return float(text)
    except ValueError:
        return text


# The options of the backend in a label, and what reads their values.
OPTIONS: dict[str, Callable[[str], Any]] = {"budget": number_or_text, "bits": int}


def add_profile(commands) -> None:
    command = add_command(
        commands,
        "profile",
        summary="show where the memory of a training step goes, and what would save how much",
        description="Runs one training step (forward, the mean of the outputs as loss, backward, and the optimizer's "
        "if --optimizer is given) and reports what is kept for backward, by which module, what is alive at the peak, "
        "and what would save how much. It uses tensors without values unless --device says otherwise, so it needs "
        "neither a GPU nor the memory.",
        examples=[
            "fusedseg profile unet3d_small --input 2,1,64,64,64",
            "fusedseg profile mypackage.nets:build --input 8,3,256,256 \\\n"
            "      --compare eager,fusedseg,checkpoint --plot memory.png",
        ],
        run=run,
    )
    add_common(command, "the batch, if SHAPE has none (default: 1)")
    command.add_argument(
        "--compare",
        default="eager",
        metavar="LIST",
        help="ways to run the step, joined by commas: eager, fusedseg, amp, checkpoint, and combinations such as "
        "fusedseg+amp; and beside them compile, fusedseg-compile and fusedseg-compile+bits=4, whose graphs are counted "
        "(default: eager)",
    )
    add_choice(command, "--optimizer", OPTIMIZERS, "none", "whose step is taken")
    command.add_argument(
        "--device",
        choices=("fake", "cpu", "cuda"),
        default="fake",
        metavar="NAME",
        help="where the step runs: fake (tensors without values), cpu, cuda (default: fake)",
    )
    command.add_argument("--rows", action="store_true", help="also print memory at every hook of every module")
    command.add_argument("--csv", metavar="PATH", help="write these rows, of all that are compared")
    command.add_argument("--plot", metavar="PATH", help="draw memory over the step; needs matplotlib")


def run(args: argparse.Namespace) -> int:
    """Returns 0, or 2 if the command was refused."""
    try:
        strategies = check(args)
        source = parse_model(args.model)
        shapes = batched(source, args)
        reports = []
        with Progress("fusedseg profile") as progress:
            for count, strategy in enumerate(strategies, 1):
                progress.update(f"{strategy.label(FUSED)} ({count} of {len(strategies)})")
                reports.append(report_of(source, shapes, strategy, args))
            graphs = compiled_reports(source, shapes, args, progress.update)
        write(reports, args)
    except Refused as refusal:
        print(f"fusedseg profile: {refusal}", file=sys.stderr)
        return 2
    show(reports, source, shapes, args)
    for label, report in graphs.items():
        print(f"\n{label}, counted on its graphs\n{report}")
    return 0


def compiled_ways(args: argparse.Namespace) -> dict[str, dict[str, str]]:
    """The compiled ways of --compare, and the options of the backend in each."""
    labels = [label.strip() for label in args.compare.split(",")]
    return {label: options_of(label) for label in labels if label.split("+")[0] in COMPILED}


def options_of(label: str) -> dict[str, str]:
    name, *words = label.split("+")
    options = dict(word.partition("=")[::2] for word in words)
    if options and (name == COMPILED[0] or not set(options) <= set(OPTIONS)):
        raise Refused(f"--compare: expected {' or '.join(OPTIONS)} beside {COMPILED[1]}, got {label!r}")
    return options


def compiled_reports(
    source: ModelSource, shapes: Shapes, args: argparse.Namespace, say: Callable[[str], None]
) -> dict[str, Any]:
    """What the compiler's own partitioner keeps, and what the backend of this package keeps; no step runs."""
    ways = compiled_ways(args)
    if not ways:
        return {}
    # Importing the compiler takes seconds.
    from ..compiler.counted import counted
    from ..compiler.settings import parse

    # The report of the backend has the bytes of the compiler's own partitioner too.
    ways = {label: options for label, options in ways.items() if label != COMPILED[0]} or {COMPILED[1]: {}}
    dtype, found = DTYPES[args.dtype], {}
    for label, options in ways.items():
        say(label)
        try:
            settings = parse({"codegen": "inductor"} | {name: OPTIONS[name](text) for name, text in options.items()})
            with fake_mode() as mode:
                inputs = fake_inputs([shape.without_values() for shape in shapes], dtype)
                found[label] = counted(fake_model(source.build, mode, dtype), inputs, settings=settings)
        # A model, and the compiler, may raise any error.
        except Exception as error:
            raise Refused(f"{source.name} is not compiled as {label}: {first_line(error)}{place_of(error)}") from error
    return found


def check(args: argparse.Namespace) -> list[Strategy]:
    """The strategies to compare; raises Refused for everything that can be checked before a step runs."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise Refused("--device cuda: torch sees no GPU")
    paths = [path for path in (getattr(args, name) for name in FILES) if path]
    for path in paths:
        check_new(path, args.overwrite)
    compiled = compiled_ways(args)
    labels = [label for label in args.compare.split(",") if label.strip() not in compiled]
    if not labels:
        raise Refused(f"--compare: {args.compare} needs a way that runs beside it, such as eager")
    try:
        return [Strategy.parse(label.strip(), FUSED) for label in labels]
    except ValueError as error:
        raise Refused(f"--compare: {error}") from error


def report_of(source: ModelSource, shapes: Shapes, strategy: Strategy, args: argparse.Namespace) -> MemoryReport:
    label = strategy.label(FUSED)
    dtype = DTYPES[args.dtype]
    options: dict[str, Any] = {
        "label": label,
        "autocast": strategy.autocast(DTYPES[args.amp_dtype]),
        "optimizer": OPTIMIZERS[args.optimizer],
    }
    convert = source.convert(shapes)
    try:
        if args.device == "fake":
            with fake_mode() as mode:
                model = strategy.prepare(fake_model(source.build, mode, dtype), convert)
                return profile_fake(model, fake_inputs([shape.without_values() for shape in shapes], dtype), **options)
        model = strategy.prepare(build(source).to(dtype), convert).to(args.device)
        inputs = [shape.example(dtype, args.device) for shape in shapes]
        return profile(model, *inputs, **options)
    except Refused:
        raise
    # A model may raise any error.
    except Exception as error:
        raise Refused(
            f"{source.name} does not run as {label} on {shapes_text(shapes)} {args.dtype}: "
            f"{first_line(error)}{place_of(error)}"
        ) from error


def write(reports: list[MemoryReport], args: argparse.Namespace) -> None:
    first, overwrite = reports[0], args.overwrite
    several = compare(*reports) if len(reports) > 1 else None
    writers = {
        "csv": partial(first.to_csv, args.csv, *reports[1:], overwrite=overwrite),
        "json": partial(write_json, (several or first).to_dict(), args.json, overwrite),
        "plot": partial(first.plot, args.plot, *reports[1:], overwrite=overwrite),
    }
    for name, writer in writers.items():
        if getattr(args, name):
            try:
                writer()
            except (OSError, ValueError, ImportError) as error:
                raise Refused(f"--{name.replace('_', '-')}: {error}") from error


def show(reports: list[MemoryReport], source: ModelSource, shapes: Shapes, args: argparse.Namespace) -> None:
    subject = f"{source.name} on {shapes_text(shapes)} {args.dtype}"
    if len(reports) == 1:
        print(f"{subject}\n\n{reports[0]}")
    else:
        print(f"{subject}, one training step on {reports[0].device} tensors\n")
        print(compare(*reports))
        print(f"\nWhat {reports[0].label} keeps\n{wrapped(reports[0].summary())}")
        print(*(f"\nNote: {note}" for note in dict.fromkeys(note for report in reports for note in report.notes)))
    if source.meaning and any(FUSED in report.label for report in reports):
        print(f"\n{source.meaning}")
    if args.rows:
        for report in reports:
            print(f"\nRows of {report.label}, in MiB\n{report.rows_table()}")
    written = [path for path in (getattr(args, name) for name in FILES) if path]
    if written:
        print(f"\nwrote {', '.join(written)}")
