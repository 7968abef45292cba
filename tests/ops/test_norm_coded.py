"""Norms in a recompute scope with ``bits`` on Triton: their kernels write codes in forward and read them in backward.

All is compared with the storage op, which packs and unpacks whole tensors beside the same norm kernels.
"""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import fusedseg
from fusedseg import recompute
from fusedseg.memory import SavedBytes
from fusedseg.ops.norm import coded
from tests.tools.tensors import channels_last

pytest.importorskip("triton")

from tests.tools.traffic import traffic

C = 6
NORMS = {
    "batch in place": lambda: fusedseg.InPlaceABN(C),
    "instance in place": lambda: fusedseg.InPlaceInstanceNormAct(C, affine=True),
    "group in place": lambda: fusedseg.InPlaceGroupNormAct(3, C),
    "batch ReLU": lambda: fusedseg.BatchNormAct(C, activation="relu"),
    "instance LeakyReLU": lambda: fusedseg.InstanceNormAct(C, affine=True),
    "group ReLU": lambda: fusedseg.GroupNormAct(3, C, activation="relu"),
    "batch SiLU": lambda: fusedseg.BatchNormAct(C, activation="silu"),
    "batch, no activation": lambda: fusedseg.BatchNormAct(C, activation="identity"),
    "running": lambda: fusedseg.BatchNormAct(C, activation="relu").eval(),
}


@pytest.fixture(autouse=True)
def triton(monkeypatch, device):
    if device.type != "cpu":
        pytest.skip("compares bits of convolutions on a CPU")
    monkeypatch.setattr(fusedseg, "backend", "triton")


@pytest.fixture
def split(monkeypatch):
    """No slab: statistics of packed rows, which have none, are then added up in the same order as without packing."""
    from fusedseg.kernels.launcher import forget_plans

    from fusedseg.kernels import norm_act

    forget_plans()
    monkeypatch.setattr(norm_act, "ONCHIP_FWD", 0)
    yield
    forget_plans()


def network(norm, **options):
    model = nn.Sequential(nn.Conv2d(3, C, 1), norm(), nn.Conv2d(C, 4, 1))
    nn.init.uniform_(model[1].weight, 0.5, 1.5)
    nn.init.uniform_(model[1].bias, -0.5, 0.5)
    return model


class Step:
    """One step: what the model returns, gradients, buffers, what hooks around the scope get, and bytes kept."""

    def __init__(self, model, x, bits=4, **passed) -> None:
        self.given = []
        buffers = [b.clone() for b in model.buffers()]

        def note(t):
            self.given.append(t.clone())
            return t

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t), recompute(bits=bits, seed=3):
            model(x, **passed)
        self.moved = [b.clone() for b in model.buffers()]
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)
        with SavedBytes() as saved, recompute(bits=bits, seed=3):
            self.out = model(x, **passed)
        self.kept = saved.nbytes
        weights = torch.linspace(-1, 1, self.out.numel()).view_as(self.out)
        loss = (self.out * (weights + self.out)).mean()
        self.gradients = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])

    @property
    def codes(self):
        return [t for t in self.given if t.dtype == torch.uint8]


def both(monkeypatch, model, x, **options):
    """A step whose kernels write and read codes, and a step with the storage op."""
    steps = []
    for own in (True, False):
        with monkeypatch.context() as changed:
            if not own:
                changed.setattr(coded, "may_write", lambda *args: False)
            buffers = [b.clone() for b in model.buffers()]
            steps.append(Step(model, x, **options))
            for buffer, before in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(before)
    return steps


def check(found, expected):
    assert torch.equal(found.out, expected.out)
    assert found.kept == expected.kept
    assert len(found.codes) == len(expected.codes) > 0
    for of in ("codes", "gradients", "moved"):
        assert all(map(torch.equal, getattr(found, of), getattr(expected, of))), of


