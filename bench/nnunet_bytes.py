"""``python -m bench.nnunet_bytes``: the bytes of nnU-Net's default 3D networks, for ``docs/nnunet.md``.

Counted on tensors without values at 2×1×128×128×128 under float16 autocast, with nnU-Net's loss and deep supervision:
what the network keeps, and the peak of a training step and of a validation step beyond parameters and the batch.
"""

import sys
from typing import NamedTuple

import torch
from torch import nn

import fusedseg
from fusedseg.functional import tp_fp_fn
from fusedseg.integrations.nnunet import fused_loss
from fusedseg.memory.fake import eager_step, fake_inputs, fake_mode, fake_model
from fusedseg.memory.meter import LiveBytes

from .networks import plain_unet, residual_unet

STOCK, FUSED = "stock", "fusedseg"
BATCH, PATCH = 2, 128
WIDTHS = (32, 64, 128, 256, 320, 320)
CLASSES = (3, 118)
NETWORKS = ("PlainConvUNet", "ResidualEncoderUNet")


class Bytes(NamedTuple):
    kept: int
    peak: int
    validation: int

    def __str__(self) -> str:
        return " | ".join(str(round(n / 2**20)) for n in self)


def network(name: str, classes: int) -> nn.Module:
    """The network that nnU-Net's planner chooses for a GPU of 8 GB, or its size L with residual blocks."""
    options = {"num_classes": classes, "deep_supervision": True}
    if name == "PlainConvUNet":
        return plain_unet(WIDTHS, **options)
    return residual_unet(WIDTHS, (1, 3, 4, 6, 6, 6), **options)


def stock_loss() -> nn.Module:
    from nnunetv2.training.loss.compound_losses import DC_and_CE_loss
    from nnunetv2.training.loss.deep_supervision import DeepSupervisionWrapper
    from nnunetv2.training.loss.dice import MemoryEfficientSoftDiceLoss

    dice = {"batch_dice": False, "smooth": 1e-5, "do_bg": False, "ddp": False}
    weights = [8 / 15, 4 / 15, 2 / 15, 1 / 15, 0.0]
    return DeepSupervisionWrapper(DC_and_CE_loss(dice, {}, dice_class=MemoryEfficientSoftDiceLoss), weights)


def stock_counts(logits: torch.Tensor, truth: torch.Tensor) -> None:
    """What the stock ``validation_step`` does with its logits."""
    from nnunetv2.training.loss.dice import get_tp_fp_fn_tn

    labels = logits.argmax(1)[:, None]
    one_hot = torch.zeros(logits.shape, dtype=torch.float16).scatter_(1, labels, 1)
    del labels
    get_tp_fp_fn_tn(one_hot, truth, axes=[0, 2, 3, 4])


def count(name: str, classes: int, way: str) -> Bytes:
    shape = (BATCH, 1, PATCH, PATCH, PATCH)
    with fake_mode():
        net, loss = fake_model(lambda: network(name, classes), torch.float32), stock_loss()
        if way == FUSED:
            fusedseg.convert(net)
            loss = fused_loss(loss)
        truth = [torch.empty(BATCH, 1, *(PATCH >> i,) * 3, dtype=torch.int16) for i in range(5)]
        inputs = fake_inputs(shape, torch.float32)
        step = eager_step(net, inputs, loss=lambda outputs: loss(outputs, truth), autocast=torch.float16)
        x = torch.empty(shape)
        with LiveBytes() as live, torch.no_grad(), torch.autocast("cpu", torch.float16):
            outputs = net.eval()(x)
            loss(outputs, truth)
            logits = outputs[0]
            del outputs
            (stock_counts if way == STOCK else tp_fp_fn)(logits, truth[0])
        return Bytes(step.saved, step.peak, live.peak)


def rows():
    """(network, classes, way) of each row of the page, in its order."""
    return [(name, classes, way) for name in NETWORKS for classes in CLASSES for way in (STOCK, FUSED)]


if __name__ == "__main__":
    for row in rows():
        print(*row, count(*row), sep=" | ")
        sys.stdout.flush()
