"""A table of all losses, and what the processes of their distributed tests run."""

from functools import partial

import torch
from torch.nn.parallel import DistributedDataParallel

from fusedseg import losses
from fusedseg.losses import DC_and_CE_loss

# For labels, and for regions of the shape of the logits in the case of those in REGIONS.
LOSSES = {
    "CrossEntropyLoss": partial(losses.CrossEntropyLoss, label_smoothing=0.1),
    "DiceLoss": partial(losses.DiceLoss, to_onehot_y=True, softmax=True),
    "DiceCELoss": partial(losses.DiceCELoss, to_onehot_y=True, softmax=True),
    "TverskyLoss": partial(losses.TverskyLoss, to_onehot_y=True, softmax=True),
    "FocalLoss": partial(losses.FocalLoss, to_onehot_y=True),
    "DiceFocalLoss": partial(losses.DiceFocalLoss, to_onehot_y=True, softmax=True),
    "DC_and_CE_loss": partial(DC_and_CE_loss, {"batch_dice": True}, {}, ignore_label=3),
    "DC_and_BCE_loss": partial(losses.DC_and_BCE_loss, {}, {"batch_dice": True}),
    "TopKLoss": partial(losses.TopKLoss, k=50),
    "DC_and_topk_loss": partial(losses.DC_and_topk_loss, {}, {"k": 50}),
    "SMPDiceLoss": partial(losses.SMPDiceLoss, "multiclass"),
    "SMPTverskyLoss": partial(losses.SMPTverskyLoss, "multiclass", gamma=1.5),
}
REGIONS = ("DC_and_BCE_loss",)


def labels_or_regions(name, N, K, spatial):
    """A target for a loss of the table."""
    if name in REGIONS:
        return torch.rand(N, K, *spatial) < 0.4
    shape = (N, *spatial) if name == "CrossEntropyLoss" else (N, 1, *spatial)
    return torch.randint(K, shape, dtype=torch.uint8)


def parallel_step(rank, world, net, x, labels):
    """The loss and the gradients of a network under DDP, of which each process has one sample."""
    wrapped = DistributedDataParallel(net)
    loss = DC_and_CE_loss({"batch_dice": True}, {})(wrapped(x[rank : rank + 1]), labels[rank : rank + 1])
    loss.backward()
    return loss.item(), [p.grad for p in net.parameters()]
