"""Global memory: the tensors that a launch received, and the threads that touched each byte of them.

Each tensor lies in a window of addresses of its own.  So an access belongs to the very argument that its address was
computed from, and an access outside of that argument is an error, even if another tensor lies there.
"""

import ctypes
import functools
from collections.abc import Callable

import numpy as np

from tests.tools.traffic import Moved

u1, u2, u4, u8 = np.uint8, np.uint16, np.uint32, np.uint64
# Windows are 2**WINDOW bytes apart, and a tensor begins in the middle of its own.
WINDOW = 44


class OutOfBounds(RuntimeError):
    pass


class Misaligned(RuntimeError):
    pass


class Marks:
    """The last thread that touched each granule of a piece of memory in this launch.

    ``cta`` is the CTA + 1, or 0 if no CTA touched it.  ``warp`` is the warp + 1, and ``epoch`` the number of barriers
    that the CTA had passed.  -1 stands for several CTAs or warps.
    """

    def __init__(self, count: int) -> None:
        self.cta, self.warp, self.epoch = (np.zeros(count, np.int32) for _ in range(3))

    def note(self, at, cta, warp, epoch, several: bool) -> None:
        """Notes accesses; with ``several`` all threads that touched a granule count, and not only the last one."""
        if several:
            same_cta = self.cta[at] == cta
            same_warp = same_cta & (self.epoch[at] == epoch) & (self.warp[at] != warp)
            cta = np.where((self.cta[at] != 0) & ~same_cta, -1, cta)
            warp = np.where(same_warp, -1, warp)
        self.cta[at], self.warp[at], self.epoch[at] = cta, warp, epoch
        if several:
            # Lanes of one instruction may have met here.
            for marks, mine in ((self.cta, cta), (self.warp, warp)):
                met = marks[at] != mine
                marks[at[met]] = -1


