"""``fusedseg profile`` shows where the bytes of one training step go."""

import argparse
from typing import Any

import torch
from torch import nn

from ..memory import MemoryReport, compare, plot, profile
from ..memory.export import write_json
from ..memory.fake import fake_inputs, fake_mode, fake_model, profile_fake
from ..memory.strategy import COMPILED, FUSED, Strategy
from ..memory.tables import wrapped
from ..progress import Progress
from .command import Refused, add_command, check_new, first_line
from .models import (
    DTYPES,
    OPTIMIZERS,
    ModelSource,
    Shapes,
    add_choice,
    add_json,
    add_model,
    batched,
    build,
    parse_model,
    place_of,
    shapes_text,
)

# What the compiler itself keeps.
COMPILER = "compile"


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
    add_model(command, "the batch, if SHAPE has none (default: 1)")
    add_choice(command, "--dtype", DTYPES, "fp32", "of parameters and inputs")
    command.add_argument(
        "--compare",
        default="eager",
        metavar="LIST",
        help="ways to run the step, joined by commas: eager, fusedseg, amp, checkpoint, and combinations such as "
        "fusedseg+amp; and beside them compile, fusedseg-compile and fusedseg-compile+bits=4, whose graphs are counted "
        "(default: eager)",
    )
    add_choice(command, "--optimizer", OPTIMIZERS, "none", "whose step is taken")
    add_choice(command, "--device", ("fake", "cpu", "cuda"), "fake", "where the step runs; fake is without values")
    command.add_argument("--plot", metavar="PATH", help="draw memory over the step; needs matplotlib")
    add_json(command)


def run(args: argparse.Namespace) -> int:
    """Returns 0; raises Refused if the command cannot do its task."""
    strategies = check(args)
    source = parse_model(args.model)
    shapes = batched(source, args)
    reports, graphs = [], {}
    with Progress("fusedseg profile") as progress:
        for count, strategy in enumerate(strategies, 1):
            label = strategy.label
            progress.update(f"{label} ({count} of {len(strategies)})")
            try:
                if strategy.compiled:
                    graphs[label] = counted(source, shapes, strategy, args)
                else:
                    reports.append(report_of(source, shapes, strategy, args))
            except Refused:
                raise
            # A model, and the compiler, may raise any error.
            except Exception as error:
                raise Refused(
                    f"{source.name} does not run as {label} on {shapes_text(shapes)} {args.dtype}: "
                    f"{first_line(error)}{place_of(error)}"
                ) from error
    write(reports, args)
    show(reports, source, shapes, args)
    for label, report in graphs.items():
        print(f"\n{label}, counted on its graphs\n{report}")
    return 0


def check(args: argparse.Namespace) -> list[Strategy]:
    """The strategies to compare; raises Refused for everything that can be checked before a step runs."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise Refused("--device cuda: torch sees no GPU")
    for path in (args.json, args.plot):
        check_new(path, args.overwrite)
    labels = [label.strip() for label in args.compare.split(",")]
    # The report of the backend has the bytes of the compiler's own partitioner too.
    if COMPILER in labels and not any(label.startswith(COMPILED) for label in labels):
        labels.append(COMPILED)
    try:
        strategies = [Strategy.parse(label) for label in labels if label != COMPILER]
    except ValueError as error:
        raise Refused(f"--compare: {error}") from error
    if all(strategy.compiled for strategy in strategies):
        raise Refused(f"--compare: {args.compare} needs a way that runs beside it, such as eager")
    return strategies


def counted(source: ModelSource, shapes: Shapes, strategy: Strategy, args: argparse.Namespace) -> Any:
    """What the backend of this package keeps, beside what the compiler's own partitioner keeps; no step runs."""
    # Importing the compiler takes seconds.
    from ..compiler.settings import parse
    from ..compiler.unrun import counted

    settings, dtype = parse({"codegen": "inductor"} | strategy.options), DTYPES[args.dtype]
    with fake_mode() as mode:
        inputs = fake_inputs([shape.without_values() for shape in shapes], dtype)
        return counted(fake_model(source.build, mode, dtype), inputs, settings)


def report_of(source: ModelSource, shapes: Shapes, strategy: Strategy, args: argparse.Namespace) -> MemoryReport:
    def convert(model: nn.Module) -> nn.Module:
        return source.convert(model, shapes)

    dtype = DTYPES[args.dtype]
    options: dict[str, Any] = {"label": strategy.label, "optimizer": OPTIMIZERS[args.optimizer]}
    options["autocast"] = strategy.autocast
    if args.device == "fake":
        with fake_mode() as mode:
            model = strategy.prepare(fake_model(source.build, mode, dtype), convert)
            return profile_fake(model, fake_inputs([shape.without_values() for shape in shapes], dtype), **options)
    model = strategy.prepare(build(source).to(dtype), convert).to(args.device)
    return profile(model, *(shape.example(dtype, args.device) for shape in shapes), **options)


def write(reports: list[MemoryReport], args: argparse.Namespace) -> None:
    first, *others = reports
    if args.json:
        write_json((compare(*reports) if others else first).to_dict(), args.json, args.overwrite)
    if args.plot:
        try:
            plot(args.plot, *reports, overwrite=args.overwrite)
        except (ValueError, ImportError) as error:
            raise Refused(f"--plot: {error}") from error


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
    written = [path for path in (args.json, args.plot) if path]
    if written:
        print(f"\nwrote {', '.join(written)}")
