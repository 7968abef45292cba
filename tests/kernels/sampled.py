"""The bytes of a few programs of each launch, extrapolated to all of its programs, in the interpreter."""

import contextlib
from collections.abc import Callable, Iterator
from fractions import Fraction

import numpy as np

from tests.tools.interpreter import Program, only_programs
from tests.tools.traffic import Moved, traffic

Choice = Callable[[Program], list[Program]]


@contextlib.contextmanager
def sampled(choose: Choice) -> Iterator[tuple[Moved, dict[str, Fraction]]]:
    """What the programs that ``choose`` lists for a grid move, and of each kernel all programs divided by those."""
    shares: dict[str, Fraction] = {}

    def chosen(kernel: str, grid: Program) -> list[Program]:
        programs = choose(grid)
        shares[kernel] = Fraction(grid[0] * grid[1], len(programs))
        return programs

    # Programs that do not run leave undefined values in their partial results.
    with only_programs(chosen), np.errstate(all="ignore"), traffic() as moved:
        yield moved, shares


def every(grid: Program) -> list[Program]:
    return [(i, j, 0) for i in range(grid[0]) for j in range(grid[1])]


def first_middle_last(grid: Program) -> list[Program]:
    programs = every(grid)
    return [programs[0], programs[len(programs) // 2], programs[-1]]


def first_and_last(grid: Program) -> list[Program]:
    return [(0, 0, 0), (grid[0] - 1, grid[1] - 1, 0)]
