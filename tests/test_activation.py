"""Each row of the table of activations beside the stock function and module, conversion, and export.

``tests/ops/test_norms.py`` has their values, gradients and inverses on both backends.
"""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import fusedseg
from fusedseg.activation import EXACT_ONLY, INVERTIBLE, NAMES, OF_MODULE, TABLE, Activation, parse_invertible
from fusedseg.memory.meter import measure
from tests.conversion.compare import assert_same
from tests.reference import PARAMS, UNFUSED, stock_activation

# The kink, both sides of it, and values at which exponentials saturate.
POINTS = (-8.0, -3.5, -1.0, -0.25, 0.25, 1.0, 3.5, 5.5, 8.0)
CONVERTED = [row for row in OF_MODULE.values() if not row.learned]


def arguments(row):
    """The arguments ``activation`` and ``activation_param`` for a row."""
    return row.selected_by or (row.name, PARAMS.get(row.name))


def given_to_module(row):
    """The keyword arguments of the stock module for a row."""
    return {row.parameter.attribute: arguments(row)[1] or row.parameter.default} if row.parameter else {}


def slope_of(row):
    return torch.tensor([0.25], dtype=torch.float64) if row.learned else None


def stock(row, y, slope=None):
    return stock_activation(row.name, PARAMS.get(row.name, 0.0) if slope is None else slope)(y)


def names(rows):
    return pytest.mark.parametrize("row", rows, ids=lambda row: row.name)


def test_every_name_is_of_one_kind():
    assert set(NAMES) == set(INVERTIBLE) | set(EXACT_ONLY)
    assert {"leaky_relu", "elu", "identity"} <= set(INVERTIBLE)
    assert "relu" in EXACT_ONLY
    assert set(OF_MODULE).isdisjoint(UNFUSED.values())
    assert set(TABLE).isdisjoint(UNFUSED)


@pytest.mark.parametrize("listed", [NAMES, INVERTIBLE], ids=["exact", "in place"])
def test_the_documentation_lists_them_all(listed):
    text = (Path(__file__).parents[1] / "docs" / "networks.md").read_text().replace("\n", " ")
    assert f"one of {', '.join(listed[:-1])} and {listed[-1]}." in text


@names(TABLE.values())
def test_a_row_is_consistent(row):
    """The properties of a row agree with each other and with the stock module."""
    y = torch.tensor(POINTS, dtype=torch.float64).requires_grad_()
    param = slope_of(row) if row.learned else PARAMS.get(row.name, 0.0)
    expected = stock(row, y, slope_of(row))
    assert torch.equal(row.function(y, param), expected)
    if row.module is not None:
        module = row.module(**given_to_module(row)).double()
        assert torch.equal(module(y), expected)
        assert all(getattr(module, attribute) == value for attribute, value in row.fixed)


@pytest.mark.parametrize("name", [name for name in INVERTIBLE if TABLE[name].parameter is None])
def test_a_parameter_that_an_invertible_activation_does_not_have(name):
    """Two values are ignored: 0.01, the default of the signatures (leaky_relu's slope), and 0, the value in modules."""
    for param in (0.01, 0.0):
        assert parse_invertible("test", name, param) == Activation(name, 0.0)
    if name != "identity":
        with pytest.raises(ValueError, match=f"activation '{name}' has no parameter; .* got 0.3"):
            parse_invertible("test", name, 0.3)


def modules(row):
    """The stock module, and the one that writes over its input, if there is one."""
    given = given_to_module(row)
    yield row.module(**given), False
    if hasattr(row.module(**given), "inplace"):
        yield row.module(**given, inplace=True), True


@names(OF_MODULE.values())
def test_what_autograd_keeps(row):
    for act, in_place in modules(row):
        kept = []
        with saved_tensors_hooks(lambda t, kept=kept: kept.append(t.data_ptr()), lambda nothing: nothing):
            z = act(torch.randn(8, requires_grad=True) * 1.0)
        always = row.keeps_result == "always"
        assert (z.data_ptr() in kept) == (always or (in_place and row.keeps_result == "in place"))


@names(CONVERTED)
def test_conversion(row):
    """``convert`` serves a stock activation after a norm if that saves bytes, and the values stay the same."""
    for act, in_place in modules(row):
        check_conversion(act, served=not (row.name == "relu" or (in_place and row.name == "celu")))


def check_conversion(act, served):
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), act, nn.Conv2d(4, 2, 1)).double()
    plain = copy.deepcopy(model)
    found = fusedseg.conversion(fusedseg.convert(model)).served
    assert [row.cls for row in found] == [f"BatchNorm2d and {type(act).__name__}"] * served
    owned = [*model.parameters(), *plain.parameters()]
    kept = [measure(net, x, owned=owned).saved for net in (model, plain)]
    assert (kept[0] < kept[1]) == served
    for training in (True, False):
        assert_same(model, plain, x, training=training)


@names([row for row in CONVERTED if row.fixed])
def test_conversion_refuses_what_the_table_fixes(row):
    for attribute, value in row.fixed:
        act = row.module()
        setattr(act, attribute, value + 1)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), act, nn.Conv2d(4, 2, 1))
        (left,) = fusedseg.conversion(fusedseg.convert(model)).left
        assert left.why == f"no op has {row.module.__name__} with these attributes"
        setattr(act, attribute, value)
        fusedseg.convert(model)
        assert fusedseg.conversion(model).served
        # The attribute is read in each call.
        setattr(act, attribute, value + 1)
        plain = fusedseg.revert(copy.deepcopy(model))
        x = torch.randn(2, 3, 6, 6)
        assert torch.equal(model(x), plain(x))


@pytest.mark.parametrize("module", UNFUSED.values(), ids=lambda cls: cls.__name__)
def test_conversion_leaves_activations_outside_the_table(module):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), module(), nn.Conv2d(4, 2, 1))
    found = fusedseg.conversion(fusedseg.convert(model))
    assert not found.served
    assert found.left[0].why == "no activation that an op has follows it in its block"


class Each(nn.Module):
    """Applies several modules to the same tensor."""

    def __init__(self, modules):
        super().__init__()
        self.modules_of = nn.ModuleList(modules)

    def forward(self, x):
        return [module(x.clone()) for module in self.modules_of]


@pytest.mark.parametrize("strict", [False, True], ids=["export", "strict export"])
def test_export(strict):
    """The exported program contains only stock ops, and computes the same values, for each activation."""
    made = {}
    for row in TABLE.values():
        name, param = arguments(row)
        made[f"exact {name}"] = fusedseg.BatchNormAct(4, activation=name, activation_param=param)
        if row.inverse is not None:
            slope = 0.0 if param is None else param
            made[f"in place {name}"] = fusedseg.InPlaceABN(4, activation=name, activation_param=slope)
    net, x = Each(made.values()).eval(), torch.randn(2, 4, 5, 5)
    with torch.no_grad():
        program, expected = torch.export.export(net, (x,), strict=strict), net(x)
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert all(target.startswith("aten.") for target in called), called
    for name, got, wanted in zip(made, program.module()(x), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
