"""The scope around the calls of a converted model, whose root is of a subclass that must pass for its stock class."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrize

import fusedseg
from fusedseg.conversion.scope import Scoped
from fusedseg.ops.observer import innermost
from tests.conversion import networks
from tests.conversion.compare import assert_same, pair, saved

pytestmark = pytest.mark.usefixtures("uncounted")


class Watched(networks.Functional):
    """Counts its calls that run inside a scope."""

    inside = 0

    def forward(self, x):
        self.inside += innermost() is not None
        return super().forward(x)


@pytest.fixture
def image():
    return torch.randn(2, 3, 8, 8, dtype=torch.float64)


@pytest.fixture
def model(image):
    model = Watched().double()
    fusedseg.convert(model, example_inputs=image)
    return model


COPIES = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved,
    "replicate": lambda model: model._replicate_for_data_parallel(),
}


@pytest.mark.parametrize("leaves", [KeyboardInterrupt, SystemExit, GeneratorExit, ZeroDivisionError])
@pytest.mark.parametrize("where", ["forward", "pre-hook", "hook"])
def test_the_scope_ends_whatever_leaves_the_forward(model, image, leaves, where):
    """PyTorch runs hooks with ``always_call`` after an ``Exception`` only, so the scope cannot be left by a hook."""

    def leave(*_):
        assert innermost() is not None
        raise leaves

    if where == "forward":
        model.conv.register_forward_hook(leave)
    elif where == "hook":
        model.register_forward_hook(leave)
    else:
        model.register_forward_pre_hook(leave, prepend=True)
    with pytest.raises(leaves):
        model(image)
    assert innermost() is None
    # torch.func raises an error inside a scope that stayed open.
    torch.func.grad(lambda x: x.square().sum())(image)


@pytest.mark.parametrize("made", COPIES.values(), ids=COPIES)
def test_copies_enter_a_scope_of_their_own(model, image, made):
    other = made(model)
    before = model.inside
    other(image)
    assert other.inside == before + 1
    assert model.inside == before
    assert isinstance(other, Watched)


def test_the_class_passes_for_the_class_that_it_was(model):
    assert isinstance(model, Watched)
    assert (type(model).__name__, type(model).__module__) == ("Watched", __name__)
    assert repr(model) == repr(fusedseg.revert(copy.deepcopy(model)))
    assert type(copy.deepcopy(model)) is type(model)
    assert type(fusedseg.revert(model)) is Watched


def test_converted_twice_enters_one_scope(model, image):
    fusedseg.convert(model, example_inputs=image)
    assert [cls for cls in type(model).__mro__ if issubclass(cls, Watched)] == [type(model), Watched]
    assert type(fusedseg.revert(model)) is Watched


def test_a_class_that_asks_its_subclasses_for_arguments(image):
    class Asks(Watched):
        def __init_subclass__(cls, name: str) -> None:
            cls.name = name

    model = Asks().double()
    fusedseg.convert(model, example_inputs=image)
    before = model.inside
    model(image)
    assert model.inside == before + 1
    with pytest.raises(TypeError, match="name"):
        type("Child", (type(model),), {})


def test_a_change_of_class_on_top_of_it(model, image):
    """FSDP2 and parametrizations change the class of a module in this way."""
    theirs = type("Theirs", (type(model),), {})
    model.__class__ = theirs
    before = model.inside
    model(image)
    assert model.inside == before + 1
    fusedseg.revert(model)
    assert type(model) is theirs
    model(image)
    assert model.inside == before + 1
    fusedseg.convert(model, example_inputs=image)
    model(image)
    assert model.inside == before + 2


def test_a_parametrized_root(image):
    class Double(nn.Module):
        def forward(self, weight):
            return 2 * weight

    model = nn.Conv2d(3, 4, 3).double()
    fusedseg.convert(model, example_inputs=image)
    expected = 2 * model(image) - model.bias.view(-1, 1, 1)
    parametrize.register_parametrization(model, "weight", Double())
    assert torch.allclose(model(image), expected)
    assert torch.allclose(copy.deepcopy(model)(image), expected)
    assert torch.allclose(fusedseg.revert(model)(image), expected)


@pytest.mark.parametrize("make", [lambda: nn.MaxPool2d(2), lambda: nn.BatchNorm2d(3)], ids=["fused", "left"])
def test_a_root_that_is_a_leaf(image, make):
    model = make().double()
    stock, cls = copy.deepcopy(model), type(model)
    fusedseg.convert(model, example_inputs=image)
    assert isinstance(model, cls)
    assert_same(copy.deepcopy(model), copy.deepcopy(stock), image)
    assert_same(pickle.loads(pickle.dumps(model)), copy.deepcopy(stock), image)
    assert type(fusedseg.revert(model)) is cls


def test_a_converted_model_within_a_converted_model(image):
    inner = networks.UNet().double()
    stock = nn.Sequential(copy.deepcopy(inner), nn.ReLU())
    fusedseg.convert(inner, example_inputs=image)
    outer = nn.Sequential(inner, nn.ReLU())
    assert_same(copy.deepcopy(outer), copy.deepcopy(stock), image)
    fusedseg.convert(outer, example_inputs=image)
    assert type(inner) is networks.UNet
    assert_same(copy.deepcopy(outer), copy.deepcopy(stock), image)
    fusedseg.revert(outer)
    assert not any(isinstance(module, Scoped) for module in outer.modules())


def test_a_slice_of_a_converted_sequential(image):
    model, stock = pair(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)), image)
    assert torch.equal(model[:2](image), stock[:2](image))
    assert type(copy.deepcopy(model[:2])) is nn.Sequential


def test_a_forward_that_is_a_generator(image):
    class Yields(networks.Functional):
        def forward(self, x):
            yield super().forward(x)

    model = Yields().double()
    fusedseg.convert(model, example_inputs=image)
    values = model(image)
    next(values)
    with pytest.raises(KeyboardInterrupt):
        values.throw(KeyboardInterrupt)
    assert innermost() is None


def test_another_set_of_parameters(model, image):
    parameters = {name: p.detach() * 2 for name, p in model.named_parameters()}
    stock = fusedseg.revert(copy.deepcopy(model))
    assert torch.equal(functional_call(model, parameters, (image,)), functional_call(stock, parameters, (image,)))


@pytest.mark.parametrize("whole", [pytest.param("the model", marks=pytest.mark.slow), "a bigger model", "in place"])
def test_compiled_as_one_graph(image, whole):
    # `tests/ops/test_recompute_compiled.py` compiles converted U-Nets.
    small = nn.Sequential(networks.double_conv(3, 4), nn.Conv2d(4, 4, 1))
    model, stock = pair((networks.UNet() if whole == "the model" else small), image)
    if whole == "in place":
        model.compile(fullgraph=True, backend="aot_eager")
        compiled = model
    else:
        model, stock = (model, stock) if whole == "the model" else (nn.Sequential(model), nn.Sequential(stock))
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    out = compiled(image)
    out.sum().backward()
    assert torch.allclose(out, stock(image))
