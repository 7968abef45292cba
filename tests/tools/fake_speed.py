"""Fake tensors, made faster without a change to any result.

For each op, PyTorch builds a key of the arguments' shapes, and looks up what the op returned for that key.  Most of the
time goes into the key: each size becomes two entries, and a check asks the same question of every tensor three times.
``fast_keys()`` changes only these parts: the key of a tensor with known sizes holds the same values in one tuple.
"""

import contextlib
import dataclasses
import operator
from collections.abc import Iterator
from unittest import mock

import torch
from torch._subclasses import fake_tensor


def plain(value: object) -> bool:
    """Whether a part of a tensor's description is known: no size is a symbol."""
    if isinstance(value, tuple):
        return all(type(size) is int for size in value)
    return not isinstance(value, torch.SymInt)


@contextlib.contextmanager
def fast_keys() -> Iterator[None]:
    """Inside, ops on fake tensors take less time; nothing changes in a PyTorch whose private names differ."""
    of = getattr(fake_tensor, "TensorMetadata", None)
    if of is None or not hasattr(of, "_flatten_into") or not hasattr(fake_tensor, "is_sparse_any"):
        yield
        return
    values = operator.attrgetter(*(field.name for field in dataclasses.fields(of)))
    flatten, sparse = of._flatten_into, fake_tensor.is_sparse_any

    def flatten_quickly(self, result, mode, state):
        found = values(self)
        if all(map(plain, found)):
            result.append(found)
        else:
            flatten(self, result, mode, state)

    def sparse_quickly(t):
        return getattr(t, "layout", torch.strided) is not torch.strided and sparse(t)

    with (
        mock.patch.object(of, "_flatten_into", flatten_quickly),
        mock.patch.object(fake_tensor, "is_sparse_any", sparse_quickly),
    ):
        yield
