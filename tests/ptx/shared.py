"""Shared memory of the CTAs of a wave: the threads that touched each granule since a barrier, and asynchronous copies.

A copy by cp.async arrives when a thread waits for it, and not before.  Shared memory holds NaN at first.
"""

import numpy as np

from .memory import Misaligned, OutOfBounds, Space, put, spread
from .parse import Unsupported

u1, u2, u4, u8 = np.uint8, np.uint16, np.uint32, np.uint64
# The address of the first byte in a CTA.  It is not 0, so that a null pointer is noticed.
BASE = 1024
NAN = 0x7FC0BEEF
# Stands in place of a thread for threads of several warps.  No thread has its warp, -1 >> 5.
SEVERAL = -1


class Local(Space):
    """The bytes that each thread has for itself."""

    def __init__(self, wave) -> None:
        self.wave, self.bytes = wave, np.full((wave.n, wave.kernel.local), 0xBE, u1)

    def _at(self, addresses, nbytes: int):
        return addresses[:, None].astype(np.int64) + np.arange(nbytes)

    def read(self, addresses, kind, count: int, lanes, line: int):
        return self.bytes[lanes[:, None], self._at(addresses, np.dtype(kind).itemsize * count)].view(kind)

    def write(self, addresses, data, lanes, line: int) -> None:
        self.bytes[lanes[:, None], self._at(addresses, data.itemsize * data.shape[1])] = data.view(u1)


