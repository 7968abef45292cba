"""Biases of convolutions before norms of their own statistics: left out, with exact zeros as gradients."""

import copy

import pytest
import torch
from torch import nn

import fusedseg
from fusedseg.compiler.capture import dead_bias
from fusedseg.compiler.codegen import divided_norms as norms
from tests.compiler.networks import (
    INDUCTOR,
    beside_eager,
    beside_float64,
    close,
    compiled,
    results,
    same,
    under_autocast,
)
from tests.compiler.programs import made, shifted
from tests.compiler.test_passes import names, traced
from tests.tools.spy import spied

aten = torch.ops.aten


@pytest.fixture
def counts(monkeypatch):
    """How many biases the pass has left out of each graph."""
    return spied(monkeypatch, dead_bias, "remove_dead_biases")


@pytest.fixture
def codegen(request, monkeypatch):
    """aten, whose kernels the interpreter runs on a CPU, unless the test asks for Inductor."""
    name = getattr(request, "param", "aten")
    if name == "aten":
        request.getfixturevalue("needs_interpreter")
        monkeypatch.setattr(fusedseg, "backend", "triton")
    return name


# How many biases of a program have no effect.
COUNTS = {
    "batch": 1, "batch alone": 1, "instance": 1, "running instance": 1, "group of one": 1, "1d": 1, "3d transposed": 1,
    "in-place norm": 1, "in-place instance norm": 1, "convolution and norm": 1,
    "biases with an effect": 0, "no batch": 0, "two biases without": 2, "one of two biases": 0,
}  # fmt: skip
# With running statistics a bias has an effect; a norm of a sample removes it in eval mode too.
OTHERS = [("batch", "eval", 0), ("instance", "eval", 1), ("batch", "frozen", 1), ("batch", "autocast", 1)]


@pytest.mark.parametrize(
    ("name", "mode", "count", "codegen"),
    [
        *((name, "training", count, "aten") for name, count in COUNTS.items()),
        *((*of, "aten") for of in OTHERS),
        *(pytest.param(name, "training", 1, "inductor", marks=INDUCTOR) for name in ("batch", "3d transposed")),
        pytest.param("batch", "autocast", 1, "inductor", marks=INDUCTOR),
    ],
    indirect=["codegen"],
)
def test_biases_without_an_effect_are_left_out(name, mode, count, codegen, counts):
    """Their gradients are exact zeros.  Results of two steps are those of float64; the mean gets all bits of a bias."""
    net, x = made(name)
    first = next(module for module in net.modules() if isinstance(module, CONVOLUTIONS))
    first.bias.requires_grad_(mode != "frozen")
    net.train(mode != "eval")
    twin, run = copy.deepcopy(net).double(), compiled(net, codegen)
    found = results(net, float_under_autocast(run) if mode == "autocast" else run, [x])
    rough = {"rtol": 2e-2, "atol": 2e-2} if mode == "autocast" else {}
    close(found, results(twin, twin, [x.double()]), **rough)
    assert counts == [count]
    if count and first.bias.requires_grad:
        trained = (p for p in net.parameters() if p.requires_grad)
        place = next(place for place, p in enumerate(trained, 1) if p is first.bias)
        assert found[place].dtype == torch.float32
        assert not found[place].any()


CONVOLUTIONS = nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose3d


def float_under_autocast(run):
    return lambda x: under_autocast(run)(x).float()


class OwnResidual(nn.Module):
    """A norm of this package whose residual is its input."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(2, 4, 3), fusedseg.InPlaceABN(4), nn.Conv2d(4, 2, 1)

    def forward(self, x):
        y = self.first(x)
        # Eager mode refuses one memory for both.
        return self.last(self.norm(y, y if torch.compiler.is_compiling() else y.clone()))


def test_a_bias_before_a_norm_whose_residual_is_its_input_stays(codegen, counts):
    """The op alone read the convolution, as its input and as its residual, which lost the bias."""
    close(*beside_float64(shifted(OwnResidual()), torch.randn(2, 2, 9, 8)))
    assert counts == [0]


def test_the_code_of_aten_keeps_the_bits_of_a_cpu(counts):
    """Without Triton's kernels, outputs and gradients are eager mode's, its rounding errors around zero included."""
    net, x = made("batch")
    assert same(*beside_eager(net, [x]))
    assert counts == [0]


def written(forward):
    """The ops of a norm that writes its statistics, which gives each of three vectors the value that it has to have."""
    x, vectors = torch.randn(2, 4, 3, 3), [torch.rand(4) for _ in range(3)]
    wanted = [v.clone() for v in vectors]
    forward(x, *wanted)
    module = traced(forward, x, *vectors)
    norms.write_statistics(module.graph)
    module.recompile()
    module(x, *vectors)
    torch.testing.assert_close(vectors, wanted)
    return names(module.graph)


def test_running_means_are_written_in_place():
    """The bias is added after the norm has written the mean where it is."""

    def forward(x, mean, var, bias):
        out = aten._native_batch_norm_legit_functional(x, None, None, mean, var, True, 0.1, 1e-5)
        aten.copy_(mean, aten.add(out[3], bias, alpha=0.1))
        aten.copy_(var, out[4])
        return out[0]

    assert [name for name in written(forward) if name in ("copy_", "add", "add_")] == ["add_"]


def test_what_is_added_keeps_its_value():
    """What is added to a running mean is read before it gets its own next value."""

    def forward(x, mean, var, other):
        out = aten._native_batch_norm_legit_functional(x, None, None, mean, var, True, 0.1, 1e-5)
        added = aten.add(out[3], other)
        aten.copy_(other, out[1])
        aten.copy_(mean, added)
        return out[0]

    written(forward)


def test_an_empty_batch_moves_no_mean(codegen, counts):
    """The mean moved by the part of the bias, although there were no values."""
    net = shifted(nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)))
    twin, x = copy.deepcopy(net).double(), torch.randn(0, 2, 6, 6)
    found = compiled(net, codegen)(x)
    assert found.shape == twin(x.double()).shape
    torch.testing.assert_close([b.double() for b in net.buffers()], [b.double() for b in twin.buffers()])
    assert counts == [0]


def test_with_bits_the_gradient_is_zeros_and_outputs_keep_their_bits():
    """Rounded values gave it errors of the size of other gradients (programs 163 and 307 of the hunt for bits)."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 3))
    x = torch.randn(2, 3, 32, 32)
    expected = copy.deepcopy(net)(x)
    out = compiled(net, bits=4)(x)
    out.square().mean().backward()
    assert torch.equal(out, expected)
    assert not net[0].bias.grad.any()
    assert net[3].bias.grad.any()
