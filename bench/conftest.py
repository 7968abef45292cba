"""Options and fixtures of the benches, and the tables at the end of a run."""

from contextlib import suppress
from pathlib import Path

import pytest
import torch

from . import harness
from .report import front_of, table_lines
from .results import COPY_PASSES, PASSES, Report, default_directory, machine

REPORT = pytest.StashKey[Report]()
LEGEND = f"""Ratios are of medians over interleaved rounds: below 1, ours is faster or smaller.  kept: bytes saved for
backward, the output among them, which the next layer saves.  peak: the allocator's, over one step.  Bandwidth: of
{PASSES["step"]} passes over the tensor a step, the fewest that suffice; a copy makes {COPY_PASSES}."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--json-out", type=Path, help="folder for the results (default: bench/results/<gpu> or bench/out)")
    parser.addoption(
        "--rehearse",
        action="store_true",
        help="take every contender's first step, which fills compilers' caches; nothing is compared, timed or written",
    )
    parser.addoption("--seconds", type=float, default=600.0, help="for all of bench/gpu/test_steps.py")
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


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrizes ``case`` over ``CASES`` of a bench for the device, and over ``MORE``, whose cases are slow."""
    if "case" in metafunc.fixturenames:
        kind, module = metafunc.config.getoption("--device"), metafunc.module
        slow = [pytest.param(case, marks=pytest.mark.slow) for case in module.MORE[kind]]
        metafunc.parametrize("case", [*module.CASES[kind], *slow], ids=str)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            # A warning of some library fails a test, but no bench.
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> torch.device:
    return torch.device(pytestconfig.getoption("--device"))


@pytest.fixture(scope="session")
def report(pytestconfig: pytest.Config) -> Report:
    return pytestconfig.stash[REPORT]


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    report = config.stash[REPORT]
    if not (report.files or report.notes):
        return
    terminalreporter.section("fusedseg bench")
    about = ", ".join(f"{key} {value}" for key, value in machine(report.device).items() if value)
    for line in (about, "", LEGEND, "", *table_lines(report.files), *front_of(report.files)):
        terminalreporter.write_line(line)
    for note in report.notes:
        terminalreporter.write_line(note)
        terminalreporter.write_line("")
    terminalreporter.write_line(f"JSON: {report.directory}; `python -m bench.report {report.directory}` prints it")
