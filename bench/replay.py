"""Hands the times of the harness to pytest-benchmark.

pytest-benchmark times one test after the other, so that a disturbance of the machine affects a single contender.  The
harness times the contenders round by round instead.  ``report_step`` then lets pytest-benchmark read these times from
its clock, and they appear in its table, its JSON and its comparisons.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from .harness import Result


class Clock:
    """A timer whose readings differ by the loaded samples."""

    def __init__(self) -> None:
        self._readings: Iterator[float] = iter(())

    def load(self, samples: list[float]) -> None:
        self._readings = iter([reading for sample in samples for reading in (0.0, sample)])

    def __call__(self) -> float:
        return next(self._readings)


CLOCK = Clock()


def report_step(benchmark: Any, group: str, contender: str, result: Result) -> None:
    """Reports a contender's steps.  It skips a contender that cannot run here, and fails one with wrong results.

    The test must be marked ``benchmark(timer=CLOCK)``.
    """
    if result.missing:
        pytest.skip(result.missing)
    if result.refused:
        pytest.fail(f"{contender} disagrees with the float64 reference: {result.refused}")
    benchmark.group = group
    benchmark.extra_info.update(kept_bytes=result.kept, peak_bytes=result.peak, errors=result.errors)
    CLOCK.load(result.step)
    benchmark.pedantic(lambda: None, rounds=len(result.step))
