"""Hooks and forwards that are set after ``convert`` see the tensors of the stock model, and may replace them.

A fused norm returned the activated tensor to its hooks, and a norm in place wrote over what a hook of the convolution
had kept.  Where one op does the work of a convolution, norm and activation, a replaced forward of the convolution or a
global hook made the norm run twice.
"""

import copy
import pickle
from contextlib import ExitStack

import pytest
import torch
from torch import nn
from torch.nn.modules import module as nn_module
from torch.utils.checkpoint import checkpoint

import fusedseg
from fusedseg.conversion import convs
from fusedseg.memory import profile
from fusedseg.ops.norm import eager
from tests.conversion import networks
from tests.conversion.compare import assert_same, pair

pytestmark = pytest.mark.usefixtures("uncounted")


class Passes(nn.Module):
    def forward(self, x):
        return x


def conv_norm_act(act, norm=nn.BatchNorm2d):
    return nn.Conv2d(3, 4, 3, padding=1), norm(4), act()


def flat(act):
    return nn.Sequential(*conv_norm_act(act), nn.Conv2d(4, 2, 1))


def grouped(act):
    return nn.Sequential(*conv_norm_act(act, lambda c: nn.GroupNorm(2, c)), nn.Conv2d(4, 2, 1))


def nested(act):
    conv, norm, act = conv_norm_act(act, nn.InstanceNorm2d)
    return nn.Sequential(nn.Sequential(nn.Sequential(conv), norm), nn.Sequential(act), nn.Conv2d(4, 2, 1))


def through(act):
    conv, norm, act = conv_norm_act(act)
    return nn.Sequential(conv, nn.Identity(), norm, Passes(), act, nn.Conv2d(4, 2, 1))


def shared(act):
    conv, norm, act = conv_norm_act(act)
    return nn.Sequential(conv, norm, act, nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), act, nn.Conv2d(4, 2, 1))


def residual(act):
    """The activation also follows a sum, so that norms mark what they have activated."""
    return networks.BasicBlock(3, 4, 2)


def leaky():
    return nn.LeakyReLU(0.1, inplace=True)


NETWORKS = [
    (flat, leaky),
    (flat, nn.SiLU),
    (grouped, nn.ELU),
    (nested, leaky),
    (through, nn.ReLU),
    (shared, leaky),
    (residual, nn.ReLU),
]


class Habits:
    """Hooks of one kind on one module, or on all; ``seen`` has what they saw."""

    def __init__(self, model, kind, path):
        self.seen, self._stack = [], ExitStack()
        module = model.get_submodule(path)
        if kind == "replaced":
            forward = module.forward
            module.forward = lambda *args: forward(*args) * 1.5 + 0.3
            self._stack.callback(delattr, module, "forward")
            return
        make, hook = {
            "forward": ("register_forward_hook", lambda m, args, out: self.see(m, args[0], out)),
            "changing": ("register_forward_hook", lambda m, args, out: out * 1.5 + 0.3),
            "once": ("register_forward_hook", lambda m, args, out: [self.see(m, out), self._stack.close()][1]),
            "before": ("register_forward_pre_hook", lambda m, args: self.see(m, args[0])),
            "changing before": ("register_forward_pre_hook", lambda m, args: (args[0] * 1.5 + 0.3,)),
            "backward": ("register_full_backward_hook", lambda m, dx, dy: self.see(m, *dx, *dy)),
            "before backward": ("register_full_backward_pre_hook", lambda m, dy: self.see(m, *dy)),
        }[kind.removeprefix("global ")]
        if kind.startswith("global "):
            one, self._only = hook, module
            hook = lambda m, *args: one(m, *args) if m is module else None  # noqa: E731
            handle = getattr(nn_module, make.replace("register_", "register_module_"))(hook)
        else:
            handle = getattr(module, make)(hook)
        self._stack.callback(handle.remove)

    def see(self, module, *tensors):
        self.seen += [tensor for tensor in tensors if tensor is not None]

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._stack.close()


KINDS = ["forward", "changing", "once", "before", "changing before", "backward", "before backward", "replaced"]


def assert_habits_are_right(ours, stock, x, kind, path, tolerance=1e-9):
    """Either both raise PyTorch's error about a view that is overwritten, or all is equal, also without the hook."""
    seen, errors = [], []
    for net in (ours, stock):
        with Habits(net, kind, path) as habits:
            try:
                # A backward hook of the first module wants an input with a gradient.
                net(x.clone().requires_grad_()).square().sum().backward()
            except RuntimeError as error:
                errors.append(str(error))
        seen.append(habits.seen)
        net.zero_grad()
    assert len(errors) in (0, 2), errors
    if not errors:
        torch.testing.assert_close(*seen, rtol=tolerance, atol=tolerance)
    assert_same(ours, stock, x, tolerance)


@pytest.mark.parametrize("kind", [*KINDS, "global forward", "global changing", "global backward"])
@pytest.mark.parametrize(("make", "act"), NETWORKS, ids=lambda value: value.__name__)
@pytest.mark.parametrize("inplace", [True, False], ids=["in place", "exact"])
def test_hooks_see_and_change_what_they_would_in_the_stock_model(kind, make, act, inplace):
    torch.manual_seed(0)
    original, x = make(act).double(), torch.randn(2, 3, 6, 6, dtype=torch.float64)
    converted = copy.deepcopy(original)
    assert fusedseg.convert(converted, example_inputs=x, inplace=inplace).replaced
    for path, _ in original.named_modules():
        if path:
            assert_habits_are_right(copy.deepcopy(converted), copy.deepcopy(original), x, kind, path)


