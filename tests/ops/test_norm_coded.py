"""The norm op with a packed copy of what it keeps: the bits of the norm op and the storage op, one after the other."""

import pytest
import torch
from torch import nn

import fusedseg
from fusedseg.activation import Activation
from fusedseg.memory import SavedBytes
from fusedseg.ops.layout import dense
from fusedseg.ops.low_bit.op import pack, unpack
from fusedseg.ops.norm import coded, passes
from fusedseg.ops.norm.coded import Copy
from fusedseg.ops.norm.spec import Passed, Saved, Spec, Wanted
from tests.tools.tensors import channels_last

LEAKY = Activation("leaky_relu", 0.01)
CASES = {
    "batch": ("batch", 0, (2, 6, 12, 25)), "instance": ("instance", 0, (2, 6, 16, 32)),
    "group": ("group", 3, (2, 6, 16, 32)), "small": ("batch", 0, (2, 6, 3, 2)),
    "one-sample": ("instance", 0, (1, 6, 9, 9)),
}  # fmt: skip


@pytest.mark.parametrize("rows", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("keep", ["output", "input"])
@pytest.mark.parametrize("name", CASES)
def test_the_bits_of_both_ops(name, keep, rows, backend, device):
    kind, groups, shape = CASES[name]
    x, dz = torch.randn(2, *shape, device=device)
    x, dz = (channels_last(x), channels_last(dz)) if rows else (x, dz)
    weight, bias = torch.linspace(0.6, 1.4, 6, device=device), torch.linspace(-0.5, 0.5, 6, device=device)
    spec = Spec(keep, LEAKY, kind=kind, groups=groups)
    source, layout = dense(x)
    layout = spec.layout(source, layout)

    def given():
        copy = source.clone()
        return Passed(copy, weight, bias), spec, layout, None, copy if keep == "output" else None

    found, packed = coded.forward(*given(), Copy(4, 5, keep == "input"))
    plain = passes.forward(*given())
    exact = backend == "aten" or not rows
    torch.testing.assert_close(found.z, plain.z, **({"rtol": 0, "atol": 0} if exact else {}))
    kept = found.z if keep == "output" else source
    expected = pack(kept, 4, 5, packed.kink)
    for got, wanted in zip(packed[:3], expected[:3], strict=True):
        assert torch.equal(got, wanted)
    assert packed[4:] == expected[4:]
    mean = found.mean if keep == "input" else None
    saved = Saved(kept, weight, bias, None, None, mean, found.second)
    rest = spec, layout, None, Wanted(True, False)
    grads = coded.backward(dz, packed, saved._replace(source=torch.full_like(kept, torch.nan)), *rest)
    of_whole = passes.backward(dz, saved._replace(source=unpack(packed)), *rest)
    for got, wanted in zip(grads[:3], of_whole[:3], strict=True):
        # aten adds up dx in another order if it is written over the output.
        torch.testing.assert_close(got, wanted, **({"rtol": 0, "atol": 0} if backend == "triton" else {}))


def test_a_gradient_of_other_strides(backend, device):
    """An expanded gradient, as that of a sum."""
    x, dz = torch.randn(2, 4, 8, 32, device=device), torch.ones(1, device=device).expand(2, 4, 8, 32)
    spec, (_, layout) = Spec("input", LEAKY), dense(x)
    found, packed = coded.forward(Passed(x), spec, layout, None, None, Copy(8, 0, True))
    saved = Saved(x, None, None, None, None, found.mean, found.second)
    rest = spec, layout, None, Wanted(False, False)
    expected = passes.backward(dz, saved._replace(source=unpack(packed)), *rest).dx
    torch.testing.assert_close(coded.backward(dz, packed, saved, *rest).dx, expected, rtol=0, atol=0)


def kept_bits(read, *tensors, owned=()):
    """The bits that the scope keeps for each value of the first tensor."""
    leaves = [t.requires_grad_() for t in tensors]
    with SavedBytes(owned) as saved, fusedseg.recompute(bits=4):
        # Not the caller's data, which the scope keeps as it is.
        out = read(*(t * 1 for t in leaves))
    assert out.requires_grad
    return 8 * saved.nbytes / tensors[0].numel()


@pytest.mark.parametrize(("order", "copies"), [("conv norm", 1), ("norm conv", 1), ("norm other", 2)])
def test_one_copy_serves_a_convolution_and_a_norm(order, copies):
    """Two norms need a copy each: the sign on each side of the bend of one norm is not exact in the copy of another."""
    modules = {name: fusedseg.BatchNormAct(8, activation="relu") for name in ("norm", "other")}
    modules["conv"] = nn.Conv2d(8, 8, 1)

    def read(x):
        return sum(modules[name](x).sum() for name in order.split())

    bits = kept_bits(read, torch.randn(2, 8, 32, 32), owned=modules["conv"].parameters())
    # Each group of values has its smallest and largest one beside it, and each channel its statistics.
    assert 4 * copies <= bits <= 4.5 * copies


@pytest.mark.parametrize(("module", "bits"), [(fusedseg.BatchNormAct, 8), (fusedseg.InPlaceABN, 4)])
def test_a_sum_of_rounded_tensors_takes_eight_bits(module, bits):
    """A norm that keeps its input finds the sign of input and residual together; the output alone has its own sign."""
    norm = module(8, activation="leaky_relu", activation_param=0.01)
    found = kept_bits(norm, *torch.randn(2, 2, 8, 32, 32))
    assert 2 * bits <= found <= 2 * bits + 1
