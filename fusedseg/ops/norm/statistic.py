"""Which values of a tensor share a mean and a variance.

Here (N, C, S) is a tensor whose positions are one dimension.  Values of channels are (N, C, 1), and a flat vector has
one value for each statistic: (C,), (N C,) or (N groups,).
"""

import functools
from typing import NamedTuple

from torch import Tensor

from ..layout import Layout

# Numbers of samples that change in every call must not fill the memory.
_by_sample = functools.lru_cache(1024)(Layout.by_sample)


class Statistic(NamedTuple):
    """The values of a channel ("batch"), of a channel of one sample ("instance"), or of one of ``groups`` equal groups
    of a sample's channels ("group").

    ``of_samples`` says whether each sample has statistics of its own; ``groups`` is None unless channels share one.
    """

    of_samples: bool = False
    groups: int | None = None

    @property
    def is_grouped(self) -> bool:
        """Whether channels of a sample share a statistic."""
        return self.groups is not None

    def groups_of(self, C: int) -> int:
        """The number of statistics of C channels: of all samples, or of each one."""
        return C if self.groups is None else self.groups

    def removes_constants(self, C: int) -> bool:
        """Whether a mean belongs to one of C channels alone, so that a constant which is added to a channel is lost."""
        return self.groups_of(C) == C

    def count(self, x: Tensor) -> int:
        """The number of means of ``x``."""
        groups = self.groups_of(x.shape[1])
        return x.shape[0] * groups if self.of_samples else groups

    def by_sample(self, layout: Layout, x: Tensor) -> Layout:
        """How the values of a statistic of samples lie in memory; ``layout`` is that of x."""
        return _by_sample(layout, x.shape[0], self.groups_of(x.shape[1]))

    def view(self, x: Tensor) -> Tensor:
        """A dense tensor as (N, C, S).  For statistics of the batch, channels_last is one sample."""
        N, C = x.shape[:2]
        S = x.numel() // (N * C)
        if x.is_contiguous() and (S > 1 or self.of_samples):
            return x.view(N, C, S)
        if self.of_samples:
            return x.as_strided((N, C, S), (C * S, 1, C))
        return x.as_strided((1, C, N * S), (x.numel(), 1, C))

    def shared_by(self, x: Tensor) -> int:
        """How many values of (N, C, S) share a statistic."""
        N, C, S = x.shape
        return C // self.groups_of(C) * S if self.of_samples else N * S

    def summed(self, sums: Tensor) -> Tensor:
        """For each channel, the sum of its statistic, from the sums of all channels."""
        if not self.of_samples:
            return sums.sum(0, keepdim=True).expand_as(sums)
        N, C, _ = sums.shape
        groups = self.groups_of(C)
        return sums.view(N, groups, -1).sum(2, keepdim=True).expand(N, groups, C // groups).reshape(N, C, 1)

    def each_channel(self, v: Tensor, x: Tensor) -> Tensor:
        """The value of its statistic for each channel of (N, C, S), from a flat vector."""
        N, C, _ = x.shape
        samples, groups = (N if self.of_samples else 1), self.groups_of(C)
        return v.view(samples, groups, 1).expand(samples, groups, C // groups).reshape(samples, C, 1).expand(N, C, 1)

    def flat(self, v: Tensor) -> Tensor:
        """One value for each statistic, from the values of channels."""
        v = v if self.of_samples else v[:1]
        return v.reshape(len(v), self.groups_of(v.shape[1]), -1)[..., 0].flatten()


BATCH, INSTANCE = Statistic(), Statistic(of_samples=True)
# The fields in the schema of an op.
SCHEMA = "bool of_samples, SymInt? groups"
