"""What the processes of the distributed tests of losses run."""

import torch

from fusedseg.losses import DC_and_CE_loss


def batch_dice(rank, world, x, labels, options):
    """The Dice part of a batch of which each process has one sample: its value, and the gradient of the sample."""
    leaf = x[rank : rank + 1].clone().requires_grad_()
    loss = DC_and_CE_loss(options, {}, weight_ce=0)(leaf, labels[rank : rank + 1])
    (grad,) = torch.autograd.grad(loss, leaf)
    return loss.item(), grad
