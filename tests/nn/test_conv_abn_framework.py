"""The module with hooks, a parametrization, torch.compile and an empty batch."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import fusedseg
from fusedseg import ConvABN2d
from tests.nn.test_conv_abn import assert_same_state, data, pair, step


def hooked(child, kind):
    return lambda ours, seen: getattr(getattr(ours, child), f"register_{kind}")(lambda *args: seen.append(child))


def replaced(child, name):
    """A function of a child is replaced."""

    def change(ours, seen):
        module = getattr(ours, child)
        run = getattr(module, name)
        setattr(module, name, lambda *args: seen.append(child) or run(*args))

    return change


class OtherConv(nn.Conv2d):
    pass


def another_conv(ours, seen):
    other = OtherConv(4, 6, 3, padding=1, dtype=torch.float64)
    other.load_state_dict(ours.conv.state_dict())
    other.forward = lambda x: seen.append("conv") or nn.Conv2d.forward(other, x)
    ours.conv = other


def another_norm(ours, seen):
    bn = ours.norm.to_norm()
    ours.norm = nn.Sequential(bn, nn.LeakyReLU(0.01))
    bn.register_forward_hook(lambda *args: seen.append("norm"))


CHANGES = {
    "hook on conv": hooked("conv", "forward_hook"),
    "pre-hook on norm": hooked("norm", "forward_pre_hook"),
    "backward hook on conv": hooked("conv", "full_backward_hook"),
    "backward hook on norm": hooked("norm", "full_backward_hook"),
    "backward pre-hook on conv": hooked("conv", "full_backward_pre_hook"),
    "forward of conv": replaced("conv", "forward"),
    "convolution of conv": replaced("conv", "_conv_forward"),
    "forward of norm": replaced("norm", "forward"),
    "another conv": another_conv,
    "another norm": another_norm,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_falls_back_where_children_want_to_be_called(change):
    """Backward hooks of the convolution once raised an error: they make its output a view, which the norm refuses."""
    stock, ours = pair()
    seen = []
    change(ours, seen)
    x = data()
    torch.testing.assert_close(step(ours, x), step(stock, x))
    assert len(seen) == 1


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_global_hooks_see_the_children(backward):
    """What a hook keeps of the convolution is not overwritten, and a view of it raises no error."""
    stock, ours = pair()
    kept, x = [], data()

    def keep(module, args, out):
        if isinstance(module, nn.Conv2d):
            kept.append(out[0] if backward else out)

    register = "register_module_full_backward_hook" if backward else "register_module_forward_hook"
    handle = getattr(nn.modules.module, register)(keep)
    try:
        torch.testing.assert_close(step(ours, x), step(stock, x))
    finally:
        handle.remove()
    torch.testing.assert_close(*kept)


def test_falls_back_for_a_parametrized_convolution():
    stock, ours = pair()
    for conv in (stock[0], ours.conv):
        parametrizations.weight_norm(conv)
    x = data()
    torch.testing.assert_close(step(ours, x), step(stock, x))
    ours.eval()
    torch.testing.assert_close(ours(x), stock.eval()(x))


def test_without_hooks_the_children_are_not_called(monkeypatch):
    _, ours = pair()
    for cls in (nn.Conv2d, fusedseg.InPlaceABN):
        monkeypatch.setattr(cls, "forward", None)
    assert ours(data()).shape == (2, 6, 6, 7)


@pytest.mark.usefixtures("needs_interpreter")
def test_compile_with_triton(monkeypatch):
    monkeypatch.setattr(fusedseg, "backend", "triton")
    torch._dynamo.reset()
    eager = ConvABN2d(4, 6, 3, padding=1, conv_backend="triton")
    copied = copy.deepcopy(eager)
    compiled = torch.compile(copied, fullgraph=True, backend="aot_eager")
    x = data(dtype=torch.float32)
    torch.testing.assert_close(step(compiled, x), step(eager, x))
    torch.testing.assert_close(dict(copied.state_dict()), dict(eager.state_dict()))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_empty_batch(compiled):
    """Statistics do not move, as in stock modules.  Under torch.compile running_var once became NaN."""
    torch._dynamo.reset()
    stock, ours = pair()
    run = torch.compile(ours, fullgraph=True, backend="aot_eager") if compiled else ours
    x = torch.randn(0, 4, 6, 7, dtype=torch.float64)
    assert run(x).shape == stock(x).shape
    assert_same_state(stock, ours)
