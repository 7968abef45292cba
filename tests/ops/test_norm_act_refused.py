"""Calls that norm_act refuses, and the texts of the errors."""

import pytest
import torch
from torch.nn import functional as F

from fusedseg.functional import norm_act


def call(x=None, training=True, running=(None, None), **overrides):
    return norm_act(torch.randn(2, 64, 3, 3) if x is None else x, *running, training=training, **overrides)


REFUSED = {
    "unknown norm": (lambda: call(norm="layer"), "norm must be one of batch, instance, group, got 'layer'"),
    "group without groups": (lambda: call(norm="group"), "num_groups must be given for norm 'group' and for no other"),
    "batch with groups": (lambda: call(num_groups=2), "num_groups must be given for norm 'group' and for no other"),
    "group with running statistics": (
        lambda: call(running=(torch.ones(64), torch.ones(64)), norm="group", num_groups=2),
        "norm 'group' has no running statistics",
    ),
    "instance without positions": (lambda: call(torch.randn(2, 64), norm="instance"),
        r"expected more than 1 spatial element when training, got input size \(2, 64\)"),
    "instance in eval without statistics": (lambda: call(norm="instance", training=False),
        "running_mean and running_var are needed when training is False"),
    "prelu without a slope": (lambda: call(activation="prelu"),
        "slope must be given for activation 'prelu' and for no other, got activation 'prelu'"),
    "a slope for relu": (lambda: call(activation="relu", slope=torch.ones(1)),
        "and for no other, got activation 'relu'"),
    "too many slopes": (lambda: call(activation="prelu", slope=torch.ones(2)),
        r"slope must have shape \(64,\), one value per channel of x, got \(2,\)"),
    "unknown activation": (lambda: call(activation="swish"),
        "activation must be one of leaky_relu, elu, .*got 'swish'"),
    "parameter of relu": (lambda: call(activation="relu", activation_param=0.1),
        "activation 'relu' has no parameter; leave activation_param out, got 0.1"),
    "unknown approximation": (lambda: call(activation="gelu", activation_param="erf"),
        "activation_param of gelu must be 'none' or 'tanh', its approximation, got 'erf'"),
}  # fmt: skip


TYPES = {
    "a slope that is no tensor": (lambda: call(activation="prelu", slope=0.25), "slope must be a tensor, got float"),
    "a function": (lambda: call(activation=F.relu), "activation must be a string"),
    "alpha True": (lambda: call(activation="elu", activation_param=True),
                   "must be a finite number, the alpha of elu, got True"),
    "alpha NaN": (lambda: call(activation="elu", activation_param=float("nan")), "must be a finite number"),
}  # fmt: skip
CASES = {name: (ValueError, *row) for name, row in REFUSED.items()}
CASES |= {name: (TypeError, *row) for name, row in TYPES.items()}


@pytest.mark.parametrize(("error", "attempt", "text"), CASES.values(), ids=CASES)
def test_refused(error, attempt, text):
    with pytest.raises(error, match=f"fusedseg.norm_act: .*{text}"):
        attempt()