class Shared(Space):
    """Each CTA has ``stride`` bytes; the kernel asked for ``size`` bytes."""

    def __init__(self, wave, size: int, granule: int) -> None:
        self.wave, self.size, self.granule = wave, size, granule
        self.stride = -(-size // 16) * 16
        total = wave.ctas * self.stride
        memory = np.full(total // 4, NAN, u4).view(u1)
        self.views = {kind: memory.view(kind) for kind in (u1, u2, u4, u8)}
        count = total // granule
        # The last write and read: the number of barriers before it + 1, or 0; and the thread, or SEVERAL.
        self.write_epoch, self.write_thread, self.read_epoch, self.read_thread = np.zeros((4, count), np.int32)
        # The number of bar.warp.sync that the writing warp had passed.
        self.write_sync = np.zeros(count, np.int32)
        # Reads since a barrier of all CTAs that are not in ``read_epoch`` and ``read_thread`` yet; only writes ask.
        self.unseen: list[tuple] = []
        # How many copies may still write, and how many matrix products may still read.
        self.pending, self.reading = np.zeros((2, count), np.int16)
        # Running copies: lanes, places in shared memory, the words for these places, groups, and the PTX line.
        self.copies: list[tuple] = []
        self.committed = np.zeros(wave.n, np.int32)

    def offsets(self, addresses, nbytes: int, lanes, line: int):
        offsets = addresses.astype(np.int64) - BASE
        if int(np.bitwise_or.reduce(offsets)) % nbytes:
            raise Misaligned(f"an address of shared memory is no multiple of {nbytes}: {self.wave.where(line)}")
        low, high = int(offsets.min()), int(offsets.max()) + nbytes
        if low < 0 or high > self.size:
            raise OutOfBounds(f"bytes {low} to {high} of shared memory, which has {self.size}: {self.wave.where(line)}")
        return offsets + self.wave.local_cta[lanes] * self.stride

    def read(self, addresses, kind, count: int, lanes, line: int, several_warps: bool = False):
        nbytes = np.dtype(kind).itemsize * count
        offsets = self.offsets(addresses, nbytes, lanes, line)
        self.touch(offsets, nbytes, lanes, None, line, several_warps)
        return self.views[kind].reshape(-1, count)[offsets // nbytes]

    def write(self, addresses, data, lanes, line: int) -> None:
        count, nbytes = data.shape[1], data.itemsize * data.shape[1]
        offsets = self.offsets(addresses, nbytes, lanes, line)
        changes, differ = put(self.views[data.dtype.type].reshape(-1, count), offsets // nbytes, data)
        if differ:
            self.wave.find("shared-race", "lanes of one instruction store different values", line)
        self.touch(offsets, nbytes, lanes, changes, line)

    def touch(self, offsets, nbytes: int, lanes, changes, line: int, several_warps: bool = False) -> None:
        """Notes reads; or writes, if ``changes`` is given: only the writes that it marks changed a value."""
        wave, write, does = self.wave, changes is not None, "reads" if changes is None else "writes"
        matters = changes if write else np.ones(len(lanes), bool)
        at, lanes, matters = spread(offsets, nbytes, self.granule, lanes, matters)
        cta, thread = wave.local_cta[lanes], wave.tid[lanes].view(np.int32)
        epoch = wave.epoch[cta] + 1
        if several_warps:
            thread = np.full_like(thread, SEVERAL)
        if self.copies and self.pending[at].any():
            wave.find("shared-race", f"a thread {does} what cp.async may still write", line)
        if write and wave.matrices.products and (matters & (self.reading[at] > 0)).any():
            wave.find("shared-race", "a write of what wgmma may still read", line)
        written = self.write_epoch[at]
        met = matters & (written == epoch)
        if met.any():
            writer = self.write_thread[at]
            met &= writer != thread
            if (met & (writer >> 5 != thread >> 5)).any():
                wave.find("shared-race", f"a warp {does} what another wrote, no barrier", line)
            elif (met & (self.write_sync[at] == wave.warp_syncs[cta, thread >> 5])).any():
                wave.find("warp-hazard", f"a thread {does} what another of its warp wrote", line)
        if not write:
            if not written.all():
                wave.find("shared-uninit", "a read of shared memory that nobody wrote", line)
            self.unseen.append((at, epoch, thread))
            return
        self._see()
        other_warp = (self.read_epoch[at] == epoch) & (self.read_thread[at] >> 5 != thread >> 5)
        if (matters & other_warp).any():
            wave.find("shared-race", "a warp writes what another read, no barrier", line)
        self.write_epoch[at], self.write_thread[at] = epoch, thread
        self.write_sync[at] = wave.warp_syncs[cta, thread >> 5]

    def _see(self) -> None:
        for at, epoch, thread in self.unseen:
            other_warp = (self.read_epoch[at] == epoch) & (self.read_thread[at] >> 5 != thread >> 5)
            self.read_epoch[at], self.read_thread[at] = epoch, np.where(other_warp, SEVERAL, thread)
            # Lanes of one instruction may have met here.
            lost = self.read_thread[at] >> 5 != thread >> 5
            self.read_thread[at[lost]] = SEVERAL
        self.unseen.clear()

    def copy(self, to, source, size: int, filled, guard, idx, line: int) -> None:
        """cp.async of ``size`` bytes; a lane with ``filled`` = 0 reads nothing and writes zeros."""
        chosen, lanes = self.wave.lanes_of(guard, idx)
        if not len(lanes):
            return
        filled = np.broadcast_to(size if filled is None else filled, len(to))[chosen]
        to, source = to[chosen], source[chosen]
        if ((filled != 0) & (filled != size)).any():
            raise Unsupported(f"cp.async that fills a part with zeros: {self.wave.where(line)}")
        words = np.zeros((len(to), size // 4), u4)
        read = np.flatnonzero(filled)
        if len(read):
            words[read] = self.wave.memory.read(source[read], u4, size // 4, lanes[read], line)
        offsets = self.offsets(to, size, lanes, line)
        # From here on the bytes may change.
        self.touch(offsets, size, lanes, np.ones(len(lanes), bool), line)
        self._pend(offsets, size, 1)
        self.copies.append((lanes, offsets, words, self.committed[lanes], line))

    def _pend(self, offsets, size: int, change: int) -> None:
        np.add.at(self.pending, spread(offsets, size, self.granule)[0], change)

    def commit(self, idx) -> None:
        self.committed[slice(None) if idx is None else idx] += 1

    def wait(self, allowed: int | None, idx, line: int) -> None:
        """All copies arrive, except in the last ``allowed`` groups; None also waits for copies without a group."""
        mine = slice(None) if idx is None else idx
        before = np.full(self.wave.n, -1, np.int32)
        before[mine] = 2**30 if allowed is None else self.committed[mine] - allowed
        left = []
        for lanes, offsets, words, group, at in self.copies:
            over = group < before[lanes]
            if over.any():
                size = words.nbytes // len(words)
                self._pend(offsets[over], size, -1)
                self.touch(offsets[over], size, lanes[over], np.ones(int(over.sum()), bool), at)
                self.views[u4].reshape(-1, size // 4)[offsets[over] // size] = words[over]
            if not over.all():
                left.append((lanes[~over], offsets[~over], words[~over], group[~over], at))
        self.copies = left
