"""``pytest --ptx``: helpers of the interpreter then work on the machine, and a test fails if it has findings."""

import contextlib
import re
from unittest import mock

import pytest

from tests.tools import interpreter, traffic

from .driver import Driver, driven


def harmless(finding) -> bool:
    """All warps read a running statistic, or the number of batches, which one thread replaces; others do not use it."""
    return (
        finding.kind == "global-order"
        and re.search(r" (running_mean|running_var|batches)_ptr,", finding.text) is not None
    )


class Plugin:
    def __init__(self, arch: str) -> None:
        self.driver = Driver(arch)
        self._stack = contextlib.ExitStack()

    def pytest_sessionstart(self, session) -> None:
        driver = self._stack.enter_context(driven(self.driver))

        def only_programs(choose):
            return mock.patch.object(driver.options, "choose", choose)

        def counted():
            return mock.patch.object(driver, "moved", traffic.Moved())

        self._stack.enter_context(mock.patch.object(interpreter, "only_programs", only_programs))
        self._stack.enter_context(mock.patch.object(traffic, "traffic", counted))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        before = dict(self.driver.findings)
        result = yield
        new = [f for f in self.driver.findings if self.driver.findings[f] != before.get(f) and not harmless(f)]
        assert not new, "\n".join(f"{finding.kind}: {finding.text}" for finding in new)
        return result

    def pytest_terminal_summary(self, terminalreporter) -> None:
        if launches := self.driver.launches:
            terminalreporter.write_line(
                f"PTX for {self.driver.arch}: {len(self.driver.programs)} compiled kernels, launches: {dict(launches)}"
            )
        for finding, count in sorted(self.driver.findings.items()):
            terminalreporter.write_line(f"  {count} x {finding.kind}: {finding.text}")

    def pytest_unconfigure(self) -> None:
        self._stack.close()