@pytest.mark.parametrize("kind", [*KINDS, "global forward", "global changing", "global before"])
def test_where_one_op_does_the_work_of_all_three(kind, image, monkeypatch):
    monkeypatch.setattr(convs, "pays", lambda x: True)
    model, stock = pair(through(leaky), image)
    for path in "01234":
        assert_habits_are_right(copy.deepcopy(model), copy.deepcopy(stock), image, kind, path)


def test_one_small_volume(monkeypatch):
    """On a CPU one op convolves, normalises and activates it."""
    make = nn.Conv3d(2, 4, 3, padding=1), nn.BatchNorm3d(4), nn.LeakyReLU(), nn.Conv3d(4, 2, 1)
    stock, x = nn.Sequential(*make), torch.randn(1, 2, 6, 6, 6)
    model = copy.deepcopy(stock)
    fusedseg.convert(model, example_inputs=x)
    for kind in ("replaced", "global changing", "forward"):
        assert_habits_are_right(model, stock, x, kind, "0", 1e-4)
    assert model[1].num_batches_tracked == stock[1].num_batches_tracked == 6


@pytest.mark.parametrize("cls", ["forward", "_conv_forward"])
def test_a_convolution_with_a_forward_of_another_class(cls, image, monkeypatch):
    monkeypatch.setattr(convs, "pays", lambda x: True)
    model, stock = pair(flat(leaky), image)
    for net in (model, stock):
        if cls == "forward":
            changed = {"forward": lambda self, x: 2 * super(type(self), self).forward(x)}
            net[0].__class__ = type("Doubled", (type(net[0]),), changed)
        else:
            run = net[0]._conv_forward
            net[0]._conv_forward = lambda *args, run=run: 2 * run(*args)
    assert_same(model, stock, image)


@pytest.fixture
def fused(monkeypatch):
    """The number of calls of fused norms."""
    calls, real = [], eager.NormFunction.forward
    monkeypatch.setattr(eager.NormFunction, "forward", lambda *args: calls.append(args) or real(*args))
    return calls


@pytest.mark.parametrize("act", [nn.LeakyReLU, nn.SiLU])
def test_without_the_hook_the_norm_is_fused_again(act, image, fused):
    model = flat(act).double()
    fusedseg.convert(model, example_inputs=image)
    for watched in (False, True, False):
        fused.clear()
        with ExitStack() as stack:
            if watched:
                stack.callback(model[1].register_forward_hook(lambda *args: None).remove)
            model(image)
        assert len(fused) == (not watched)


def test_hooks_of_this_package_and_of_other_modules_change_nothing(image, fused):
    model = flat(leaky).double()
    fusedseg.convert(model, example_inputs=image)
    model.register_forward_hook(lambda *args: None)
    model[3].register_forward_pre_hook(lambda *args: None)
    fused.clear()
    model(image).sum().backward()
    assert len(fused) == 1
    profile(model, image)
    assert len(fused) > 1
    assert not model[1]._aside.now


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_hooks_of_a_copy(copied, image):
    model, stock = pair(flat(nn.SiLU), image)
    other = copied(model)
    assert_habits_are_right(other, stock, image, "forward", "1")
    assert not model[1]._aside.now


def test_hooks_of_modules_that_came_later(image):
    """Wrappers and containers that hold a part of a fused norm see what goes from part to part."""
    model, stock = pair(flat(leaky), image)
    for net in (model, stock):
        net[0] = nn.Sequential(net[0])
        net[1] = nn.Sequential(nn.Sequential(net[1]))
    for path in ("0", "1", "1.0"):
        for kind in ("forward", "changing"):
            assert_habits_are_right(copy.deepcopy(model), copy.deepcopy(stock), image, kind, path)


@pytest.mark.filterwarnings("ignore:fusedseg. torch.distributed is not initialised")
def test_hooks_of_a_synchronised_norm(image):
    model, stock = pair(flat(nn.SiLU), image)
    fusedseg.convert_sync(model)
    assert_habits_are_right(model, stock, image, "forward", "1")


def test_compiled_with_a_hook(image):
    model, stock = pair(flat(nn.SiLU), image)
    for net in (model, stock):
        net[1].register_forward_hook(lambda m, args, out: out * 1.5 + 0.3)
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(image), copy.deepcopy(stock)(image))
    assert_same(model, stock, image)


@pytest.mark.parametrize("reentrant", [False, True])
def test_statistics_move_once_in_a_checkpoint_with_a_hook(reentrant, image):
    model = flat(leaky).double()
    fusedseg.convert(model, example_inputs=image)
    seen = []
    model[1].register_forward_hook(lambda m, args, out: seen.append(m.running_mean.clone()))
    checkpoint(model, image.requires_grad_(), use_reentrant=reentrant).sum().backward()
    assert len(seen) == 2
    assert torch.equal(*seen)
    assert model[1].num_batches_tracked == 1


def test_a_hook_that_was_there_before(image):
    """A container around convolution and norm had a hook when the model was converted."""

    def see(m, dx, dy):
        seen.append(dy[0])

    stock, seen = nested(nn.SiLU).double(), []
    stock[0].register_full_backward_hook(see)
    model = copy.deepcopy(stock)
    report = fusedseg.convert(model, example_inputs=image)
    assert report.recomputed[0].why == "Sequential has hooks, which would see other tensors"
    assert_same(model, stock, image)
    torch.testing.assert_close(*seen)
