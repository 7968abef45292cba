"""The server that runs modules as programs."""

import signal

import pytest

from tests.tools.warm import run_bare


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a timer of POSIX")
def test_an_interrupted_request_ends_the_server():
    """Each later program got the answer of the one before: 18 false errors in one process."""

    def interrupt(number, frame):
        raise TimeoutError

    assert run_bare("print(0)").stdout == "0\n"
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(TimeoutError):
            run_bare("import time; time.sleep(600)")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert run_bare("print(1)").stdout == "1\n"
