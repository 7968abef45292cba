"""Instructions of a warp that move or multiply matrices, and those of four warps (wgmma, sm_90).

Products are summed in float64 and rounded once.  A tensor core cuts off more, in an order that is not documented.
"""

import numpy as np

from .memory import spread
from .parse import Unsupported
from .shared import SEVERAL
from .values import to_float

u2, u4, u8, f4, f8 = np.uint16, np.uint32, np.uint64, np.float32, np.float64
# tf32 keeps the upper 19 bits of an fp32, and cuts the rest off.
TF32 = u4(0xFFFFE000)


def widened(kind: str, words):
    """The values of words of 32 bits, in float64: two along a new last axis if they are of half precision."""
    if kind == "tf32":
        return (words & TF32).view(f4).astype(f8)[..., None]
    return to_float(kind, np.ascontiguousarray(words)[..., None].view(u2)).astype(f8)


def turned(matrices):
    """8 x 8 matrices of 16 bits, (..., 8 rows, 4 words), transposed."""
    halves = np.ascontiguousarray(matrices).view(u2)
    return np.ascontiguousarray(halves.swapaxes(-1, -2)).view(u4)


class Matrices:
    """The matrix instructions of one wave, and the products that nobody has waited for."""

    def __init__(self, wave) -> None:
        self.wave = wave
        self.committed = np.zeros(wave.n, np.int32)
        # For each running product: its lanes, the granules of shared memory that it reads for them, and its group.
        self.products: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        # For each register that a product may still write: the group of the product in each lane, or -1.
        self.flying: dict[str, np.ndarray] = {}

    def _lanes(self, idx, line: int):
        self.wave.whole_warps(idx, line)
        return np.arange(self.wave.n) if idx is None else idx

    def load(self, addresses, count: int, transposed: bool, idx, line: int):
        """ldmatrix: lane 8 k + r has the address of row r of matrix k."""
        lanes = self._lanes(idx, line).reshape(-1, 32)[:, : 8 * count].ravel()
        rows = addresses.reshape(-1, 32)[:, : 8 * count].ravel()
        words = self.wave.shared.read(rows, u4, 4, lanes, line).reshape(-1, count, 8, 4)
        words = turned(words) if transposed else words
        return tuple(words[:, k].reshape(-1) for k in range(count))

    def store(self, addresses, values, transposed: bool, idx, line: int) -> None:
        """stmatrix: the reverse of ``load``."""
        count = len(values)
        lanes = self._lanes(idx, line).reshape(-1, 32)[:, : 8 * count].ravel()
        rows = addresses.reshape(-1, 32)[:, : 8 * count].ravel()
        words = np.stack([v.reshape(-1, 8, 4) for v in values], axis=1)
        words = turned(words) if transposed else words
        self.wave.shared.write(rows, words.reshape(-1, 4), lanes, line)

    def product(self, kind: str, a, b, c, idx, line: int):
        """mma.sync m16n8k16 (tf32: m16n8k8): D = A B + C.  Lane 4 g + t holds pairs (tf32: values) of row g."""
        self._lanes(idx, line)
        A, B = (widened(kind, np.stack(words).reshape(-1, len(a[0]) // 32, 8, 4)) for words in (a, b))
        # a is (half of k, half of the rows), and b (half of k)
        A = A.reshape(2, 2, *A.shape[1:]).transpose(2, 1, 3, 0, 4, 5).reshape(A.shape[1], 16, -1)
        B = B.transpose(1, 2, 0, 3, 4).reshape(B.shape[1], 8, -1)
        C = np.stack(c).reshape(2, 2, -1, 8, 4).transpose(2, 0, 3, 4, 1).reshape(-1, 16, 8)
        D = (np.matmul(A, B.swapaxes(1, 2)) + C).astype(f4)
        return tuple(D.reshape(-1, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(4, -1))

    def group_product(self, kind: str, old, a, b, accumulate, transposed, idx, line: int):
        """wgmma: D = A B + D for operands in shared memory, which ``a`` and ``b`` describe; A has 64 rows.

        ``transposed`` says of A and B that their rows, and not the reduced axis, are adjacent in memory.
        """
        lanes = self._lanes(idx, line)
        groups = lanes.reshape(-1, 128) if len(lanes) % 128 == 0 else np.zeros((1, 128), int)
        if self.wave.threads % 128 or (groups[:, 0] % 128).any() or (np.diff(groups) != 1).any():
            raise RuntimeError(f"a part of a group of four warps: {self.wave.where(line)}")
        if any((v.reshape(-1, 128) != v.reshape(-1, 128)[:, :1]).any() for v in (a, b, accumulate)):
            raise RuntimeError(f"operands differ within a group of four warps: {self.wave.where(line)}")
        N, W = 2 * len(old), len(groups)
        A = self._operand(kind, a[::128], 64, transposed[0], groups[:, 0], line)
        B = self._operand(kind, b[::128], N, transposed[1], groups[:, 0], line)
        # registers: (8 columns, half of 16 rows, one of a pair); lanes: (warp, row of 8, pair)
        C = np.stack(old).reshape(N // 8, 2, 2, W, 4, 8, 4).transpose(3, 4, 1, 5, 0, 6, 2).reshape(W, 64, N)
        D = (np.matmul(A, B.swapaxes(1, 2)) + np.where(accumulate[::128][:, None, None], C, f4(0))).astype(f4)
        return D.reshape(W, 4, 2, 8, N // 8, 4, 2).transpose(4, 2, 6, 0, 1, 3, 5).reshape(N // 2, -1)

    def _operand(self, kind: str, descriptors, rows: int, transposed: bool, owners, line: int):
        """Reads an operand as (groups, rows, 32 bytes of the reduced axis) in float64."""
        d = descriptors.astype(np.int64)
        start, lead, stride = ((d >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
        modes = np.unique(descriptors >> u8(62))
        if len(modes) != 1 or modes[0] == 0 or ((d >> 49) & 7).any():
            raise Unsupported(f"an operand of wgmma that is not swizzled: {self.wave.where(line)}")
        # Bytes of a row, and the bits of the address that the swizzle exchanges.
        width, bits = {1: (128, 7), 2: (64, 3), 3: (32, 1)}[int(modes[0])]
        start, lead, stride = (v[:, None, None] for v in (start, lead, stride))
        if transposed:
            k, chunk = np.arange(16)[:, None], np.arange(rows // 8) * 16
            at = start + (k // 8) * stride + (k % 8) * width + (chunk // width) * lead + chunk % width
        else:
            r = np.arange(rows)[:, None]
            at = start + (r // 8) * stride + (r % 8) * width + np.array([0, 16])
        at ^= (at >> 7 & bits) << 4
        words = self._read(at.ravel(), np.repeat(owners, at[0].size), line)
        if transposed:
            return widened(kind, words).reshape(len(d), 16, rows).swapaxes(1, 2)
        return widened(kind, words.reshape(len(d), rows, 8)).reshape(len(d), rows, -1)

    def _read(self, addresses, owners, line: int):
        """Reads 16 bytes at each address as four words, and marks them as in use until a wait for the product."""
        shared = self.wave.shared
        words = shared.read(addresses, u4, 4, owners, line, several_warps=True)
        offsets = shared.offsets(addresses, 16, owners, line)
        at, lanes = spread(offsets, 16, shared.granule, owners)
        np.add.at(shared.reading, at, 1)
        self.products.append((lanes, at, self.committed[lanes]))
        return words

    def commit(self, idx) -> None:
        self.committed[slice(None) if idx is None else idx] += 1

    def wait(self, allowed: int, idx, line: int) -> None:
        """Ends all products except those of the last ``allowed`` groups."""
        mine, shared, left = slice(None) if idx is None else idx, self.wave.shared, []
        before = np.full(self.wave.n, -1, np.int32)
        before[mine] = self.committed[mine] - allowed
        for lanes, at, group in self.products:
            over = group < before[lanes]
            np.add.at(shared.reading, at[over], -1)
            # All warps of the group may have read until now.
            shared.read_epoch[at[over]] = self.wave.epoch[self.wave.local_cta[lanes[over]]] + 1
            shared.read_thread[at[over]] = SEVERAL
            left.append((lanes[~over], at[~over], group[~over]))
        self.products = [product for product in left if len(product[0])]
        # This works lane by lane, because other CTAs may be at another instruction.
        flying = {name: np.where(group < before, -1, group) for name, group in self.flying.items()}
        self.flying = {name: group for name, group in flying.items() if (group >= 0).any()}

    def fly(self, names, idx) -> None:
        """A product may write these registers from now on."""
        mine = slice(None) if idx is None else idx
        for name in names:
            group = self.flying.get(name, np.full(self.wave.n, -1, np.int32)).copy()
            group[mine] = self.committed[mine]
            self.flying[name] = group

    def landed(self, names, idx, line: int) -> None:
        """An instruction reads these registers."""
        mine = slice(None) if idx is None else idx
        for name in names:
            if name in self.flying and (self.flying[name][mine] >= 0).any():
                self.wave.find("shared-race", f"%{name} is read while wgmma may still write it", line)
