"""Modules of a converted model are changed by hand: the model stays right, or the next forward raises an error."""

import copy
import gc
import pickle
import weakref
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import fusedseg
from tests.conversion import networks
from tests.conversion.compare import assert_same, pair

pytestmark = pytest.mark.usefixtures("uncounted")


@pytest.fixture
def image():
    return torch.randn(2, 3, 8, 8, dtype=torch.float64)


def sequential(act: nn.Module) -> nn.Module:
    """The block is not the root, so that a test can exchange the container that holds it."""
    body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), act, nn.Conv2d(4, 4, 1))
    return nn.Sequential(OrderedDict(body=body, head=nn.Conv2d(4, 2, 1))).double()


AGAIN = r"call fusedseg\.convert on the model again, or fusedseg\.revert before"


@pytest.mark.parametrize(
    ("act", "name", "value"),
    [
        (nn.LeakyReLU(0.1), "negative_slope", 0.5),
        (nn.LeakyReLU(0.0), "negative_slope", 0.5),
        (nn.ELU(), "alpha", 0.5),
        (nn.GELU(), "approximate", "tanh"),
    ],
    ids=["leaky_relu", "leaky_relu that is relu", "elu", "gelu"],
)
def test_the_parameter_of_an_activation_is_set(image, act, name, value):
    model, stock = pair(sequential(copy.deepcopy(act)), image)
    # Code that changes slopes during training finds the modules by their class.
    assert isinstance(model.body[2], type(act))
    model(image)
    setattr(model.body[2], name, getattr(act, name))
    model(image)
    for net in (model, stock):
        setattr(net.body[2], name, value)
    with pytest.raises(RuntimeError, match=f"{name} of body.2 was set to .*{AGAIN}"):
        model(image)
    fusedseg.convert(model, example_inputs=image)
    stock.load_state_dict(model.state_dict())
    assert_same(model, stock, image)


def test_the_parameter_of_an_activation_in_compiled_code_is_set(image):
    """Compiled code makes the comparison of eager mode, which the test above sees for each parameter."""
    model = sequential(nn.LeakyReLU(0.1))
    fusedseg.convert(model, example_inputs=image)
    forward = torch.compile(model, backend="aot_eager", fullgraph=True)
    forward(image)
    model.body[2].negative_slope = 0.1
    forward(image)
    model.body[2].negative_slope = 0.5
    # torch.compile turns an error during the trace of a full graph into an error of its own class.
    with pytest.raises(Exception, match=f"negative_slope of body.2 was set to .*{AGAIN}"):
        forward(image)


def remove(container: nn.Module, name: str) -> None:
    delattr(container, name)


CHANGES = {
    "activation": (lambda m: setattr(m.body, "2", nn.SiLU()), r"body\.2 was .* but body\.1 still does its work"),
    "no activation": (lambda m: setattr(m.body, "2", nn.Identity()), r"body\.2 was .* but body\.1 still does its work"),
    "activation deleted": (lambda m: remove(m.body, "2"), r"body\.2 was .* but body\.1 still does its work"),
    "norm": (lambda m: setattr(m.body, "1", nn.BatchNorm2d(4).double()), r"body\.1 was .* body\.2 still leaves its"),
    "no norm": (lambda m: setattr(m.body, "1", nn.Identity()), r"body\.1 was .* body\.2 still leaves its"),
    "between them": (lambda m: m.body.insert(2, nn.Dropout()), r"body\.2 was .* but body\.1 still does its work"),
    "another container": (
        lambda m: setattr(m, "body", nn.Sequential(*m.body[:2], nn.SiLU(), m.body[3])),
        r"body\.2 was .* but body\.1 still does its work",
    ),
    "no convolution": (lambda m: setattr(m.body, "0", nn.Identity()), r"body\.0 was .* body\.1 still writes over"),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_module_is_replaced(image, change, message, compiled):
    model = sequential(nn.LeakyReLU(0.1))
    fusedseg.convert(model, example_inputs=image)
    forward = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    forward(image)
    change(model)
    with pytest.raises(Exception if compiled else RuntimeError, match=f"{message}.*{AGAIN}"):
        forward(image)
    # No norm saw an input before the error.
    assert all(n.num_batches_tracked < 2 for n in model.modules() if isinstance(n, fusedseg.InPlaceABN))
    fusedseg.revert(model)
    assert not any(type(module).__module__.startswith("fusedseg") for module in model.modules())


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), copy.copy], ids=["deepcopy", "pickle", "copy"]
)
def test_a_copy_is_watched_as_the_original(image, copied):
    model = sequential(nn.ELU())
    fusedseg.convert(model, example_inputs=image)
    other = copied(model)
    other(image)
    other.body[2] = nn.SiLU()
    with pytest.raises(RuntimeError, match=AGAIN):
        other(image)


