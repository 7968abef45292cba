"""``python -m fusedseg profile``: where the bytes of one training step go."""

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..memory import MemoryReport, compare, profile
from ..memory.export import write_json
from ..memory.fake import fake_inputs, fake_mode, fake_model, profile_fake
from ..memory.strategy import Strategy
from ..memory.tables import wrapped
from .models import DTYPES, FUSED, OPTIMIZERS, Refused, Spec, add_common, first_line, parse_model

FILES = ("csv", "json", "plot", "chrome_trace", "snapshot")


def add_profile(commands) -> None:
    command = commands.add_parser(
        "profile",
        help="where the memory of a model's training step goes, and what would save how much",
        description="One training step (forward, mean of the outputs as loss, backward, and the optimizer's if asked "
        "for): what is kept for backward, by whom, what is alive at the peak, and what would save how much. On tensors "
        "without values unless --device says otherwise: no GPU and no memory is needed for any size.",
    )
    add_common(command, "with the batch, such as 8,3,256,256")
    command.add_argument(
        "--compare",
        default="eager",
        metavar="LIST",
        help="eager, fusedseg, amp, checkpoint and combinations such as fusedseg+amp, by commas (default: eager)",
    )
    command.add_argument(
        "--optimizer", choices=list(OPTIMIZERS), default="none", help="whose step is taken (default: none)"
    )
    command.add_argument("--device", choices=("fake", "cpu", "cuda"), default="fake", help="where (default: fake)")
    command.add_argument("--rows", action="store_true", help="prints the rows of all hooks too")
    command.add_argument("--csv", metavar="PATH", help="writes the rows, of all that are compared")
    command.add_argument("--plot", metavar="PATH", help="draws memory over the step; needs matplotlib")
    command.add_argument("--chrome-trace", metavar="PATH", help="for chrome://tracing or ui.perfetto.dev; of the first")
    command.add_argument("--snapshot", metavar="PATH", help="for PyTorch's memory visualiser; of the first")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Returns 0, or 2 where it was refused."""
    try:
        strategies = check(args)
        spec = parse_model(args.model, args.input)
        reports = [report_of(spec, strategy, args) for strategy in strategies]
        write(reports, args)
    except Refused as refusal:
        print(f"fusedseg profile: {refusal}", file=sys.stderr)
        return 2
    show(reports, spec, args)
    return 0


def check(args: argparse.Namespace) -> list[Strategy]:
    """What can be refused before anything runs."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise Refused("--device cuda: torch sees no GPU")
    paths = [path for path in (getattr(args, name) for name in FILES) if path]
    for path in paths:
        if Path(path).exists() and not args.overwrite:
            raise Refused(f"{path} exists: choose another path, or pass --overwrite")
        if not Path(path).parent.is_dir():
            raise Refused(f"{path}: there is no folder {Path(path).parent}")
    try:
        return [Strategy.parse(label.strip(), FUSED) for label in args.compare.split(",")]
    except ValueError as error:
        raise Refused(f"--compare: {error}") from error


def report_of(spec: Spec, strategy: Strategy, args: argparse.Namespace) -> MemoryReport:
    label = strategy.label(FUSED)
    dtype = DTYPES[args.dtype]
    options: dict[str, Any] = {
        "label": label,
        "autocast": strategy.autocast(DTYPES[args.amp_dtype]),
        "optimizer": OPTIMIZERS[args.optimizer],
    }
    try:
        if args.device == "fake":
            with fake_mode() as mode:
                model = strategy.prepare(fake_model(spec.build, mode, dtype), spec.convert)
                return profile_fake(model, fake_inputs(args.input, dtype), **options)
        model = strategy.prepare(spec.build().to(dtype), spec.convert).to(args.device)
        inputs = [torch.randn(shape, dtype=dtype, device=args.device) for shape in args.input]
        return profile(model, *inputs, **options)
    # whatever a stranger's model raises
    except Exception as error:
        shapes = ", ".join("×".join(map(str, shape)) for shape in args.input)
        raise Refused(f"{spec.name} does not run as {label} on {shapes} {args.dtype}: {first_line(error)}") from error


def write(reports: list[MemoryReport], args: argparse.Namespace) -> None:
    first, overwrite = reports[0], args.overwrite
    several = compare(*reports) if len(reports) > 1 else None
    writers = {
        "csv": partial(first.to_csv, args.csv, *reports[1:], overwrite=overwrite),
        "json": partial(write_json, (several or first).to_dict(), args.json, overwrite),
        "plot": partial(first.plot, args.plot, *reports[1:], overwrite=overwrite),
        "chrome_trace": partial(first.to_chrome_trace, args.chrome_trace, overwrite=overwrite),
        "snapshot": partial(first.to_snapshot, args.snapshot, overwrite=overwrite),
    }
    for name, writer in writers.items():
        if getattr(args, name):
            try:
                writer()
            except (OSError, ValueError, ImportError) as error:
                raise Refused(f"--{name.replace('_', '-')}: {error}") from error


def show(reports: list[MemoryReport], spec: Spec, args: argparse.Namespace) -> None:
    shapes = " and ".join("×".join(map(str, shape)) for shape in args.input)
    if len(reports) == 1:
        print(reports[0])
    else:
        print(f"{spec.name} on {shapes} {args.dtype}, one training step on {reports[0].device} tensors\n")
        print(compare(*reports))
        print(f"\nWhat {reports[0].label} keeps\n{wrapped(reports[0].summary())}")
        print(*(f"\nNote: {note}" for note in dict.fromkeys(note for report in reports for note in report.notes)))
    if any(FUSED in report.label for report in reports):
        print(f"\nfusedseg stands for {spec.how}.")
    if args.rows:
        for report in reports:
            print(f"\nRows of {report.label}, in MiB\n{report.rows_table()}")
    written = [path for path in (getattr(args, name) for name in FILES) if path]
    if written:
        print(f"\nwrote {', '.join(written)}")
