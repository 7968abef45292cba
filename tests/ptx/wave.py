"""CTAs that run in lock step: every thread is a lane of numpy arrays.

Threads that diverge run lowest block first.  A CTA's barrier opens when all of its threads wait there or have ended.
"""

from typing import NamedTuple

import numpy as np

from .matrices import Matrices
from .memory import Memory
from .parse import Unsupported
from .shared import Local, Shared

u4 = np.uint32
# The value of a register that no instruction has written.
GARBAGE = {"pred": np.bool_(False), "b16": np.uint16(0x7FF3), "b32": u4(0x7FC0BEEF),
           "b64": np.uint64(0x7FF8DEADBEEF7FC1)}  # fmt: skip
REDUCTIONS = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
              "xor": np.bitwise_xor}  # fmt: skip


class Finding(NamedTuple):
    """An error, or a result that depends on an order, although the launch ran to its end: see docs/methods.md."""

    kind: str
    kernel: str
    text: str


class Registers(dict):
    def __missing__(self, name: str):
        value = GARBAGE[self.wave.kernel.classes[name.rstrip("0123456789")]]
        self[name] = np.full(self.wave.n, value)
        return self[name]


class Wave:
    """``numbers`` are the CTAs in the launch's grid.  ``launch`` has the program, the arguments and the options."""

    def __init__(self, launch, numbers: np.ndarray) -> None:
        self.program, self.kernel, self.name = launch.program, launch.program.kernel, launch.program.kernel.name
        self.options, self.report, self.where = launch.options, launch.report, launch.program.where
        self.parameters = launch.values
        self.threads, self.ctas = self.kernel.threads, len(numbers)
        self.n = self.ctas * self.threads
        self.lanes = np.arange(self.n)
        self.cta = np.repeat(numbers, self.threads).astype(np.int64)
        self.local_cta = np.repeat(np.arange(self.ctas), self.threads)
        self.tid = np.tile(np.arange(self.threads, dtype=u4), self.ctas)
        self.warp = (self.tid // 32).astype(np.int32)
        x, y, z = launch.grid
        specials = {"tid.x": self.tid, "tid.y": 0, "tid.z": 0, "laneid": self.tid % u4(32), "ctaid.x": self.cta % x,
                    "ctaid.y": self.cta // x % y, "ctaid.z": self.cta // (x * y), "nctaid.x": x, "nctaid.y": y,
                    "nctaid.z": z}  # fmt: skip
        self.specials = {name: np.broadcast_to(value, self.n).astype(u4) for name, value in specials.items()}
        # The number of barriers that each CTA has passed, and that each warp has passed, including bar.warp.sync.
        self.epoch = np.zeros(self.ctas, np.int32)
        self.warp_syncs = np.zeros((self.ctas, self.threads // 32), np.int32)
        self.memory = Memory(self, launch.segments, launch.moved)
        self.shared = Shared(self, self.program.shared, self.program.granule)
        self.local, self.matrices = Local(self), Matrices(self)
        self.together = self.options.schedule == "together" or self.threads == 32
        self._whole: np.ndarray | None = None

    def find(self, kind: str, text: str, line: int) -> None:
        self.report(Finding(kind, self.name, f"{text}: {self.where(line)}"))

    def lanes_of(self, guard, idx):
        """Returns the elements of a block's arrays that take part in an instruction, and their lanes."""
        if guard is None:
            return slice(None), self.lanes if idx is None else idx
        chosen = np.flatnonzero(guard)
        return chosen, chosen if idx is None else idx[chosen]

    def special(self, name: str, idx):
        if name not in self.specials:
            raise Unsupported(f"%{name}")
        value = self.specials[name]
        return value if idx is None else value[idx]

    def run(self) -> None:
        """Runs the wave; ``at`` is the block of each lane, or None while all lanes are at block ``b``."""
        registers, b = Registers(), 0
        registers.wave = self
        at = None if self.together else np.zeros(self.n, np.int64)
        done, waiting = np.zeros((2, self.n), bool)
        while True:
            idx = None
            if at is not None:
                ready = self._ready(done, waiting)
                if not ready.any():
                    if done.all():
                        return
                    raise RuntimeError(f"{self.name}: threads wait at a barrier for ever")
                b = int(at[ready].min())
                idx = np.flatnonzero(ready & (at == b))
                if len(idx) == self.n:
                    at = idx = None
            end = self.kernel.blocks[b].end
            self._whole = None
            taken = self.program.functions[b](self, registers, idx)
            if end[0] == "return":
                if idx is None:
                    return
                done[idx] = True
                self._open_barriers(waiting, done, at)
                continue
            following = self._following(b, end, taken)
            if idx is not None:
                at[idx] = following
                if end[0] == "barrier":
                    waiting[idx] = True
                    self._open_barriers(waiting, done, at)
            elif isinstance(following, int):
                b = following
                if end[0] == "barrier":
                    self.epoch += 1
                    self.warp_syncs += 1
                    self.shared.unseen.clear()
            else:
                at = following

    def _following(self, b: int, end, taken):
        """The block after ``b``: a number if all lanes go there, or an array with the block of each lane."""
        if end[0] == "branch":
            return self.kernel.labels[end[1]]
        if end[0] != "either":
            return b + 1
        following = np.where(taken, self.kernel.labels[end[2]], b + 1)
        return int(following[0]) if (following == following[0]).all() else following

    def _ready(self, done, waiting):
        """The lanes that can go on.  With the schedules "first" and "last" that is one warp of each CTA."""
        ready = ~(done | waiting)
        if self.together:
            return ready
        can = ready.reshape(self.ctas, -1, 32).any(2)
        first = can.argmax(1)
        if self.options.schedule == "last":
            first = can.shape[1] - 1 - can[:, ::-1].argmax(1)
        return ready & (self.warp == np.repeat(first, self.threads))

    def _open_barriers(self, waiting, done, at) -> None:
        wait, end = waiting.reshape(self.ctas, -1), done.reshape(self.ctas, -1)
        for cta in np.flatnonzero((wait | end).all(1) & wait.any(1)):
            lanes = slice(cta * self.threads, (cta + 1) * self.threads)
            if len(np.unique(at[lanes][waiting[lanes]])) > 1:
                self.find("divergent-sync", "threads of a CTA wait at different barriers", 0)
            waiting[lanes] = False
            self.epoch[cta] += 1
            self.warp_syncs[cta] += 1

    def whole_warps(self, idx, line: int) -> None:
        """Checks that all threads of a warp take part in an instruction of the warp."""
        if idx is None or self._whole is idx:
            return
        rows = idx.reshape(-1, 32) if len(idx) % 32 == 0 else np.zeros((1, 32), int)
        if (rows[:, 0] % 32 != 0).any() or (np.diff(rows, axis=1) != 1).any():
            raise RuntimeError(f"a part of a warp's threads: {self.where(line)}")
        self._whole = idx

    def sync_warps(self, idx, line: int) -> None:
        self.whole_warps(idx, line)
        first = np.arange(0, self.n, 32) if idx is None else idx[::32]
        self.warp_syncs[self.local_cta[first], self.warp[first]] += 1

    def shuffle(self, kind: str, values, by, bounds, idx, line: int):
        """shfl.sync: each lane gets the value of another lane, and whether there is such a lane.

        It brings the threads of a warp together, but promises no order of their accesses to memory.
        """
        self.whole_warps(idx, line)
        lane = np.arange(len(values)) & 31
        by, bounds = (np.broadcast_to(v, len(values)).astype(np.int64) for v in (by, bounds))
        segment = (bounds >> 8) & 31
        last = (lane & segment) | (bounds & 31 & ~segment)
        if kind == "bfly":
            source = lane ^ (by & 31)
        elif kind == "idx":
            source = (lane & segment) | (by & 31 & ~segment)
        else:
            raise Unsupported(f"shfl.sync.{kind}: {self.where(line)}")
        valid = source <= last
        source = np.where(valid, source, lane)
        return values[np.arange(len(values)) - lane + source], valid

    def reduce(self, by: str, values, members, idx, line: int):
        """redux.sync: each lane gets the sum, or the smallest, of the values of all lanes of its warp."""
        self.whole_warps(idx, line)
        if (np.asarray(members) != 0xFFFFFFFF).any() or by not in REDUCTIONS:
            raise Unsupported(f"redux.sync.{by}: {self.where(line)}")
        return np.repeat(REDUCTIONS[by].reduce(values.reshape(-1, 32), axis=1, dtype=values.dtype), 32)