class Shadow:
    """The reads and writes of a piece of memory, by granules of some bytes.  Tensors that overlap have one shadow.

    Most tensors are only read.  So reads wait in ``unseen`` until the first write, as functions that note them.
    """

    def __init__(self, address: int, nbytes: int, granule: int) -> None:
        self.address, self.granule = address, granule
        self.reads, self.writes = Marks(nbytes // granule + 16), Marks(nbytes // granule + 16)
        self.unseen: list[Callable[[], None]] | None = []


class Segment:
    """The memory that a kernel may touch through one argument: from the tensor's first to its last element."""

    def __init__(self, name: str, address: int, nbytes: int, number: int, itemsize: int) -> None:
        self.name, self.address, self.nbytes, self.itemsize = name, address, nbytes, itemsize
        # The window holds whole vectors of 16 bytes, so that numpy can view it as vectors.
        self.pad = address % 16
        size = -(-(self.pad + nbytes) // 16) * 16
        memory = (ctypes.c_uint8 * size).from_address(address - self.pad) if nbytes else b""
        data = np.frombuffer(memory, u1)
        self.views = {kind: data.view(kind) for kind in (u1, u2, u4, u8)}
        # The address that the kernel sees has the same low bits as the true address.
        self.window = ((number + 1) << WINDOW) + (1 << (WINDOW - 1))
        self.virtual = self.window + self.pad
        self.shadow = Shadow(0, 0, 1)


def cast_shadows(segments: list[Segment]) -> None:
    """Gives every segment its shadow."""
    groups: list[list[Segment]] = []
    end = 0
    for segment in sorted((s for s in segments if s.nbytes), key=lambda s: s.address):
        if not groups or segment.address >= end:
            groups.append([])
        groups[-1].append(segment)
        end = max(end, segment.address + segment.nbytes)
    for group in groups:
        granule = min(4, *(s.itemsize for s in group))
        if any(s.address % granule for s in group):
            granule = 1
        first = group[0].address - group[0].pad
        shadow = Shadow(first, max(s.address + s.nbytes for s in group) - first, granule)
        for segment in group:
            segment.shadow = shadow


def spread(start, nbytes: int, granule: int, *values):
    """Spreads accesses of ``nbytes`` over granules; each granule gets the values of its access."""
    count = max(1, nbytes // granule)
    if count == 1:
        return start // granule, *values
    granules = (start // granule)[:, None] + np.arange(count)
    return granules.ravel(), *(np.repeat(v, count) for v in values)


def put(view, at, data):
    """Stores rows of data; returns which rows changed memory, and whether rows for one place differ."""
    changes = (view[at] != data).any(axis=1)
    view[at] = data
    # One of the rows wins, and the others now find its value.
    return changes, (view[at] != data).any()


class Space:
    """Loads and stores of lanes by ``read`` and ``write``, which global and shared memory have."""

    def load(self, addresses, kind, count: int, guard, idx, line: int):
        """Loads ``count`` arrays of values, with 0 for lanes that the guard leaves out."""
        chosen, lanes = self.wave.lanes_of(guard, idx)
        if len(lanes) == len(addresses):
            return tuple(np.ascontiguousarray(self.read(addresses, kind, count, lanes, line).T))
        out = np.zeros((count, len(addresses)), kind)
        if len(lanes):
            out[:, chosen] = self.read(addresses[chosen], kind, count, lanes, line).T
        return tuple(out)

    def store(self, addresses, kind, values, guard, idx, line: int) -> None:
        chosen, lanes = self.wave.lanes_of(guard, idx)
        if len(lanes):
            self.write(addresses[chosen], np.stack([v[chosen] for v in values], axis=1), lanes, line)


class Memory(Space):
    """The accesses of the CTAs of one wave."""

    def __init__(self, wave, segments: dict[int, Segment], moved: Moved) -> None:
        self.wave, self.segments, self.moved = wave, segments, moved

    def _parts(self, addresses, nbytes: int, line: int):
        """Divides accesses by segment: their positions among all accesses, and their offsets in bytes."""
        first, last = (int(end) >> WINDOW for end in (addresses.min(), addresses.max()))
        for window in [first] if first == last else np.unique(addresses >> u8(WINDOW)).tolist():
            positions = slice(None) if first == last else np.flatnonzero(addresses >> u8(WINDOW) == window)
            mine = addresses[positions]
            segment = self.segments.get(window - 1)
            if segment is None:
                raise OutOfBounds(f"address {int(mine[0]):#x} of no argument: {self.wave.where(line)}")
            if int(np.bitwise_or.reduce(mine)) % nbytes:
                wrong = int(mine[np.flatnonzero(mine % u8(nbytes))[0]]) - segment.virtual
                text = f"byte {wrong} of {segment.name} is no multiple of {nbytes} in memory"
                raise Misaligned(f"{text}: {self.wave.where(line)}")
            offsets = (mine - u8(segment.window)).view(np.int64)
            low, high = int(offsets.min()) - segment.pad, int(offsets.max()) + nbytes - segment.pad
            if low < 0 or high > segment.nbytes:
                text = f"bytes {low} to {high} of {segment.name}, which has {segment.nbytes}"
                raise OutOfBounds(f"{text}: {self.wave.where(line)}")
            yield segment, positions, offsets

    def read(self, addresses, kind, count: int, lanes, line: int):
        """Reads ``count`` values at each address, as an array of (lanes, count)."""
        nbytes = np.dtype(kind).itemsize * count
        out = np.empty((len(addresses), count), kind)
        for segment, positions, offsets in self._parts(addresses, nbytes, line):
            who = lanes[positions]
            self.moved.loads[self.wave.name, segment.name] += len(who) * nbytes
            shadow, epoch = segment.shadow, self.wave.epoch.copy()
            note = functools.partial(self._touch, segment, offsets, nbytes, who, None, epoch, line)
            if shadow.unseen is None:
                note()
            else:
                shadow.unseen.append(note)
            out[positions] = segment.views[kind].reshape(-1, count)[offsets // nbytes]
        return out

    def write(self, addresses, data, lanes, line: int) -> None:
        count, nbytes = data.shape[1], data.itemsize * data.shape[1]
        for segment, positions, offsets in self._parts(addresses, nbytes, line):
            mine, who = data[positions], lanes[positions]
            self.moved.stores[self.wave.name, segment.name] += len(who) * nbytes
            changes, differ = put(segment.views[data.dtype.type].reshape(-1, count), offsets // nbytes, mine)
            if differ:
                text = f"lanes of one instruction differ in what they store to {segment.name}"
                self.wave.find("global-race", text, line)
            unseen, segment.shadow.unseen = segment.shadow.unseen, None
            for note in unseen or ():
                note()
            self._touch(segment, offsets, nbytes, who, changes, self.wave.epoch, line)

    def _touch(self, segment: Segment, offsets, nbytes: int, lanes, changes, epochs, line: int) -> None:
        """Notes reads; or writes, if ``changes`` is given: only the writes that it marks changed a value."""
        shadow, wave, write = segment.shadow, self.wave, changes is not None
        start = offsets + (segment.address - segment.pad - shadow.address)
        matters = changes if write else np.ones(len(lanes), bool)
        at, lanes, matters = spread(start, nbytes, shadow.granule, lanes, matters)
        cta, warp, epoch = wave.cta[lanes] + 1, wave.warp[lanes] + 1, epochs[wave.local_cta[lanes]]
        for marks in (shadow.writes, shadow.reads) if write else (shadow.writes,):
            what = f"one {'writes' if write else 'reads'} and one {'wrote' if marks is shadow.writes else 'read'}"
            before = marks.cta[at]
            if not before.any():
                continue
            if (matters & (before != 0) & (before != cta)).any():
                wave.find("global-race", f"two CTAs touch a byte of {segment.name}, {what}", line)
            same = (before == cta) & (marks.epoch[at] == epoch)
            if (matters & same & (marks.warp[at] != warp)).any():
                wave.find("global-order", f"two warps without a barrier touch a byte of {segment.name}, {what}", line)
        (shadow.writes if write else shadow.reads).note(at, cta, warp, epoch, several=not write)
