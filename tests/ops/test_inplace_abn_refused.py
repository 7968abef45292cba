"""Calls that the op refuses, and the texts of the errors."""

import pytest
import torch

import fusedseg
from fusedseg.activation import INVERTIBLE
from fusedseg.functional import inplace_abn


def call(x=None, training=True, **overrides):
    arguments = {"running_mean": None, "running_var": None, "weight": None, "bias": None} | overrides
    return inplace_abn(torch.randn(2, 64, 3, 3) if x is None else x, training=training, **arguments)


REFUSED = {
    "wrong channel count": (lambda: call(weight=torch.ones(32)), ValueError,
        r"weight must have shape \(64,\), one value per channel of x, got \(32,\)"),
    "wrong parameter shape": (lambda: call(bias=torch.ones(64, 1)), ValueError,
        r"bias must have shape \(64,\), one value per channel of x, got \(64, 1\)"),
    "wrong parameter dtype": (lambda: call(weight=torch.ones(64, dtype=torch.float16)), TypeError,
        r"weight must be torch.float32 for x of torch.float32, got torch.float16"),
    "wrong parameter device": (
        lambda: call(running_mean=torch.ones(64, device="meta"), running_var=torch.ones(64, device="meta")),
        ValueError,
        r"running_mean must be on cpu, the device of x, got meta",
    ),
    "one of the running statistics": (lambda: call(running_mean=torch.ones(64)), ValueError,
        r"running_mean and running_var must be given together, got one of them"),
    "eval without statistics": (lambda: call(training=False), ValueError,
        r"running_mean and running_var are needed when training is False, got None"),
    "one value per channel": (lambda: call(torch.randn(1, 64, 1, 1)), ValueError,
        r"expected more than 1 value per channel when training, got input size \(1, 64, 1, 1\)"),
    "leaf that requires grad": (lambda: call(torch.randn(2, 64, requires_grad=True)), ValueError,
        r"x is a leaf that requires grad and would be overwritten"),
    "overlapping view": (lambda: call(torch.randn(2, 64, 1).expand(2, 64, 3)), ValueError,
        r"x must not overlap itself, since it is overwritten, got shape \(2, 64, 3\)"),
    "multi-output view": (lambda: call((torch.randn(4, 64, requires_grad=True) * 1).chunk(2)[0]), ValueError,
        r"x is one of several views made by one call"),
    "integer input": (lambda: call(torch.ones(2, 64, dtype=torch.int64)), TypeError,
        r"x must be float16, bfloat16, float32 or float64, got torch.int64"),
    "complex input": (lambda: call(torch.ones(2, 64, dtype=torch.complex64)), TypeError,
        r"x must be float16, bfloat16, float32 or float64, got torch.complex64"),
    # It was said to overlap itself.
    "sparse input": (lambda: call(torch.ones(2, 64).to_sparse()), TypeError,
        r"x must be dense, with layout torch.strided, got torch.sparse_coo; pass x.to_dense\(\)"),
    "a vector": (lambda: call(torch.ones(64)), ValueError,
        r"x must have shape \(N, C\) or \(N, C, \*spatial\), got \(64,\)"),
    "relu": (lambda: call(activation="relu"), ValueError,
        r"activation 'relu' cannot be inverted; use fusedseg.BatchNormAct, which is exact for it"),
    "slope 0": (lambda: call(activation_param=0.0), ValueError,
        r"leaky_relu with slope 0.0 cannot be inverted \(the slope must be > 0\); use fusedseg.BatchNormAct"),
    "unknown activation": (lambda: call(activation="leaky_relu_0.01"), ValueError,
        f"activation must be one of {', '.join(INVERTIBLE)}, got 'leaky_relu_0.01'"),
    "slope True": (lambda: call(activation_param=True), TypeError,
        r"activation_param must be a finite number, the slope of leaky_relu, got True"),
}  # fmt: skip


@pytest.mark.parametrize(("attempt", "error", "text"), REFUSED.values(), ids=REFUSED)
def test_refused(attempt, error, text):
    with pytest.raises(error, match=f"fusedseg.inplace_abn: .*{text}"):
        attempt()


def test_refusal_leaves_everything_as_it_was(backend, device):
    module = fusedseg.InPlaceABN(3, device=device)
    x = torch.randn(1, 3, 1, 1, device=device)
    before = x.clone()
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        module(x)
    assert torch.equal(x, before)
    assert module.num_batches_tracked == 0
