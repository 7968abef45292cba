"""Shows which case of a run begins, and estimates how long the rest takes."""

import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean

import pytest

BY_LAST, BY_THIS, ELSEWHERE = "by the last run", "by the cases so far", "by a run on another machine"
# The seconds of each case in one run on two cores of an AMD EPYC with empty compiler caches.
SECONDS = Path(__file__).parent / "seconds.json"
# The pace of a run counts once its cases took this many seconds in the run that it is compared with.
ENOUGH = 10.0


class Progress:
    """Follows a run case by case.

    The first test of a case measures all its contenders, and the other tests report what it found, so the unit of the
    estimate is a case.

    Args:
        cases: the names of all cases that will run; a name may come several times.
        known: name -> the seconds that a case took in an earlier run.
        by: says which run that was.
    """

    def __init__(self, cases: Iterable[str], known: Mapping[str, float], by: str = BY_LAST) -> None:
        # A dict keeps the order of the cases, and each of them once.
        self.cases = list(dict.fromkeys(cases))
        self.known, self.by = known, by
        self.took: dict[str, float] = {}
        self.start = time.monotonic()

    def begin(self, case: str) -> str | None:
        """The line to print when a test of a case begins; None if the case has begun before."""
        if case in self.took:
            return None
        left = self.left()
        self.took[case] = 0.0
        width = len(str(len(self.cases)))
        seconds = time.monotonic() - self.start
        return f"[{len(self.took):{width}}/{len(self.cases)}] {clock(seconds)}, {left}: {case}"

    def add(self, case: str, seconds: float) -> None:
        """Adds the seconds of a test to its case."""
        self.took[case] += seconds

    def left(self) -> str:
        """How long the cases that have not begun will take, and what says so.

        A case that the earlier run had takes as long as there, times the pace of this run: a machine that is half as
        fast today has taken twice as long for the cases so far.  Any other case takes the mean of the cases so far.
        """
        waiting = [case for case in self.cases if case not in self.took]
        compared = [case for case in self.took if case in self.known]
        before = sum(self.known[case] for case in compared)
        pace = sum(self.took[case] for case in compared) / before if before >= ENOUGH else 1.0
        new = [case for case in waiting if case not in self.known]
        if new and not self.took:
            return "time left not known yet"
        seconds = pace * sum(self.known[case] for case in waiting if case in self.known)
        seconds += len(new) * (fmean(self.took.values()) if new else 0.0)
        sources = [self.by] * (len(new) < len(waiting)) + [BY_THIS] * bool(new)
        return f"about {clock(seconds)} left {' and '.join(sources)}"


def clock(seconds: float) -> str:
    """Minutes and seconds."""
    return "{}:{:02}".format(*divmod(round(seconds), 60))


def case_of(item: pytest.Item) -> str:
    """The case of a test: its file, its function unless that is ``test_step``, and the parameter ``case`` if any."""
    stem, function = item.path.stem.removeprefix("test_"), item.originalname.removeprefix("test_")  # type: ignore[attr-defined]
    name = stem if function == "step" else f"{stem} {function}"
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return f"{name}: {params['case']}" if "case" in params else name


class ProgressLines:
    """A plugin of pytest that prints a line for each case instead of a letter for each test.

    The seconds of every case go to pytest's cache, where the next run finds them.
    """

    def __init__(self, config: pytest.Config, benches: Iterable[pytest.Item]) -> None:
        self.terminal = config.pluginmanager.getplugin("terminalreporter")
        self.verbose = config.option.verbose > 0
        # Without the cache (`-p no:cacheprovider`) every run is the first one.
        self.cache = getattr(config, "cache", None)
        kind = "rehearsal" if config.getoption("--rehearse") else "run"
        self.key = f"bench/seconds-{config.getoption('--device')}-{kind}"
        self.known = self.cache.get(self.key, {}) if self.cache is not None else {}
        by_case, by = self.known, BY_LAST
        if not by_case and kind == "run" and config.getoption("--device") == "cpu":
            by_case, by = json.loads(SECONDS.read_text()), ELSEWHERE
        self.case_of = {item.nodeid: case_of(item) for item in benches}
        self.progress = Progress(self.case_of.values(), by_case, by)
        self.running = ""
        self.measured: set[str] = set()
        # The cases that did not come to their end, so that their seconds say little.
        self.cut: set[str] = set()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if nodeid in self.case_of:
            self.running = self.case_of[nodeid]
            if line := self.progress.begin(self.running):
                self.terminal.write_line(line)
                self.terminal.flush()

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """The category, the letter and the word of a test; its line has said more than the letter would."""
        if report.nodeid not in self.case_of or not (report.when == "call" or report.failed or report.skipped):
            return None
        category = "error" if report.failed and report.when != "call" else report.outcome
        return category, "", category.upper()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.nodeid not in self.case_of:
            return
        case = self.case_of[report.nodeid]
        self.progress.add(case, report.duration)
        if report.when == "call" and report.passed:
            self.measured.add(case)
        if report.failed:
            self.cut.add(case)
            if not self.verbose:
                self.terminal.write_line(f"FAILED {report.nodeid}")

    def pytest_keyboard_interrupt(self) -> None:
        self.cut.add(self.running)

    def pytest_sessionfinish(self) -> None:
        if self.cache is not None:
            whole = {case: self.progress.took[case] for case in self.measured - self.cut}
            self.cache.set(self.key, {**self.known, **whole})
