"""The results of ops whose memory differs between tensors with values and tensors without values.

oneDNN, which computes ``nn.LSTM`` on a CPU, keeps gates and states in a tensor of bytes, ten times the output.  Without
values this tensor is empty.

Backward of a batch norm allocates no gradient of the input if nobody asks for it.  Without values it returns one.
"""

import functools

import torch
from torch import Tensor

from .._torch import FakeTensor, unset_fake_temporarily

RNN = torch.ops.aten.mkldnn_rnn_layer.default
BATCH_NORM_BACKWARD = torch.ops.aten.native_batch_norm_backward.default
# The workspace grows by equal parts with the steps of the sequence and with the batch, but for a few pages of rounding.
# So that of a large input follows from inputs of at most this batch and these numbers of steps, which have values.
FEW, MANY = 8, 136
BATCH = 16


def as_with_values(func: object, args: tuple, out: tuple) -> tuple:
    """The results of ``func``; if they have no values, with the memory that they would have with values."""
    if func is BATCH_NORM_BACKWARD and isinstance(out[0], FakeTensor):
        *_, output_mask = args
        return (out[0] if output_mask[0] else None), *out[1:]
    if func is RNN and isinstance(out[0], FakeTensor) and out[0].numel():
        return _with_workspace(args, out)
    return out


def _with_workspace(args: tuple, out: tuple) -> tuple:
    T, N, *_ = args[0].shape
    given = tuple(None if t is None else (tuple(t.shape), t.dtype) for t in args[:7])
    options = tuple(tuple(a) if isinstance(a, list) else a for a in args[7:])
    batch = min(N, BATCH)
    nbytes = _workspace(given, options, min(T, MANY), batch)
    if T > MANY:
        nbytes += (nbytes - _workspace(given, options, FEW, batch)) * (T - MANY) // (MANY - FEW)
    return *out[:3], out[3].new_empty(nbytes * N // batch)


@functools.lru_cache(maxsize=64)
def _workspace(given: tuple, options: tuple, steps: int, batch: int) -> int:
    """The bytes of the workspace of a layer with inputs of these shapes, but for the steps and the batch."""

    def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    with unset_fake_temporarily():
        x, *weights = (zeros(*spec) for spec in (((steps, batch, given[0][0][2]), given[0][1]), *given[1:5]))
        states = [None if spec is None else zeros((*spec[0][:-2], batch, spec[0][-1]), spec[1]) for spec in given[5:]]
        return RNN(x, *weights, *states, *options)[3].nbytes
