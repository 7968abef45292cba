"""Functional forms of the ops."""

from torch import Tensor

from .activation import parse_invertible
from .ops import inplace_abn as _inplace_abn
from .ops.kept import find

__all__ = ["inplace_abn"]


def inplace_abn(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    activation: str = "leaky_relu",
    activation_param: float = 0.01,
) -> Tensor:
    """Batch normalisation and an invertible activation, written over ``x``.

    Equals, with the arguments of ``torch.nn.functional.batch_norm`` in their order::

        leaky_relu(batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps), activation_param)

    Args:
        x: (N, C) or (N, C, *spatial), fp16, bf16, fp32 or fp64, on any device.  Overwritten; use what is returned.
        running_mean, running_var, weight, bias: (C,) or None, in the dtype of ``x``, or fp32 beside half precision.
        training: statistics of the batch, which move the running ones by ``momentum``; else the running ones.
        eps: added to the variance.
        activation: "leaky_relu" (``activation_param``: the negative slope, > 0), "elu" (alpha, > 0) or "identity".

    Returns:
        z, of the shape, dtype and strides of ``x`` and in its memory.  Where ``x`` is neither contiguous nor
        channels_last it is copied first and left alone, and z is contiguous.

    Kept for backward: z, 1 / sqrt(var + eps), weight, bias; and for the channels with |bias| > k |weight| (k = 8 in
    half precision, 64 in fp32, 4096 in fp64) or a weight too small for the dtype, their normalised input.  The
    module keeps track of these channels without waiting for a GPU; this function looks at the parameters, and waits,
    in every call.

    ELU loses accuracy in its tail: y is rebuilt as log(1 + z / alpha), which multiplies the rounding of z by
    exp(-y).  The gradient passes through xhat only, where the tail's weight in it is small.

    Under ``torch.compile``, ``x`` is left alone, and looking at the parameters breaks the graph: compile the module,
    which does not, where ``fullgraph=True`` is wanted.

    Raises:
        ValueError: an activation that cannot be inverted (relu, or a slope <= 0), naming the module that is exact
            for it; a wrong shape; one value per channel in training; ``x`` a leaf that requires grad, overlapping
            itself, or one of several views of one call.
        TypeError: an integer or complex ``x``, parameters of another dtype.
        RuntimeError: in backward, when it is differentiated itself.

    Source: Rota Bulo et al., "In-Place Activated BatchNorm for Memory-Optimized Training of DNNs", CVPR 2018.
    """
    act = parse_invertible(_inplace_abn.OP, activation, activation_param)
    _inplace_abn.check(x, weight, bias, running_mean, running_var, training)
    kept = find(weight, bias, act, x.dtype)
    return _inplace_abn.inplace_abn(x, weight, bias, running_mean, running_var, training, momentum, eps, act, kept)
