"""Runs a launch of a compiled kernel on given memory."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tests.tools.traffic import Moved

from .access import shared_bytes
from .memory import Segment, cast_shadows
from .parse import Kernel
from .translate import translate
from .wave import Finding, Wave

Grid = tuple[int, int, int]


@dataclass
class Options:
    """Limits of a run, of which ``lanes`` threads are in lock step, and orders that PTX does not specify."""

    lanes: int = 8192
    # "together": all warps go on in lock step.  "first" or "last": the first or last warp of a CTA that can go on runs
    # alone, up to a barrier.
    schedule: str = "together"
    # The CTAs to run of a kernel's name and grid, in their order; None runs all of them.
    choose: Callable[[str, Grid], list[Grid]] | None = None


class Program:
    """A kernel that was parsed and translated, and the bytes of shared memory that a CTA has."""

    def __init__(self, ptx: str, shared: int) -> None:
        self.kernel, self.shared = Kernel(ptx), shared
        self.functions = translate(self.kernel)
        instructions = [i for block in self.kernel.blocks for i in block.instructions]
        self._places = {i.line: f"{i.source} (PTX line {i.line}: {i.text})" for i in instructions}
        # The bytes of the smallest access to shared memory.
        self.granule = min((shared_bytes(i) for i in instructions), default=16)

    def where(self, line: int) -> str:
        return f"{self.kernel.name} at {self._places.get(line, '?')}"


@dataclass
class Launch:
    """A program with its grid and arguments: the values of all parameters, and the memory that they point to."""

    program: Program
    grid: Grid
    values: list[int]
    segments: dict[int, Segment]
    options: Options
    report: Callable[[Finding], None]
    moved: Moved = field(default_factory=Moved)

    def run(self) -> None:
        x, y, z = self.grid
        numbers = np.arange(x * y * z)
        if self.options.choose is not None:
            chosen = self.options.choose(self.program.kernel.name, self.grid)
            numbers = np.array([i + x * (j + y * k) for i, j, k in chosen], np.int64)
        cast_shadows(list(self.segments.values()))
        self.moved.launches.append(self.program.kernel.name)
        at_once = max(1, self.options.lanes // self.program.kernel.threads)
        with np.errstate(all="ignore"):
            for first in range(0, len(numbers), at_once):
                Wave(self, numbers[first : first + at_once]).run()