@pytest.mark.usefixtures("split")
@pytest.mark.parametrize("rows", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("name", NORMS)
def test_the_bits_of_the_storage_op(name, rows, monkeypatch):
    x = torch.randn(2, 3, 13, 32)
    check(*both(monkeypatch, network(NORMS[name]), channels_last(x) if rows else x))


def test_eight_bits_and_planes_of_one_group(monkeypatch):
    check(*both(monkeypatch, network(NORMS["instance in place"]), torch.randn(16, 3, 8, 8), bits=8))


def test_planes_that_are_no_groups(monkeypatch):
    """Planes of fewer than 64 positions share groups, so that the storage op packs them."""
    check(*both(monkeypatch, network(NORMS["batch in place"]), torch.randn(64, 3, 4, 4)))


def test_a_channel_that_is_kept(monkeypatch):
    """A weight of 0: xhat of the channel is kept beside z."""
    model = network(NORMS["batch in place"])
    with torch.no_grad():
        model[1].weight[2] = 0
    check(*both(monkeypatch, model, torch.randn(2, 3, 16, 32)))


class Residual(nn.Module):
    def __init__(self, norm, shared=False) -> None:
        super().__init__()
        self.stem, self.norm, self.head = nn.Conv2d(3, C, 1), norm, nn.Conv2d(C, 4, 1)
        self.shared = shared

    def forward(self, x):
        x = self.stem(x)
        return self.head(self.norm(x * 1, residual=x))


@pytest.mark.parametrize("name", ["batch in place", "batch SiLU", "batch, no activation"])
def test_residuals(name, monkeypatch):
    check(*both(monkeypatch, Residual(NORMS[name]()), torch.randn(2, 3, 16, 32)))


class Sharing(nn.Module):
    """A convolution saves the input of the norm first."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.heads = nn.Conv2d(3, C, 1), NORMS["batch ReLU"](), nn.ModuleList()
        self.heads.extend(nn.Conv2d(C, 4, 1) for _ in range(2))

    def forward(self, x):
        x = self.stem(x)
        return self.heads[0](x) + self.heads[1](self.norm(x))


def test_an_input_that_another_call_has_packed(monkeypatch):
    check(*both(monkeypatch, Sharing(), torch.randn(2, 3, 16, 32)))


@pytest.mark.parametrize("bias", [True, False])
def test_a_convolution_and_its_norm(bias, monkeypatch):
    model = nn.Sequential(nn.Conv2d(3, C, 1), fusedseg.ConvABN2d(C, C, 3, padding=1, bias=bias), nn.Conv2d(C, 4, 1))
    x = torch.randn(2, 3, 16, 32)
    found, expected = both(monkeypatch, model, x)
    check(found, expected)
    # The address that a kernel's launch asks for must not count as a way to change z.
    monkeypatch.setattr(fusedseg, "backend", "aten")
    assert Step(model, x).kept == found.kept


@pytest.mark.parametrize("rows", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("name", ["batch in place", "instance LeakyReLU", "group ReLU"])
def test_gradients_are_those_of_aten(name, rows, monkeypatch):
    """No code differs here, although the statistics differ in their last digits."""
    model, x = network(NORMS[name]), torch.randn(2, 3, 16, 32)
    x = channels_last(x) if rows else x
    found = Step(model, x)
    monkeypatch.setattr(fusedseg, "backend", "aten")
    expected = Step(model, x)
    assert found.kept == expected.kept
    assert all(map(torch.equal, found.codes, expected.codes))
    for got, wanted in zip((found.out, *found.gradients), (expected.out, *expected.gradients), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_hooks_around_the_scope(monkeypatch):
    """They get the codes in forward, and return them in backward."""
    model, x = network(NORMS["batch in place"]), torch.randn(2, 3, 16, 32)
    found = []
    for hooks in (nullcontext(), torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone)):
        with hooks, recompute(bits=4, seed=0):
            loss = model(x).square().mean()
        found.append(torch.autograd.grad(loss, list(model.parameters())))
    assert all(map(torch.equal, *found))


def test_second_backwards():
    """A second backward reads the same codes; one of several gradients at once, and one that is recorded, unpack."""
    model, x = network(NORMS["batch in place"]), torch.randn(2, 3, 16, 32)
    with recompute(bits=4, seed=0):
        out = model(x)
    dz, parameters = torch.randn(2, *out.shape), list(model.parameters())
    first, again = (torch.autograd.grad(out, parameters, dz[0], retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, again))
    stacked = torch.autograd.grad(out, parameters, dz, retain_graph=True, is_grads_batched=True)
    for got, wanted in zip(stacked, first, strict=True):
        torch.testing.assert_close(got[0], wanted)
    recorded = torch.autograd.grad(out, parameters, dz[0].requires_grad_(), create_graph=True)
    for got, wanted in zip(recorded, first, strict=True):
        torch.testing.assert_close(got, wanted)
    with pytest.raises(RuntimeError, match=r"fusedseg\.inplace_abn: double backward is not supported"):
        recorded[0].sum().backward()


@pytest.fixture
def few_programs(monkeypatch, split):
    """So few that their parameters and partial results are small beside the tensor; and no slab."""
    from fusedseg.kernels import launch, norm_act_bwd

    monkeypatch.setattr(launch, "multiprocessors", lambda device: 1)
    monkeypatch.setattr(norm_act_bwd, "ONCHIP_BWD", 0)


# Passes over an fp16 tensor in a step with 4 bits; the codes and the range of groups are 0.258 of it.
PASSES = {
    # Statistics; z and its codes.  z for the weight gradient of the convolution; sums; dx.
    "batch in place": (1, 2.258, 1.258, 1.258, 2.258),
    # Here z is rebuilt from the codes of x.
    "batch ReLU": (1, 2.258, 1.258, 1.258, 2.258),
    # Backward of rows reads the unpacked tensor.
    "rows in place": (1, 2.258, 1.258, 2, 3),
}


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("name", PASSES)
def test_passes_of_a_step(name, record_property):
    rows = name.startswith("rows")
    channels = 16 if rows else 2
    norm = fusedseg.BatchNormAct(channels, activation="relu") if "ReLU" in name else fusedseg.InPlaceABN(channels)
    model = nn.Sequential(nn.Conv2d(3, channels, 1), norm, nn.Conv2d(channels, 1, 1)).half()
    norm.float()
    x = torch.randn(2, 3, *((64, 64) if rows else (128, 128))).half()
    with traffic() as moved:
        with recompute(bits=4, seed=0):
            out = model(channels_last(x) if rows else x)
        torch.autograd.grad(out, list(model.parameters()), torch.ones_like(out))
    nbytes = 2 * 2 * channels * x.shape[2] * x.shape[3]
    found = {kernel: (moved.loaded(kernel) + moved.stored(kernel)) / nbytes for kernel in set(moved.launches)}
    record_property("passes", found)
    print(f"\n{name}: {sum(found.values()):.3f}", found)
    assert sum(found.values()) == pytest.approx(sum(PASSES[name]), abs=0.05)
    assert ("low_bit_unpack_kernel" in found) == ("ReLU" not in name)
    assert "low_bit_pack_kernel" not in found
