"""In the scope, rebuilt inputs of convolutions are freed early, and concatenations are rebuilt source by source."""

from itertools import product

import pytest
import torch
from torch.nn import functional as F

from fusedseg import recompute
from fusedseg.memory.fake import fake_mode
from fusedseg.memory.meter import measure
from fusedseg.ops import reuse
from fusedseg.ops.conv import slabs
from fusedseg.scope import saved
from fusedseg.unet import UNet
from tests.compiler.networks import relu
from tests.ops.scope_cases import assert_same_gradients, both
from tests.ops.test_recompute_networks import CASES, test_gradients
from tests.tools.tensors import channels_last
from tests.tools.threads import threads as torch_threads

NEVER = 2**60
# Each network has the blocks of all others, or parts that no other network has.
NETWORKS = ("U-Net, transposed", "two encoders", "3D small", "ResNet-18")


@pytest.fixture(autouse=True)
def every_size(monkeypatch):
    """Small tensors are treated as large ones."""
    monkeypatch.setattr(reuse, "LEAST_BYTES", 1)
    monkeypatch.setattr(saved, "LEAST_BYTES", 1)
    monkeypatch.setattr(slabs, "SLAB_BYTES", 1)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("precision", ["fp32", "amp"])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_have_the_bits_of_eager_mode(name, precision):
    test_gradients(CASES[name], precision)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [{}, {"stride": 2}, {"padding": "same"}, {"dilation": (2, 1), "groups": 2}, {"bias": None}],
    ids=["plain", "stride", "same", "groups", "no bias"],
)
def test_a_convolution_of_a_rebuilt_tensor(options, dtype):
    x, y = (torch.randn(2, 4, 9, 8, dtype=dtype, requires_grad=True) for _ in range(2))
    options = dict(options)
    w = torch.randn(6, 8 // options.get("groups", 1), 3, 3, dtype=dtype, requires_grad=True)
    bias = options.pop("bias", torch.randn(6, dtype=dtype, requires_grad=True))
    leaves = [x, y, w] + ([] if bias is None else [bias])
    assert_same_gradients(lambda: F.conv2d(torch.cat([x * 2, F.relu(y * 3)], 1), w, bias, **options), *leaves)


def test_a_gradient_of_a_gradient():
    x = torch.randn(2, 4, 9, 8, dtype=torch.float64, requires_grad=True)
    w = torch.randn(6, 4, 3, 3, dtype=torch.float64, requires_grad=True)

    def program(scope):
        with scope():
            loss = F.conv2d(F.relu(x * 2), w).square().sum()
        (dx,) = torch.autograd.grad(loss, x, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), [x, w])

    torch.testing.assert_close(*both(program))


def test_a_frozen_weight_and_a_second_backward():
    x, w = torch.randn(2, 4, 9, 8, requires_grad=True), torch.randn(6, 4, 3, 3)
    with recompute():
        total = F.conv2d(F.relu(x * 2), w).square().sum()
    first, second = (torch.autograd.grad(total, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(first, torch.autograd.grad(F.conv2d(F.relu(x * 2), w).square().sum(), x)[0])


@pytest.mark.parametrize("dim", [1, -1, 0])
def test_a_concatenation_of_several_dtypes_and_layouts(dim):
    x = torch.randn(2, 4, 4, 4, requires_grad=True)

    def fn():
        a, b = channels_last(x * 2), (x * 3).half()
        return torch.cat((F.silu(a), F.relu(b), F.silu(a)), dim).sigmoid()

    assert_same_gradients(fn, x)


MODES = {
    4: (("nearest", None), ("nearest-exact", None), ("area", None), ("bilinear", False), ("bicubic", True)),
    5: (("nearest", None), ("nearest-exact", None), ("area", None), ("trilinear", False), ("trilinear", True)),
}
# Each enlarged sample has more than the 32,768 values that PyTorch gives to one thread.
SIZES = {4: (((70, 43), 3), ((9, 67), 19), ((40, 60), 5)), 5: (((40, 12, 3), 3), ((5, 4, 33), 19), ((9, 20, 10), 5))}


# PyTorch divides the values among threads in the same way for every dtype.
DTYPES = [(of, 1) for of in (torch.float64, torch.float32, torch.bfloat16, torch.float16)] + [(torch.float32, 2)]
DTYPES += [pytest.param(of, 2, marks=pytest.mark.slow) for of in (torch.float64, torch.bfloat16, torch.float16)]


@pytest.mark.parametrize(("dtype", "threads"), DTYPES)
@pytest.mark.parametrize(("dims", "mode", "align_corners"), [(n, *mode) for n, of in MODES.items() for mode in of])
def test_an_enlarged_source_in_slabs_has_the_same_bits(dims, mode, align_corners, dtype, threads):
    """Sizes are those of long and of short rows, and the channels are more than a vector has, and fewer."""
    with torch_threads(threads):
        for (size, channels), rows in product(SIZES[dims], (False, True)):
            x = torch.randn(3, channels, *size).to(dtype)
            x = channels_last(x) if rows else x
            kwargs = {"scale_factor": 2, "mode": mode, "align_corners": align_corners}
            slabs_of = [F.interpolate(x[n : n + 1], **kwargs) for n in range(3)]
            assert torch.equal(torch.cat(slabs_of), F.interpolate(x, **kwargs))


def peak_of(least, monkeypatch):
    """The peak of a U-Net of one level below the full size, in tensors of the largest size."""
    monkeypatch.setattr(reuse, "LEAST_BYTES", least)
    monkeypatch.setattr(saved, "LEAST_BYTES", least)
    with fake_mode():
        net = UNet(1, 2, widths=(32, 32), plain=True, reduce=False, norm_act=relu)
        x = torch.empty(2, 1, 256, 256)
        found = measure(recompute()(net), x, owned=[*net.parameters(), *net.buffers()])
    return found.peak / (2 * 32 * 256 * 256 * 4)


def test_the_peak_of_an_unchanged_network(monkeypatch):
    """The peak is where the concatenation is rebuilt.  In the old order its gradient, and a source, are there too."""
    before, after = peak_of(NEVER, monkeypatch), peak_of(1, monkeypatch)
    assert after <= 7.9
    assert after <= before - 1.2
