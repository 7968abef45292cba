"""Runs seeds in processes of their own: some of PyTorch's own programs end in a segmentation fault.

A worker writes down the seed and the phase before it starts.  Where it dies in eager mode, that is PyTorch's own fault.
The crew goes on after that seed.
"""

import collections
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.hunt import compiled, pieces
from tests.hunt.compiled import Compiled
from tests.hunt.judge import Verdict, judged, quiet, shrunk
from tests.hunt.networks import grown_network
from tests.hunt.program import Network, nodes

ROOT = Path(__file__).parents[2]
KINDS = {
    "networks": grown_network,
    "compiled": compiled.program,
    "compiled-networks": compiled.network,
    "compiled-budgets": compiled.with_budget,
    "compiled-bits": compiled.with_bits,
    "bits": pieces.network,
}
# Seconds; a program takes a few hundredths of a second.
PATIENCE = 120.0
CHUNK = 500
# Number of failures that are shrunk for each cause.
SHRUNK = 10


def made(kind: str, seed: int) -> Network | Compiled:
    with quiet():
        return KINDS[kind](seed)


def work(kind: str, seeds: Iterable[int], file: Path) -> None:
    """Runs as a worker: writes a line for each phase of each seed, and a line for its verdict."""
    with file.open("a", buffering=1) as out:

        def tell(phase: str) -> None:
            out.write(json.dumps({"seed": seed, "phase": phase}) + "\n")

        for seed in seeds:
            tell("grow")
            try:
                verdict = judged(made(kind, seed), tell)
            except Exception as error:
                verdict = Verdict("failure", f"the hunt itself raises {error!r}")
            out.write(json.dumps({"seed": seed, "verdict": verdict}) + "\n")


@dataclass
class Report:
    kind: str
    counts: collections.Counter = field(default_factory=collections.Counter)
    # Cause -> seeds.
    failures: dict[str, list[int]] = field(default_factory=lambda: collections.defaultdict(list))
    # Seeds whose program crashes PyTorch itself.
    crashes: list[int] = field(default_factory=list)

    def add(self, seed: int, verdict: Verdict) -> None:
        self.counts[verdict.kind] += 1
        if verdict.kind == "failure":
            self.failures[verdict.cause].append(seed)
        if verdict.kind == "crash of PyTorch":
            self.crashes.append(seed)

    def take(self, line: dict[str, Any]) -> None:
        """Adds a line that a worker has written."""
        if "verdict" in line:
            self.add(line["seed"], Verdict(*line["verdict"]))

    def __str__(self) -> str:
        lines = [f"{self.kind}: {sum(self.counts.values())} run, {dict(self.counts.most_common())}"]
        if self.crashes:
            lines.append(f"PyTorch itself crashes in {self.crashes}")
        for cause, seeds in sorted(self.failures.items(), key=lambda row: -len(row[1])):
            lines.append(f"{len(seeds)} × {cause}: seeds {seeds[:12]}{' …' if len(seeds) > 12 else ''}")
        return "\n".join(lines)

    def programs(self) -> str:
        """One shrunk program of each sort, as code.  The kinds of its steps tell sorts apart."""
        found: dict[tuple[str, str], list[tuple[int, str]]] = {}
        for cause, seeds in self.failures.items():
            for seed in seeds[:SHRUNK]:
                text = printed(self.kind, seed)
                found.setdefault((cause, text.partition("\n")[0]), []).append((seed, text))
        return "\n\n\n".join(f"# {cause}\n# seeds {[s for s, _ in of]}\n{of[0][1]}" for (cause, _), of in found.items())


def _command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "tests.hunt", *map(str, arguments)]


def printed(kind: str, seed: int) -> str:
    """The shrunk program of a seed, or the whole program if a smaller one crashes the process."""
    for options in ([], ["--whole"]):
        run = subprocess.run(
            _command("--kind", kind, "--print", seed, *options), cwd=ROOT, capture_output=True, text=True, timeout=600
        )
        if run.returncode == 0:
            return run.stdout
    return f"# {kind} {seed}: the process that prints it ends with status {run.returncode}\n{run.stderr[-2000:]}"


def text_of(kind: str, seed: int, whole: bool = False) -> str:
    """The program of a seed as code, without steps that its failure does not need, after a line of the steps' kinds."""
    program = made(kind, seed)
    verdict = judged(program)
    if not whole and verdict.kind == "failure":
        program = shrunk(program)
    kinds = {node.kind for part in program.parts for _, node in nodes(part)} - {
        "leaf",
        "module",
        "loss",
        "note",
        "backward",
    }
    return f"# {', '.join(sorted(kinds))}\n{program}"


class _Worker:
    def __init__(self, kind: str, seeds: range, folder: Path) -> None:
        self.seeds, self.file = seeds, folder / f"{seeds.start}.jsonl"
        self.file.touch()
        self.process = subprocess.Popen(
            _command("--kind", kind, "--seeds", f"{seeds.start}:{seeds.stop}", "--worker", self.file),
            cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def over(self) -> bool:
        if self.process.poll() is not None:
            return True
        # Importing torch takes long on a busy machine.
        if time.time() - self.file.stat().st_mtime > PATIENCE:
            self.process.kill()
            self.process.wait()
            return True
        return False

    def lines(self) -> list[dict]:
        return [json.loads(line) for line in self.file.read_text().splitlines()]


def hunt(kind: str, seeds: range, jobs: int = 1) -> Report:
    """Runs all seeds in ``jobs`` processes at a time."""
    report = Report(kind)
    todo = [range(a, min(a + CHUNK, seeds.stop)) for a in range(seeds.start, seeds.stop, CHUNK)]
    with tempfile.TemporaryDirectory() as name:
        folder, at_work = Path(name), []
        while todo or at_work:
            while todo and len(at_work) < jobs:
                at_work.append(_Worker(kind, todo.pop(0), folder))
            time.sleep(0.05)
            for worker in [w for w in at_work if w.over()]:
                at_work.remove(worker)
                lines = worker.lines()
                for line in lines:
                    report.take(line)
                if worker.process.returncode == 0:
                    continue
                if not lines or "verdict" in lines[-1]:
                    raise RuntimeError(
                        f"a worker of {worker.seeds} ends with {worker.process.returncode} between programs"
                    )
                # Eager mode has run to its end before the phase "ours".
                whose = "failure" if lines[-1]["phase"] == "ours" else "crash of PyTorch"
                how = f"the process ends with status {worker.process.returncode}"
                report.add(lines[-1]["seed"], Verdict(whose, how))
                rest = range(lines[-1]["seed"] + 1, worker.seeds.stop)
                todo = [rest, *todo] if rest else todo
    return report
