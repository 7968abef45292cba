"""``torch.cuda.make_graphed_callables`` of a whole U-Net of modules: graphed steps train as eager steps do.

A CPU has no graphs.  There a stand-in checks what PyTorch checks, makes the warm-up steps, and returns the model.
"""

import copy
from contextlib import nullcontext

import pytest
import torch

import fusedseg
from fusedseg.unet import UNet

pytestmark = pytest.mark.gpu
STEPS, WARM_UP = 4, 3
NETWORKS = {
    "in place": {},
    "instance": {"norm_act": "instance"},
    "exact": {"norm_act": lambda C: fusedseg.BatchNormAct(C, activation="relu")},
}


def stand_in(model, sample_args):
    assert not any((model._forward_hooks, model._forward_pre_hooks, model._backward_hooks))
    assert not any(buffer.requires_grad for buffer in model.buffers())
    assert not (torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled())
    for _ in range(WARM_UP):
        out = model(*sample_args)
        torch.autograd.grad(out, list(model.parameters()), torch.zeros_like(out))
    return model


@pytest.fixture
def graphs(device, monkeypatch):
    if device.type != "cuda":
        monkeypatch.setattr(torch.cuda, "make_graphed_callables", stand_in)


def graphed(net, x):
    """The recipe of docs/networks.md."""
    before = copy.deepcopy(net.state_dict())
    net = torch.cuda.make_graphed_callables(net, (x,))
    net.load_state_dict(before)
    return net


def train(net, batches, autocast):
    """The losses and outputs in eval mode of some steps, and the state after them."""
    optimizer, found = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9), []
    for step, x in enumerate(batches):
        optimizer.zero_grad()
        with autocast():
            loss = net(x).float().square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.detach().clone())
        if step == 1:
            net.eval()
            with torch.no_grad():
                # Another size than the graphed one: eval mode runs the model's own forward.
                found.append(net(batches[0][:1]).float().mean())
            net.train()
    return found, net.state_dict()


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("half", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("name", NETWORKS)
def test_graphed_steps_train_as_eager_steps(device, name, half):
    def autocast():
        # PyTorch refuses to graph a model while autocast keeps casts of parameters.
        return torch.autocast(device.type, torch.bfloat16, cache_enabled=False) if half else nullcontext()

    torch.manual_seed(0)
    net = UNet(2, 3, widths=(8, 16), **NETWORKS[name]).to(device)
    plain = copy.deepcopy(net)
    batches = [torch.randn(2, 2, 16, 16, device=device) for _ in range(STEPS)]
    with autocast():
        net = graphed(net, batches[0].clone())
    losses, state = train(net, batches, autocast)
    expected, expected_state = train(plain, batches, autocast)
    tolerance = {"rtol": 1e-2, "atol": 1e-3} if half else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(losses, expected, **tolerance)
    torch.testing.assert_close(state, expected_state, **tolerance)
    counts = [buffer for key, buffer in state.items() if key.endswith("num_batches_tracked")]
    # Without the last line of the recipe, the warm-up steps would count too.
    assert all(count == STEPS for count in counts)
