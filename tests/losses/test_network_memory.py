"""The peaks of nnU-Net's network with 118 classes, on tensors without values, where nnU-Net is installed."""

import contextlib

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import fusedseg
from fusedseg.functional import tp_fp_fn
from fusedseg.losses import DC_and_CE_loss, DeepSupervision
from fusedseg.memory.meter import LiveBytes

pytestmark = pytest.mark.slow
K, MIB = 118, 2**20
# The arguments and the weights of nnU-Net's trainer; the coarsest output has no weight.
DICE = {"batch_dice": False, "smooth": 1e-5, "do_bg": False, "ddp": False}
WEIGHTS = [8 / 15, 4 / 15, 2 / 15, 1 / 15, 0]


class Autocast(TorchFunctionMode):
    """What autocast on a GPU does with fp16 logits in nnU-Net's loss: the softmax and sums are fp32, in one kernel."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        half = bool(args) and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float16
        if half and name == "softmax":
            return torch._softmax(args[0], 1, True)
        if half and name == "cross_entropy":
            return F.nll_loss(torch._log_softmax(args[0], 1, True), args[1])
        if half and name == "sum":
            kwargs.setdefault("dtype", torch.float32)
        return func(*args, **kwargs)


def stock_loss():
    compound = pytest.importorskip("nnunetv2.training.loss.compound_losses")
    dice = pytest.importorskip("nnunetv2.training.loss.dice").MemoryEfficientSoftDiceLoss
    wrapper = pytest.importorskip("nnunetv2.training.loss.deep_supervision").DeepSupervisionWrapper
    return wrapper(compound.DC_and_CE_loss(dict(DICE), {}, dice_class=dice), WEIGHTS)


def stock_counts(output, target):
    """The lines of nnU-Net's ``validation_step`` after the loss."""
    counts = pytest.importorskip("nnunetv2.training.loss.dice").get_tp_fp_fn_tn
    labels = output.argmax(1)[:, None]
    predicted = torch.zeros(output.shape, dtype=torch.float16).scatter_(1, labels, 1)
    del labels
    return counts(predicted, target, axes=[0, 2, 3, 4])


def network(converted, heads, x):
    """PlainConvUNet with fp16 weights, as autocast computes with."""
    PlainConvUNet = pytest.importorskip("dynamic_network_architectures.architectures.unet").PlainConvUNet
    net = PlainConvUNet(
        1, 6, (32, 64, 128, 256, 320, 320), nn.Conv3d, 3, (1, 2, 2, 2, 2, 2), 2, K, 2, conv_bias=True,
        norm_op=nn.InstanceNorm3d, norm_op_kwargs={"eps": 1e-5, "affine": True},
        nonlin=nn.LeakyReLU, nonlin_kwargs={"inplace": True}, deep_supervision=True,
    )  # fmt: skip
    if converted:
        fusedseg.convert(net)
    if heads:
        layers = net.decoder.seg_layers
        for i, conv in enumerate(layers):
            layers[i] = fusedseg.ConvHead3d.from_conv(conv)
    return net


@contextlib.contextmanager
def half_by_default():
    torch.set_default_dtype(torch.float16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def peak(stock=False, converted=False, heads=False, training=True):
    """MiB beyond parameters, image and labels, gradients included."""
    with FakeTensorMode():
        x = torch.empty(2, 1, 128, 128, 128, dtype=torch.float16)
        targets = [torch.empty(2, 1, *(128 >> level,) * 3, dtype=torch.int16) for level in range(5)]
        with half_by_default():
            net = network(converted, heads, x).train(training)
        loss = stock_loss() if stock else DeepSupervision(DC_and_CE_loss(DICE, {}), WEIGHTS)
        with LiveBytes() as live, torch.set_grad_enabled(training), Autocast():
            if training:
                loss(net(x), targets).backward()
            else:
                outputs = net(x)
                loss(outputs, targets)
                del outputs[1:]
                (stock_counts if stock else tp_fp_fn)(outputs[0], targets[0])
    return round(live.peak / MIB)


def test_training(record_property):
    """The figures of docs/losses.md, in MiB; the goal of the converted network is 3.1 GiB."""
    found = {"stock": peak(stock=True), "ours": peak(), "converted": peak(converted=True)}
    found |= {"heads": peak(heads=True), "converted, heads": peak(converted=True, heads=True)}
    record_property("peaks", found)
    print(found)
    assert found["stock"] == pytest.approx(12037, rel=0.01)
    assert found["ours"] <= 0.46 * found["stock"]
    # ``convert`` forms concatenations as the stock network does.
    assert found["converted"] <= 4100
    assert found["converted, heads"] <= 2450
    assert found["heads"] < found["ours"]


def test_validation_peaks_lower_than_training(record_property):
    stock, ours, converted = (
        peak(training=False, **options) for options in ({"stock": True}, {}, {"converted": True, "heads": True})
    )
    record_property("peaks", {"stock": stock, "ours": ours, "converted, heads": converted})
    print(stock, ours, converted)
    # The stock step takes 14 times the bytes of the logits, and the logits.
    assert stock == pytest.approx(14160, rel=0.01)
    assert ours <= 2 * 944
    assert converted <= peak(converted=True, heads=True)
