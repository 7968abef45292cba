"""Two optimizer steps of three networks, against their stock form in float64 on the CPU."""

import copy
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusedseg
from fusedseg.unet import UNet
from tests.compiler.networks import compiled
from tests.reference import relative_error
from tests.resnet import ResNet18
from tests.tools.marks import slow

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiled_afresh")]
CLASSES = 3


class Pair(NamedTuple):
    """A network and its stock form with the same weights, a batch, its labels, and the loss."""

    ours: nn.Module
    stock: nn.Module
    x: Tensor
    labels: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]


def unet(shape: tuple[int, ...], **options: object) -> Pair:
    """A U-Net of fused modules."""
    ours, stock = (UNet(shape[1], CLASSES, widths=(8, 16, 16), plain=plain, **options) for plain in (False, True))
    stock.load_stock_state_dict(ours.state_dict())
    labels = torch.randint(CLASSES, (shape[0], 1, *shape[2:]))
    return Pair(ours, stock, torch.randn(shape), labels, fusedseg.DiceCELoss(to_onehot_y=True, softmax=True))


def resnet() -> Pair:
    """The first half of a stock network, which the compiler backend compiles; later norms would have few values."""
    stock = ResNet18(CLASSES, width=8)
    stock.layers, stock.fc = stock.layers[:2], nn.Linear(16, CLASSES)
    x = torch.randn(4, 3, 64, 64)
    return Pair(copy.deepcopy(stock), stock, x, torch.randint(CLASSES, (4,)), F.cross_entropy)


NETWORKS = {
    "2D U-Net": lambda: unet((2, 2, 32, 24)),
    "3D U-Net": lambda: unet((2, 1, 16, 12, 8), dims=3, norm_act="instance", mode="transposed"),
    "ResNet": resnet,
}
# Not the others: on a GPU, PyTorch's own linear interpolation and overlapping pool add by atomics in backward.
REPEATS = ("3D U-Net",)
# The error of the steps relative to their size.  Rounding puts a value onto the other side of a kink, or changes the
# largest value of a window, and each moves a gradient.  Where stock modules are off by more, ours may be by twice that.
ERRORS = {torch.float32: 1e-2, torch.bfloat16: 0.2}


class Moved(NamedTuple):
    """How far two steps moved the parameters, and the running statistics after them."""

    parameters: Tensor
    buffers: Tensor


def trained(net: nn.Module, run: Callable[[Tensor], Tensor], pair: Pair, half: bool = False) -> Moved:
    optimizer = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9, nesterov=True)
    begin = [p.detach().clone() for p in net.parameters()]
    x, labels = pair.x.to(begin[0]), pair.labels.to(begin[0].device)
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast(x.device.type, torch.bfloat16, enabled=half):
            loss = pair.loss(run(x), labels)
        loss.backward()
        optimizer.step()
    moved = [p.detach() - was for p, was in zip(net.parameters(), begin, strict=True)]
    # An empty tensor for a network without buffers.
    parts = [[t.flatten().double().cpu() for t in of] for of in (moved, net.buffers())]
    return Moved(*(torch.cat(part) if part else torch.zeros(0) for part in parts))


# Without a GPU, other tests compare each module in fp32.
@pytest.mark.parametrize("dtype", slow(ERRORS, torch.float32), ids=["fp32", "autocast"])
@pytest.mark.parametrize("name", NETWORKS)
def test_two_steps(device, name, dtype):
    """Parameters and running statistics move as those of the stock network; a second run of one gives the same bits."""
    torch.manual_seed(0)
    pair, half = NETWORKS[name](), dtype == torch.bfloat16
    exact = copy.deepcopy(pair.stock).double()
    wanted = trained(exact, exact, pair)
    stock, ours = pair.stock.to(device), pair.ours.to(device)
    begin = copy.deepcopy(ours.state_dict())
    run = compiled(ours) if name == "ResNet" else ours
    found, theirs = trained(ours, run, pair, half), trained(stock, stock, pair, half)
    for mine, of_stock, right in zip(found, theirs, wanted, strict=True):
        assert relative_error(mine, right) <= max(ERRORS[dtype], 2 * relative_error(of_stock, right))
    if name in REPEATS:
        ours.load_state_dict(begin)
        assert all(map(torch.equal, trained(ours, run, pair, half), found))
