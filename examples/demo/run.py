"""The command: checks the arguments, trains, prints the figures, and writes them with a picture."""

import importlib
import importlib.util
import os
import sys
import time
from pathlib import Path

import torch

from fusedseg.memory.tables import open_new, write_json

from . import report, training

EXTRAS = ("nilearn", "matplotlib", "tqdm")
# Where no terminal shows a line that changes, a new line comes so often.
LINE_SECONDS = 10.0


class ProgressLines:
    """Prints what the command is doing, and for how long, a line every ten seconds.

    It is for output that goes into a file or a pipe.  The lines go to stdout, because stderr is for errors there.  If
    stderr is a terminal, it prints nothing, because a bar is drawn there.
    """

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._last = -LINE_SECONDS
        self._silent = sys.stderr.isatty()

    def say(self, text: str) -> None:
        now = time.monotonic()
        if not self._silent and now - self._start - self._last >= LINE_SECONDS:
            self._last = now - self._start
            print(f"{text} ({self._last:.0f} s)", flush=True)


class Refused(Exception):
    """Raised if the demo cannot run here with these arguments; the message says why and what to do."""


def check(device: str, steps: int | None, paths: list[Path], overwrite: bool) -> None:
    missing = [name for name in EXTRAS if importlib.util.find_spec(name) is None]
    if missing:
        raise Refused(f'needs {" and ".join(missing)}, not installed here: pip install -e ".[demo]"')
    if device == "cuda" and not torch.cuda.is_available():
        raise Refused("--device cuda: torch sees no GPU")
    if steps is not None and steps < 1:
        raise Refused(f"--steps must be at least 1, got {steps}")
    existing = [str(path) for path in paths if path.exists()]
    if existing and not overwrite:
        raise Refused(f"{existing[0]} exists: choose another folder with --out, or pass --overwrite")
    try:
        paths[0].parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refused(f"--out {paths[0].parent}: {error.strerror}") from error


def run(
    name: str, device: str, steps: int | None, out: Path, seed: int, overwrite: bool, bits: int | None = None
) -> int:
    """Runs a demo.  Returns 0, or 2 if the demo was refused."""
    picture_path, json_path = out / f"{name}.png", out / f"{name}.json"
    try:
        check(device, steps, [picture_path, json_path], overwrite)
    except Refused as refusal:
        print(f"demo {name}: {refusal}", file=sys.stderr)
        return 2
    # PyTorch's profiler counts bytes on a CPU.  It would log lines about itself, at a level above errors.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    start = time.perf_counter()
    problem = importlib.import_module(f"{__package__}.{name}").problem(torch.device(device))
    networks = training.build(problem, torch.device(device), seed, bits)
    shown = ProgressLines()
    trainings = training.train(problem, networks, steps or problem.size.steps, seed, say=shown.say)
    shown.say("evaluating")
    outcome = report.evaluate(problem, trainings, seed, bits)
    print("\n".join(["", report.headline(problem, outcome), "", *report.lines(problem, outcome)]))

    # The import stands here, because matplotlib is slow to import.
    from . import picture

    with open_new(picture_path, overwrite) as file:
        picture.draw(file, problem, outcome)
    write_json(report.to_json(name, problem, outcome, torch.device(device), seed), json_path, overwrite)
    print(f"\nwrote {picture_path} and {json_path}; {time.perf_counter() - start:.0f} s in all")
    return 0