HARMLESS = {
    "inplace": lambda m: setattr(m.body[2], "inplace", True),
    "another head": lambda m: setattr(m, "head", nn.Conv2d(4, 5, 1).double()),
    "a module more": lambda m: m.body.append(nn.Tanh()),
    "another name": lambda m: setattr(m.body[0], "unused", nn.Linear(2, 2)),
    "another convolution": lambda m: setattr(m.body, "0", nn.Conv2d(3, 4, 1).double()),
    "a container of the same": lambda m: setattr(m, "body", nn.Sequential(*m.body)),
    "a wrapper": lambda m: setattr(m, "body", nn.Sequential(m.body)),
    "a checkpoint": lambda m: setattr(m, "body", checkpoint_wrapper(m.body)),
    "a wrapped norm": lambda m: setattr(m.body, "1", nn.Sequential(m.body[1])),
    "all of it gone": lambda m: setattr(m, "body", nn.Conv2d(3, 4, 3).double()),
    "norm and activation gone": lambda m: setattr(m, "body", nn.Sequential(m.body[0], m.body[3])),
    "synchronised": fusedseg.convert_sync,
}


@pytest.mark.parametrize("change", HARMLESS.values(), ids=HARMLESS)
@pytest.mark.filterwarnings("ignore:fusedseg. torch.distributed is not initialised")
def test_what_changes_no_activation_is_right(image, change):
    torch.manual_seed(0)
    model, stock = pair(sequential(nn.LeakyReLU(0.1)), image)
    for net in (model, stock):
        torch.manual_seed(1)
        change(net)
    # Under a checkpoint, the running statistics of stock norms move twice in training.
    training = change is not HARMLESS["a checkpoint"]
    assert_same(copy.deepcopy(model), fusedseg.revert(copy.deepcopy(model)), image, training=training)
    if change is not fusedseg.convert_sync:
        assert_same(model, stock, image, training=training)


def test_what_was_taken_out_is_not_kept_alive(image):
    model = sequential(nn.LeakyReLU(0.1))
    fusedseg.convert(model, example_inputs=image)
    model(image)
    gone = [weakref.ref(model.head), weakref.ref(model.body[0])]
    model.head, model.body[0] = nn.Identity(), nn.Conv2d(3, 4, 1).double()
    model(image)
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    # The wiring watches the new convolution from now on.
    model.body[0] = nn.Conv2d(3, 4, 1).double()
    model(image)
    model.body[0] = nn.Identity()
    with pytest.raises(RuntimeError, match=r"body\.0 was moved, replaced or removed, but body\.1 still writes over"):
        model(image)


def test_part_of_a_model_is_reverted(image):
    model, stock = pair(networks.UNet(), image)
    fusedseg.revert(model.dec)
    for net in (model, stock):
        net.dec[0][2] = nn.SiLU()
    assert_same(model, stock, image)


def test_an_activation_module_of_many_calls_is_replaced(image):
    """Some calls of the activation follow a norm that does its work, others follow a sum."""
    model, stock = pair(networks.ResNet(), image)
    model.layers[0].relu = nn.SiLU()
    with pytest.raises(RuntimeError, match=r"layers\.0\.relu was .* but layers\.0\.bn1 still does its work"):
        model(image)
    model.layers[0] = nn.Identity()
    stock.layers[0] = nn.Identity()
    assert_same(model, stock, image)


def test_the_activation_says_that_it_does_nothing_by_itself():
    model = nn.Sequential(*networks.double_conv(3, 8, nn.LeakyReLU(0.5)))
    fusedseg.convert(model, example_inputs=torch.randn(2, 3, 8, 8))
    assert repr(model[2]) == "Applied(LeakyReLU, done by the norm before it)"
    x = torch.randn(3)
    assert model[2](x) is x
