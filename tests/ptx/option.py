"""``pytest --ptx sm_80|sm_90``: tests of kernels and ops run on the machine in place of Triton's interpreter.

Helpers of the interpreter then work on the machine: ``traffic`` counts bytes by argument, and ``only_programs`` and
``backwards`` choose programs and their order.  A test fails if the machine has findings.
"""

import contextlib
import re

import pytest

from tests.tools import interpreter, traffic

from .driver import Driver, driven


def harmless(finding) -> bool:
    """All warps read a running statistic and one thread replaces it; the other warps do not use the value."""
    return finding.kind == "global-order" and re.search(r" running_(mean|var)_ptr,", finding.text) is not None


class Plugin:
    def __init__(self, arch: str) -> None:
        self.driver = Driver(arch)
        self._stack = contextlib.ExitStack()

    def pytest_sessionstart(self, session) -> None:
        self._stack.enter_context(driven(self.driver))
        for module, name, value in (
            (interpreter, "only_programs", self.only_programs),
            (interpreter, "backwards", lambda: self.only_programs(interpreter.last_first)),
            (traffic, "traffic", self.traffic),
        ):
            self._stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, value)

    @contextlib.contextmanager
    def only_programs(self, choose):
        before, self.driver.options.choose = self.driver.options.choose, choose
        try:
            yield
        finally:
            self.driver.options.choose = before

    @contextlib.contextmanager
    def traffic(self):
        before, self.driver.moved = self.driver.moved, traffic.Moved()
        try:
            yield self.driver.moved
        finally:
            self.driver.moved = before

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        before = dict(self.driver.findings)
        result = yield
        new = [f for f in self.driver.findings if self.driver.findings[f] != before.get(f) and not harmless(f)]
        assert not new, "\n".join(f"{finding.kind}: {finding.text}" for finding in new)
        return result

    def pytest_terminal_summary(self, terminalreporter) -> None:
        counts = self.driver.counts
        if not counts.launches:
            return
        terminalreporter.write_line(
            f"PTX for {self.driver.arch}: {sum(counts.launches.values())} launches of "
            f"{len(self.driver.programs)} compiled kernels, {sum(counts.instructions.values())} instructions of warps"
        )
        for finding, count in sorted(self.driver.findings.items()):
            terminalreporter.write_line(f"  {count} x {finding.kind}: {finding.text}")

    def pytest_unconfigure(self) -> None:
        self._stack.close()
