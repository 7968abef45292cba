"""Shows on the terminal what a long command or function is doing, and for how long."""

import shutil
import sys
import threading
import time

# A command that ends earlier shows no line.
QUIET_SECONDS = 1.0
REDRAW_SECONDS = 0.5
CLEAR = "\r\x1b[K"


class Progress:
    """A context that shows ``text`` and the elapsed seconds on stderr, and clears the line at its end.

    It writes nothing if stderr is no terminal, so that logs and pipes stay clean.  A thread redraws the line, so
    that the seconds go on while PyTorch computes.  What ends within ``quiet`` seconds shows no line.

        with Progress("fusedseg plan") as progress:
            progress.update("eager, batch 8")       # "fusedseg plan: eager, batch 8 (3 s)"
    """

    def __init__(self, text: str, quiet: float | None = None) -> None:
        self._text, self._now = text, ""
        self._quiet = QUIET_SECONDS if quiet is None else quiet
        self._start = time.monotonic()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._redraw, daemon=True) if sys.stderr.isatty() else None

    def update(self, text: str) -> None:
        """Sets the second part of the line, which says what is being done now."""
        self._now = text

    def __enter__(self) -> "Progress":
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()

    def _redraw(self) -> None:
        if self._done.wait(self._quiet):
            return
        while not self._done.is_set():
            now = f": {self._now}" if self._now else ""
            line = f"{self._text}{now} ({time.monotonic() - self._start:.0f} s)"
            # The terminal would wrap a longer line, and CLEAR would wipe only its last part.
            sys.stderr.write(CLEAR + line[: shutil.get_terminal_size().columns - 1])
            sys.stderr.flush()
            self._done.wait(REDRAW_SECONDS)
        sys.stderr.write(CLEAR)
        sys.stderr.flush()
