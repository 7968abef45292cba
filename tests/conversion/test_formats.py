"""``convert(memory_format=...)``, and what converted models do with channels_last."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fusedseg
from fusedseg import losses
from fusedseg._torch import FakeTensorMode
from fusedseg.ops.avg_pool import avg_pool3d
from fusedseg.scope import formats
from tests.nnunet import PlainConvUNet
from tests.tools.copies import ROWS, Copies, Deep


class Pooled(nn.Module):
    """A network with max pools, an adaptive size, and a norm whose activation is a function."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv3d(1, 8, 3, padding=1), nn.Conv3d(8, 3, 3, padding=1)
        self.norm, self.pool = nn.InstanceNorm3d(8, affine=True), nn.MaxPool3d(2)

    def forward(self, x):
        h = self.pool(F.elu(self.norm(self.first(x))))
        return self.last(F.interpolate(h, scale_factor=2, mode="trilinear"))


def narrow():
    return PlainConvUNet(widths=(8, 16, 32))


def loss_of(outputs):
    """nnU-Net's loss, with deep supervision where the model returns several outputs."""
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    targets = [torch.zeros(y.shape[0], 1, *y.shape[2:], dtype=torch.int64) for y in outputs]
    loss = losses.DC_and_CE_loss({"batch_dice": True, "do_bg": False}, {})
    return losses.DeepSupervision(loss)(outputs, targets)


@pytest.mark.parametrize("net", [narrow, Deep, Pooled])
def test_a_step_makes_no_layout_copy(two_threads, net):
    """An instance norm without an activation module, such as that before a sum, copied to planes and back."""
    with FakeTensorMode():
        model, x = net(), torch.randn(2, 1, 16, 16, 16)
        fusedseg.convert(model, example_inputs=x, memory_format=ROWS)
        with Copies() as copies:
            loss_of(model(x)).backward()
    assert copies.found == []
    assert copies.planes == []


def test_format_of_parameters_and_inputs():
    torch.manual_seed(0)
    stock, x = Deep().double(), torch.randn(2, 1, 8, 8, 8, dtype=torch.float64)
    model = copy.deepcopy(stock)
    weight = model.down.conv.weight
    fusedseg.convert(model, example_inputs=x, memory_format=ROWS)
    assert model.down.conv.weight is weight
    assert weight.is_contiguous(memory_format=ROWS)
    for converted in (model, pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        for mine, own in zip(converted(x), stock(x), strict=True):
            torch.testing.assert_close(mine, own)
    fusedseg.revert(converted)
    assert converted.down.conv.weight.is_contiguous()
    assert torch.equal(converted(x)[0], stock(x)[0])
    # What the user has laid out stays so.
    model = Deep().to(memory_format=ROWS)
    fusedseg.convert(model, memory_format=ROWS)
    assert fusedseg.revert(model).down.conv.weight.is_contiguous(memory_format=ROWS)


def test_a_model_with_images_and_volumes():
    """Only what has the dimensions of the format is laid out, also in containers among the arguments."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.flat, self.deep = nn.Conv2d(2, 3, 3), nn.Conv3d(2, 3, 3)

        def forward(self, both, *, scale):
            self.given = [t.is_contiguous() for t in both]
            return self.flat(both[0]).sum() + self.deep(both[1]).sum() * scale

    model, both = Both(), (torch.randn(2, 2, 4, 4), torch.randn(2, 2, 4, 4, 4))
    fusedseg.convert(model, memory_format=ROWS)
    model(both, scale=2.0)
    assert model.given == [True, False]
    assert model.flat.weight.is_contiguous()
    assert not model.deep.weight.is_contiguous()


def test_wrong_format():
    with pytest.raises(ValueError, match=r"convert: memory_format must be torch.channels_last, .*, got 'rows'"):
        fusedseg.convert(nn.Conv2d(1, 1, 1), memory_format="rows")


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_functions_of_a_converted_model(training, grad):
    """They keep the format with and without gradients; those of a scope around it stay PyTorch's."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.InstanceNorm3d(4, affine=True, track_running_stats=True)

        def forward(self, x):
            return self.norm(x), F.instance_norm(x), F.avg_pool3d(x, (2, 1, 3)), F.avg_pool3d(x, 3, stride=2)

    torch.manual_seed(0)
    stock, x = Net().double().train(training), torch.randn(2, 4, 4, 6, 7, dtype=torch.float64).to(memory_format=ROWS)
    model, y = copy.deepcopy(stock), x.clone()
    fusedseg.convert(model)
    with torch.set_grad_enabled(grad), fusedseg.recompute():
        mine, own = model(x.requires_grad_(grad)), stock(y.requires_grad_(grad))
        assert not F.instance_norm(x).is_contiguous(memory_format=ROWS)
    for a, b in zip(mine, own, strict=True):
        torch.testing.assert_close(a, b)
        assert a.is_contiguous(memory_format=ROWS)
    torch.testing.assert_close(dict(model.named_buffers()), dict(stock.named_buffers()))
    if grad:
        for outputs in (mine, own):
            sum((out * torch.linspace(0, 1, out.numel()).view(out.shape)).sum() for out in outputs).backward()
        torch.testing.assert_close(x.grad, y.grad)


def test_group_norm_as_on_a_gpu():
    x = torch.randn(2, 4, 3, 4, 5).to(memory_format=ROWS)
    y = formats._group_norm(x, 2)
    torch.testing.assert_close(y, F.group_norm(x, 2))
    assert y.is_contiguous(memory_format=ROWS)


def test_pool_of_a_volume_without_samples():
    """Its channels, depth, height and width lie as those of a batch of images in channels_last."""
    x = torch.randn(4, 4, 4, 4).to(memory_format=torch.channels_last)
    assert torch.equal(avg_pool3d(x, 2), F.avg_pool3d(x, 2))


def test_what_a_pool_keeps():
    """The 2D pools of which it consists would keep a quarter of the input."""
    kept = []
    x = torch.randn(1, 4, 5, 4, 6, dtype=torch.float64).to(memory_format=ROWS).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        avg_pool3d(x, 2)
    assert not kept
    torch.autograd.gradcheck(lambda x: avg_pool3d(x, 2), x)
    torch.autograd.gradgradcheck(lambda x: avg_pool3d(x, 2), x)
