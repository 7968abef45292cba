"""The arguments of all norm modules and functional forms: those of the stock norm, then keywords in one order."""

import inspect

import pytest
import torch
from torch.nn import functional as F

import fusedseg
from fusedseg.nn.stock_norm import StockNorm

NORMS = {
    name: found
    for name, found in vars(fusedseg).items()
    if isinstance(found, type) and issubclass(found, StockNorm) and name == found.__name__
}
# Its forerunner has these arguments at the sixth and seventh position.
POSITIONAL = {"InPlaceABN": ["activation", "activation_param"]}
KEYWORDS = ["activation", "activation_param", "num_slopes", "process_group", "bias", "device", "dtype"]
FUNCTION_KEYWORDS = ["activation", "activation_param", "norm", "num_groups", "residual", "slope"]
FIRST = {"num_groups": 2, "num_features": 4, "num_channels": 4}

by_norm = pytest.mark.parametrize("name", NORMS)


def parameters(function, kind):
    return {p.name: p.default for p in inspect.signature(function).parameters.values() if p.kind is kind}


def test_all_norms_are_walked():
    assert len(NORMS) == 8


@by_norm
def test_arguments_are_those_of_the_stock_norm_and_then_keywords(name):
    norm, own = NORMS[name], POSITIONAL.get(name, [])
    ours = parameters(norm, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    stock = parameters(next(iter(norm.KIND.modules)), inspect.Parameter.POSITIONAL_OR_KEYWORD)
    shared = list(ours.items())[: len(ours) - len(own)]
    assert list(ours)[len(shared) :] == own
    assert shared == list(stock.items())[: len(shared)]
    # Positions after these had other arguments in earlier versions, such as the activation in 0.2.0.
    assert list(stock)[len(shared) :] in ([], ["device", "dtype"])
    keywords = list(parameters(norm, inspect.Parameter.KEYWORD_ONLY))
    assert keywords == [keyword for keyword in KEYWORDS if keyword in keywords]
    assert {"activation", "activation_param", "bias", "device", "dtype"} <= {*ours, *keywords}


@pytest.mark.parametrize(
    ("name", "stock", "own"),
    [
        ("inplace_abn", F.batch_norm, POSITIONAL["InPlaceABN"]),
        ("inplace_instance_norm_act", F.instance_norm, []),
        ("inplace_group_norm_act", F.group_norm, []),
        ("norm_act", F.batch_norm, []),
    ],
)
def test_functions_take_the_arguments_of_the_stock_function_and_then_keywords(name, stock, own):
    ours = getattr(fusedseg.functional, name)
    _, *expected = parameters(stock, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    assert list(parameters(ours, inspect.Parameter.POSITIONAL_OR_KEYWORD)) == ["x", *expected, *own]
    keywords = [*own, *parameters(ours, inspect.Parameter.KEYWORD_ONLY)]
    assert keywords == [k for k in FUNCTION_KEYWORDS if k in keywords]


@by_norm
@pytest.mark.filterwarnings("ignore:fusedseg. torch.distributed is not initialised")
def test_a_norm_without_a_bias(name):
    norm = NORMS[name]
    required = [FIRST[p] for p in inspect.signature(norm).parameters if p in FIRST]
    if "bias" not in inspect.signature(torch.nn.BatchNorm2d).parameters:
        with pytest.raises(TypeError, match="bias"):
            norm(*required, affine=True, bias=False)
        return
    ours = norm(*required, affine=True, bias=False)
    stock = list(norm.KIND.modules)[:2][-1](*required, affine=True, bias=False)
    assert list(ours.state_dict()) == list(stock.state_dict())
    x = torch.randn(2, 4, 5, 3)
    assert torch.allclose(ours(x.clone()), F.leaky_relu(stock(x), 0.01), atol=1e-6)
    assert ours.to_norm().bias is None
