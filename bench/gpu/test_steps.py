"""Measures whole training steps of networks at full size, in a process for each network and way (``steps.py``)::

    pytest bench/gpu/test_steps.py --device cuda --seconds 600
    pytest bench/gpu/test_steps.py --device cuda --seconds 120 -k "U-Net and bf16"
    pytest bench/gpu/test_steps.py --rehearse

First all ways are checked and their bytes counted, several at once, which also fills the compilers' caches.  Then each
way is timed in a fresh process that has the GPU alone.  A process that is done ends, because a waiting one would hold
half a GiB, and cuDNN takes slow kernels where it lacks room for workspaces.  The most important ways come first, and
the file ``steps.json`` is written after each one, so that a run that is cut short loses nothing.

A rehearsal runs tiny networks on a CPU in this process, without Inductor's ways, and one process of each part.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from .. import harness
from ..results import Report
from . import steps
from .steps import Case, Run

CASES = {"cpu": steps.CASES, "cuda": steps.CASES}
MORE: dict[str, list[Case]] = {"cpu": [], "cuda": []}
# At most so many processes that compile with Inductor share the cores well.
AT_ONCE = 8
# Checks end at this share of all seconds.
CHECKS = 0.55
# The seconds of one process; compiling takes most of them.
LIMITS = {"check": 220.0, "time": 90.0}
TITLE = "Whole training steps; aten and ours: our backend with PyTorch's kernels and with Inductor"
COMMAND = (sys.executable, "-m", "bench.gpu.steps")
ROOT = Path(__file__).parents[2]


class Process(NamedTuple):
    part: str
    case: Case
    way: str
    child: subprocess.Popen
    started: float


class Session:
    """All results of a session, by case and way, and the processes that run."""

    def __init__(self, device: torch.device, folder: Path, tiny: bool, write: Callable[[dict[str, Any]], None]) -> None:
        self.device, self.folder, self.tiny, self.write = device, folder, tiny, write
        self.found: dict[str, dict[str, Any]] = {}
        self.running: list[Process] = []

    def start(self, part: str, case: Case, way: str, wait: bool = False) -> Process:
        command = [*COMMAND, part, str(case), way, "--folder", str(self.folder), "--device", self.device.type]
        command += [*["--tiny"] * self.tiny, *["--wait"] * wait]
        log = steps.file_of(self.folder, case, way, part).with_suffix(".log")
        with log.open("w") as file:
            child = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.PIPE, stdout=file, stderr=file, env=environment()
            )
        process = Process(part, case, way, child, time.monotonic())
        self.running.append(process)
        return process

    def end(self, process: Process) -> None:
        """Takes in what a process that has ended has found, and ends a process that has not."""
        self.stop(process)
        self.take(process.part, process.case, process.way)

    def stop(self, process: Process) -> None:
        process.child.kill()
        process.child.wait()
        process.child.stdin.close()
        self.running.remove(process)

    def take(self, part: str, case: Case, way: str) -> None:
        """Adds what a process has written so far to the results, and writes them."""
        path = steps.file_of(self.folder, case, way, part)
        found = steps.read(path) if path.exists() else {"missing": f"{part}: the process wrote nothing in its time"}
        results = self.found.setdefault(str(case), {"samples": case.shapes[self.tiny][0], "contenders": {}})
        if case.cited:
            results["cited"] = case.cited
        results |= found.pop("case", {})
        of_way = results["contenders"].setdefault(way, {})
        if "kept_bytes" in of_way and "missing" in found:
            # Its bytes hold without its times.
            found = {"notes": [f"no times: {found['missing']}"]}
        of_way |= {key: value for key, value in found.items() if key != "refused" or value}
        self.write(self.found)

    def counted(self, case: Case, way: str) -> bool:
        return "kept_bytes" in self.found.get(str(case), {}).get("contenders", {}).get(way, {})

    def check(self, pairs: Sequence[tuple[Case, str]], until: float) -> None:
        """Checks all ways, several at once; a way starts when eager mode has left the reference of its network."""
        todo = list(pairs)
        at_once = max(1, min(AT_ONCE, (os.cpu_count() or 2) // 2))
        while (todo or self.running) and time.monotonic() < until:
            for process in list(self.running):
                late = time.monotonic() - process.started > LIMITS["check"]
                if process.child.poll() is not None or late:
                    self.end(process)
            ready = [pair for pair in todo if pair[1] == "eager" or self.counted(pair[0], "eager")]
            for case, way in ready[: at_once - len(self.running)]:
                todo.remove((case, way))
                self.start("check", case, way)
            if not ready and not self.running:
                # Eager mode has failed.
                break
            time.sleep(0.05)
        for process in list(self.running):
            self.end(process)

    def measure_times(self, pairs: Sequence[tuple[Case, str]], until: float) -> None:
        """Times one process after the other; the next one imports meanwhile, without touching the GPU."""
        todo = [pair for pair in pairs if self.counted(*pair)]
        ahead = self.start("time", *todo[0], wait=True) if todo else None
        for k in range(len(todo)):
            process, ahead = ahead, None
            if process is None or time.monotonic() > until:
                break
            process.child.stdin.write(b"go\n")
            process.child.stdin.flush()
            if k + 1 < len(todo):
                ahead = self.start("time", *todo[k + 1], wait=True)
            try:
                process.child.wait(min(LIMITS["time"], max(0.0, until - time.monotonic())))
            except subprocess.TimeoutExpired:
                process.child.kill()
            self.end(process)

    def rehearse(self, pairs: Sequence[tuple[Case, str]]) -> None:
        """Checks in this process, times one way, and runs each part once in a process of its own."""
        for case, way in pairs:
            if way not in steps.OF_INDUCTOR:
                for part in steps.PARTS if (case, way) == pairs[0] else ["check"]:
                    torch.compiler.reset()
                    steps.measure(part, Run(case, way, self.tiny, self.device, self.folder))
                    self.take(part, case, way)
        last = pairs[0][0], "eager"
        self.check([last], time.monotonic() + LIMITS["check"])
        self.measure_times([last], time.monotonic() + LIMITS["time"])


def environment() -> dict[str, str]:
    """Processes that compile at the same time share the cores."""
    return {"TORCHINDUCTOR_COMPILE_THREADS": "4", "OMP_NUM_THREADS": "2", **os.environ}


@contextmanager
def ended(session: Session) -> Iterator[None]:
    """No process outlives the session, not even after an interrupt."""
    try:
        yield
    finally:
        for process in list(session.running):
            session.stop(process)


def pairs_of(cases: Sequence[Case]) -> list[tuple[Case, str]]:
    """The cases and ways in the order in which they run: the important ways of every case come first."""
    pairs = [(case, way) for case in cases if case.is_here() for way in case.ways]
    return sorted(pairs, key=lambda pair: pair[1] not in steps.FIRST)


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The results of the selected cases; each part of a run that was cut short stands in the file."""
    config = request.config
    device, report = request.getfixturevalue("device"), request.getfixturevalue("report")
    if device.type == "cpu" and not harness.rehearsal:
        pytest.skip("needs --device cuda; --rehearse runs tiny networks on a CPU")
    selected = [item.callspec.params["case"] for item in request.session.items if item.path == Path(__file__)]
    begin, seconds = time.monotonic(), config.getoption("--seconds")
    session = Session(device, tmp_path_factory.mktemp("steps"), harness.rehearsal, writer(report))
    pairs = pairs_of(selected)
    with ended(session):
        if harness.rehearsal:
            session.rehearse(pairs)
        else:
            session.check(pairs, begin + CHECKS * seconds)
            session.measure_times(pairs, begin + seconds)
    return session.found


def writer(report: Report) -> Callable[[dict[str, Any]], None]:
    def write(found: dict[str, Any]) -> None:
        if not harness.rehearsal:
            report.write("steps", found, TITLE)

    return write


def test_step(case, measured):
    if not case.is_here():
        pytest.skip(f"needs the package {case.package}")
    ways = measured.get(str(case), {}).get("contenders", {})
    if not ways:
        pytest.skip("the seconds were over")
    if wrong := [f"{way}: {of['refused']}" for way, of in ways.items() if of.get("refused")]:
        pytest.fail(f"{'; '.join(wrong)}, beside eager mode in fp32")
    failed = [f"{way}: {of['missing']}" for way, of in ways.items() if of.get("missing")]
    if failed and (harness.rehearsal or len(failed) == len(ways)):
        pytest.fail("; ".join(failed))
