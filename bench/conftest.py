"""Options and fixtures of the benches, the progress of a run, and the tables and lines at its end."""

import importlib.util
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from . import harness
from .closing import closing_lines
from .progress import ProgressLines
from .results import COPY_PASSES, PASSES, Report, default_directory, machine

REPORT = pytest.StashKey[Report]()
LEGEND = f"""Ratios are of medians over interleaved rounds: below 1, ours is faster or smaller.  kept: bytes saved for
backward, the output among them, which the next layer saves.  peak: the allocator's, over one step.  GB/s: of
{PASSES["step"]} passes over the tensor a step, the fewest that suffice; a copy makes {COPY_PASSES}."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--json-out", type=Path, help="folder for the results (default: bench/results/<gpu> or bench/out)")
    parser.addoption(
        "--rehearse",
        action="store_true",
        help="take every contender's first step, which fills compilers' caches; nothing is compared, timed or written",
    )
    # `pytest tests bench` reads tests/conftest.py as well, which defines the same option.
    with suppress(ValueError):
        parser.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="where tensors live")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Benches run in one process, whatever -n says, because processes that share the cores disturb each other."""
    if getattr(config.option, "numprocesses", None):
        config.option.numprocesses = 0


def pytest_configure(config: pytest.Config) -> None:
    device = torch.device(config.getoption("--device"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: torch sees no GPU")
    config.stash[REPORT] = Report(device, config.getoption("--json-out") or default_directory(device))
    harness.rehearsal = config.getoption("--rehearse")
    # pytest-benchmark reads its options later, in its own `pytest_configure`.  These columns fit a terminal.
    config.option.benchmark_columns = ["min", "median", "iqr", "rounds"]
    # Its tables have hundreds of lines.
    config.option.benchmark_quiet = config.option.verbose <= 0


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the benches of a module slow on the device that its ``SLOW_ON`` names; all others end within minutes."""
    here = Path(__file__).parent
    for item in items:
        if here not in item.path.parents:
            continue
        # A warning of some library fails a test, but no bench.
        item.add_marker(pytest.mark.filterwarnings("default"))
        if config.getoption("--device") == getattr(getattr(item, "module", None), "SLOW_ON", None):
            item.add_marker("slow")


def pytest_collection_finish(session: pytest.Session) -> None:
    here, config = Path(__file__).parent, session.config
    benches = [item for item in session.items if here in item.path.parents]
    if not benches or config.option.collectonly:
        return
    config.pluginmanager.register(ProgressLines(config, benches))
    if len(benches) == len(session.items):
        # The line of a case names its file.
        config.pluginmanager.getplugin("terminalreporter").showfspath = False


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> torch.device:
    return torch.device(pytestconfig.getoption("--device"))


@pytest.fixture(scope="session")
def report(pytestconfig: pytest.Config) -> Report:
    return pytestconfig.stash[REPORT]


if importlib.util.find_spec("pytest_benchmark") is None:

    @pytest.fixture
    def benchmark() -> None:
        """Stands in for pytest-benchmark's fixture, so that `pytest tests bench` runs without the extra `bench`."""
        pytest.skip("needs pytest-benchmark: pip install -e '.[bench]'")


@pytest.fixture(autouse=True)
def written(report: Report) -> Iterator[None]:
    yield
    if not harness.rehearsal:
        report.write_sections()


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    report = config.stash[REPORT]
    if harness.rehearsal or not (report.sections or report.notes):
        return
    terminalreporter.section("fusedseg bench")
    about = ", ".join(f"{key} {value}" for key, value in machine(report.device).items() if value)
    terminalreporter.write_line(about)
    for section in report.sections.values():
        terminalreporter.write_line("")
        for line in section.lines():
            terminalreporter.write_line(line)
    if report.sections:
        terminalreporter.write_line("")
        terminalreporter.write_line(LEGEND)
    for note in report.notes:
        terminalreporter.write_line("")
        terminalreporter.write_line(note)
    terminalreporter.section("in short")
    for line in closing_lines(report):
        terminalreporter.write_line(line)
