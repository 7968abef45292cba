"""Ends a process in which a test has broken CUDA, so that only that test fails.

After an assertion in the device, or an access to memory that is not there, every later call of CUDA in the process
fails.  On an H100 one assertion failed 692 tests after its own.  With pytest-xdist, a new process runs them.
"""

import os
from collections.abc import Callable, Iterator

import pytest


class Context:
    """A pytest plugin.

    ``synchronize`` waits for the device, and raises RuntimeError if the device reports an error.  ``worker``: whether
    the process is a worker of pytest-xdist.
    """

    def __init__(self, synchronize: Callable[[], None], worker: bool) -> None:
        self.synchronize = synchronize
        self.worker = worker

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        """A kernel's error reaches the host late.  The test waits for it, so that it fails and not a later test."""
        yield
        self.synchronize()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Ends the process if the test has broken CUDA.

        Here the reports of the test are sent already.  pytest-xdist has not been told that the test is complete, so it
        counts the end of the process as a failure of this test, and hands the tests after it to another process.
        """
        done = yield
        try:
            self.synchronize()
        except RuntimeError as error:
            reason = f"CUDA works no more in this process after {item.nodeid}: {str(error).splitlines()[0]}"
            if not self.worker:
                pytest.exit(f"{reason}\nThe tests after it did not run; with -n they run in another process.", 1)
            # ``sys.stderr`` of a worker may be captured.
            os.write(2, f"\n{reason}\n".encode())
            os._exit(1)
        return done
