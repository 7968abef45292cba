"""How a packed tensor lies in memory, and the numbers of the grid.

A group is 256 adjacent positions of one channel of one sample, or fewer at the end of a channel.  What reads the tensor
asks for groups inside of a unit, whose values a norm scales alike:

    ""         nothing is asked for: where channels are short, a group has values of several ones
    "batch"    the values of a channel, of all samples
    "plane"    the values of a channel of a sample; of N x C values a row, as of contiguous N x T x C values

``grid.py`` has the values that the codes of a group stand for.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..layout import layout_of

# Functions whose second derivative is not 0 turn rounding errors into a bias, so they read at least this many bits.
SMOOTH_BITS = 8
FEWEST_VALUES = 4096  # smaller tensors are kept as they are
GROUP = 256
# A channel of a sample with fewer positions is no group of its own unless a reader asks for it: the two numbers of each
# group would take as much memory as the codes.
FEWEST = 64
# Tokens, (N, T, C) or (N, C), differ in size as samples do, so their rows are groups from this length on.
FEWEST_OF_TOKENS = 16

# Two codes stand beside the border of signs, one on each side.  They are this fraction of a step away from it.
NEAR = 2.0**-10
# A side of the border is never shorter than this fraction of the longer side, nor than LEAST: reciprocals of steps and
# their ratios stay finite.
FLAT, LEAST = 2.0**-60, 2.0**-100
# Steps are this much shorter than an exact division would make them, so that rounding never leads beyond the range.
SHORTER = 1.0 - 2.0**-21
# A rebuilt value differs from the kink by at least this fraction of it, so that the rounding of a consumer's
# arithmetic does not change its side.
MARGIN = 2.0**-20

# The place of a value between two codes has this many binary digits.  A random number with as many digits rounds it to
# one of the codes.  Together with the 8 bits of a code, the digits fit into an int16.  NEAR is less than half of the
# last digit, so signs stay exact.
FRACTION_BITS = 7
# The random number is the highest bits of the int16 f h + s: h is a hash of the position in the group, and f (odd) and
# s are hashes of the number of the group.  So all numbers are equally likely, and those of two values are independent.
# Source: multiply-shift hashing of Dietzfelbinger, "Universal hashing and k-wise independent random variables via
# integer arithmetic without primes", STACS 1996.
GOLDEN, MULTIPLIER = 0x9E3779B1, 0x846CA68B
MASK = 0xFFFFFFFF


class ChannelLines(NamedTuple):
    """A dense tensor as I samples of S positions of C adjacent channels.  Planes are samples with one channel."""

    I: int
    S: int
    C: int

    @property
    def groups(self) -> int:
        """The groups of a channel of a sample."""
        return -(-self.S // GROUP)

    def row_bytes(self, bits: int) -> int:
        """The bytes of the codes of adjacent values that begin at a byte: all positions, or all channels."""
        return -(-(self.S if self.C == 1 else self.C) * bits // 8)

    def code_bytes(self, bits: int) -> int:
        return self.I * (1 if self.C == 1 else self.S) * self.row_bytes(bits)


def lines_of(t: Tensor, unit: str) -> ChannelLines:
    """How the groups of a dense tensor lie in memory, or with "batch" in that of a copy in channels_last."""
    layout = layout_of(t) if t.dim() >= 2 else None
    if layout is not None and t.dim() == 2 and unit != "batch":
        lines = ChannelLines(layout.N, layout.C, 1)
    elif layout is not None and layout.rows:
        samples = t.shape[0] if unit == "plane" else 1
        lines = ChannelLines(samples, layout.N // max(samples, 1), layout.C)
    elif layout is not None:
        lines = ChannelLines(layout.N * layout.C, layout.S, 1)
        if unit == "batch" and lines.S < FEWEST:
            return ChannelLines(1, layout.N * layout.S, layout.C)
    if layout is not None and (unit or (FEWEST_OF_TOKENS if t.dim() <= 3 else FEWEST) <= lines.S):
        return lines
    return ChannelLines(1, t.numel(), 1)


def mixed(*numbers: int) -> int:
    """A number below 2**32 that depends on all given integers, such as a seed, a step and a place.

    Source: the finalizer of splitmix64 (Steele, Lea and Flood, OOPSLA 2014), applied to one number after another.
    """
    state = 0
    for number in numbers:
        state = (state + (number & (1 << 64) - 1) + 0x9E3779B97F4A7C15) & (1 << 64) - 1
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
        state = (state ^ state >> 27) * 0x94D049BB133111EB & (1 << 64) - 1
        state ^= state >> 31
    return state & MASK


def rank() -> int:
    """The rank of this process, so that processes round independently."""
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def signed(number: int) -> int:
    """The int32 with the bits of a number, which is taken modulo 2**32."""
    number &= MASK
    return number - (1 << 32) if number >> 31 else number
