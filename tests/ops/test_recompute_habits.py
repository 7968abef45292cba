"""Regressions: programs that work in eager mode and failed inside the recompute scope.  Each test names its bug."""

import copy
import io
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fusedseg
from fusedseg import recompute
from fusedseg.memory import SavedBytes
from tests.ops.scope_cases import grads, same_in_the_scope

pytestmark = pytest.mark.usefixtures("one_thread")


def net():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.LeakyReLU(0.1, inplace=True),
        nn.Upsample(scale_factor=2),
        nn.Conv2d(4, 2, 3, padding=1),
    )


@same_in_the_scope
def test_vmap_of_stock_code(scope):
    """It raised "Cannot access storage of BatchedTensorImpl"."""
    model, x = net(), torch.randn(3, 2, 3, 8, 8)
    with scope():
        out = torch.vmap(model)(x)
    out.square().sum().backward()
    return [out.detach(), *grads(model)]


@same_in_the_scope
def test_vmap_of_index_tensors_for_a_mask(scope):
    conv, x = nn.Conv2d(3, 3, 3, padding=1), torch.randn(2, 3, 8, 8)
    with scope():
        keep = torch.vmap(torch.vmap(lambda i, j: (i - j).abs() < 3, (None, 0)), (0, None))
        mask = keep(torch.arange(8), torch.arange(8))
        out = F.silu(conv(x)) * mask
    out.square().sum().backward()
    return grads(conv)


USES = {
    "cat": lambda f, p: torch.cat([f, p], 1),
    "interpolate": lambda f, p: F.interpolate(f, scale_factor=2) * p.mean(),
    "relu": lambda f, p: F.relu(f) + p,
}


@pytest.mark.parametrize("use", USES)
@same_in_the_scope
def test_features_made_in_inference_mode(scope, use):
    """It raised "Inference tensors do not track version counter"."""
    encoder, conv = nn.Conv2d(3, 4, 3), nn.Conv2d(8 if use == "cat" else 4, 2, 1)
    p = torch.randn(2, 4, 6, 6, requires_grad=True)
    with torch.inference_mode():
        f = encoder(torch.randn(2, 3, 8, 8))
    with scope():
        out = conv(USES[use](f, p))
    out.square().sum().backward()
    return grads(p, conv)


MAKES = {
    "interpolate": lambda x: F.interpolate(x, scale_factor=2),
    "cat": lambda x: torch.cat([x, x], 1),
    "silu": F.silu,
}


@pytest.mark.parametrize("make", MAKES)
def test_a_saved_output_can_be_loaded(make):
    """The scope's note was pickled with the tensor, and ``torch.load`` refused the file."""
    with recompute():
        out = MAKES[make](nn.Conv2d(3, 4, 3)(torch.randn(1, 3, 8, 8)))
        inside = io.BytesIO()
        torch.save(out, inside)
    file, plain = io.BytesIO(), io.BytesIO()
    torch.save(out, file)
    torch.save(out.clone(), plain)
    file.seek(0)
    assert torch.equal(torch.load(file), out)
    assert len(file.getvalue()) == len(plain.getvalue()) == len(inside.getvalue())


def test_meta_tensors():
    """It raised "unknown device type for autocast"."""
    with torch.device("meta"):
        model, x = net(), torch.randn(2, 3, 8, 8)
    with recompute():
        out = model(x)
    out.sum().backward()
    assert all(p.grad.shape == p.shape for p in model.parameters())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@same_in_the_scope
def test_strided_nested_tensors(scope):
    layer = nn.Linear(4, 4)
    parts = [torch.randn(2, 4), torch.randn(3, 4)]
    with scope():
        t = torch.nested.nested_tensor(parts, layout=torch.strided)
        out = F.dropout(F.relu(layer(t)), 0.0)
        out = torch.nested.to_padded_tensor(layer(out), 0.0)
    out.square().sum().backward()
    return grads(layer)


@same_in_the_scope
def test_batched_gradients(scope):
    model, x = net(), torch.randn(2, 3, 8, 8)
    with scope():
        out = model(x)
    cotangents = torch.randn(3, *out.shape)
    return torch.autograd.grad(out, list(model.parameters()), cotangents, is_grads_batched=True)


@same_in_the_scope
def test_vectorized_jacobian(scope):
    model, x = net(), torch.randn(1, 3, 4, 4)

    def f(x):
        with scope():
            return model(x).mean((2, 3))

    return [torch.autograd.functional.jacobian(f, x, vectorize=True)]


@pytest.mark.parametrize("mode", ["exact", "leaky"])
def test_batched_gradients_of_a_converted_model(mode):
    stock = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.LeakyReLU(0.1),
        nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv2d(4, 2, 1),
    ).double()  # fmt: skip
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    model = copy.deepcopy(stock)
    fusedseg.convert(model, example_inputs=x, mode=mode)
    if mode == "leaky":
        stock[2] = nn.LeakyReLU(0.01)
    cotangents = torch.randn(3, 2, 2, 2, 2, dtype=torch.float64)
    found = []
    for net in (stock, model):
        net.zero_grad()
        x.requires_grad_()
        batched = torch.autograd.grad(net(x), [x, *net.parameters()], cotangents, is_grads_batched=True)
        jacobian = torch.autograd.functional.jacobian(lambda x, net=net: net(x).mean((2, 3)), x, vectorize=True)
        out, wanted = net(x), list(net.parameters())
        mapped = torch.vmap(lambda v, of=(out, wanted): torch.autograd.grad(*of, v, retain_graph=True))(cotangents)
        found.append([*batched, jacobian, *mapped])
    for got, expected in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)


class Tracker(TorchDispatchMode):
    """Asks each tensor for its memory, as memory trackers do."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, torch.Tensor):
                t.untyped_storage().nbytes()
        return out


def test_a_tracker_does_not_change_what_is_kept():
    """A dispatch mode may ask for the memory of a tensor; that does not make the memory visible to the program."""
    model, x = net(), torch.randn(2, 3, 8, 8)

    def kept():
        with SavedBytes(list(model.parameters())) as saved, recompute():
            out = model(x)
            nbytes = saved.nbytes
        del out
        return nbytes

    expected = kept()
    with Tracker():
        assert kept() == expected


@pytest.mark.parametrize("batch", [1, 2])
def test_modes_of_others_see_tensors_with_memory(batch):
    """Other modes received opaque oneDNN tensors in the backward of a convolution of one small volume."""
    model = nn.Sequential(fusedseg.ConvABN3d(2, 4, 3, padding=1), fusedseg.nn.JoinConv3d(4, 3, 3, padding=1))
    x = torch.randn(batch, 2, 6, 6, 6, requires_grad=True)
    found = []
    for mode in (nullcontext(), Tracker()):
        with mode:
            found.append(torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()]))
    torch.testing.assert_close(*found)


def test_a_checkpointed_function_that_catches_errors():
    """The exception that ends a checkpoint's recomputation was raised too early, inside the function's ``try``."""
    conv, norm, instead = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(3, 4, 1)

    def attempt(x):
        try:
            y = norm(conv(x))
        except Exception:
            y = instead(x)
        return torch.sigmoid(y)

    x, found = torch.randn(2, 3, 4, 4), []
    for fn in (attempt, recompute()(attempt)):
        leaf = x.clone().requires_grad_()
        checkpoint(fn, leaf, use_reentrant=False).square().sum().backward()
        found.append(leaf.grad)
    assert torch.equal(*found)


def test_statistics_that_a_checkpointed_function_moves():
    """The statistics must move twice, because the function runs twice; the second run ended before the move."""
    norm, moved = nn.InstanceNorm2d(3, affine=True, track_running_stats=True), []
    for fn in (lambda x: torch.sigmoid(norm(x)), recompute()(lambda x: torch.sigmoid(norm(x)))):
        norm.reset_running_stats()
        x = torch.arange(48.0).view(1, 3, 4, 4).requires_grad_()
        checkpoint(fn, x, use_reentrant=False).sum().backward()
        moved.append(norm.running_mean.clone())
    assert torch.equal(*moved)


class Skip(nn.Module):
    """``first`` feeds both ends of a chain of norms, which is long enough that its output is rebuilt twice."""

    def __init__(self, first):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), first)
        blocks = [(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU()) for _ in range(6)]
        self.body = nn.Sequential(*[module for block in blocks for module in block])
        self.last = nn.Conv2d(16, 2, 1)

    def forward(self, x):
        y = self.first(x)
        return self.last(torch.cat([y, self.body(y)], 1))


@pytest.mark.parametrize("first", [nn.Dropout(0.3), nn.MaxPool2d(3, 1, 1)], ids=["dropout", "pool"])
def test_a_mask_before_a_skip_inside_of_a_checkpoint(first):
    """The mask was unpacked once for each rebuild, and a checkpoint gives a saved tensor only once."""

    found = []
    for around in (lambda model: model, recompute()):
        torch.manual_seed(0)
        model, x = Skip(first), torch.randn(2, 3, 32, 32)
        checkpoint(around(model), x, use_reentrant=False).square().sum().backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert torch.equal(*found)
