"""Programs for one or two processes, and a trainer with the methods of nnU-Net's; a forked process can import them.

Each program returns the losses, and what ``end`` says of the network.  Two processes get half of each batch each.
"""

import inspect
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from fusedseg.integrations import inplace_abn, nnunet

STEPS = 3


def batch():
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(4, 3, 16, 16, generator=generator, dtype=torch.float64) * 2 + 1
    return x, (x[:, 0] > 1).long()


def mine(rank, world):
    """The share of a process; the halves differ in mean, so that their own statistics differ."""
    x, y = batch()
    x = x + torch.arange(4.0).view(-1, 1, 1, 1)
    return x.chunk(world)[rank], y.chunk(world)[rank]


def end(net) -> dict[str, Any]:
    state = {name.removeprefix("module."): value.clone() for name, value in net.state_dict().items()}
    return {"state": state, "norms": sorted({type(m).__name__ for m in net.modules() if "Sync" in type(m).__name__})}


def trained(net, rank, world):
    x, y = mine(rank, world)
    wrapped = DistributedDataParallel(net) if world > 1 else net
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = F.cross_entropy(wrapped(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, end(net)


class ByFunction(nn.BatchNorm2d):
    """Calls the function of the package, as timm's ``InplaceAbn`` does."""

    def forward(self, x):
        function = inplace_abn.inplace_abn_sync if dist.is_initialized() else inplace_abn.inplace_abn
        return function(x, self.weight, self.bias, self.running_mean, self.running_var, self.training)


def package(rank, world):
    """The names of the package ``inplace_abn``, with an activation that has an inverse and with slope 0."""
    torch.manual_seed(0)
    kind = inplace_abn.InPlaceABNSync if world > 1 else inplace_abn.InPlaceABN
    net = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), kind(6), nn.Conv2d(6, 6, 3, padding=1), kind(6, activation_param=0.0),
        nn.Conv2d(6, 4, 1), kind(4, activation="identity"), nn.Conv2d(4, 4, 1), ByFunction(4), nn.Conv2d(4, 2, 1),
    )  # fmt: skip
    return trained(net.double(), rank, world)


class Network(nn.Sequential):
    """It has a forward of its own, because ``compile`` has no effect on that of PyTorch."""

    def forward(self, x):
        for layer in self:
            x = layer(x)
        return x


def block(norm):
    return nn.Sequential(nn.Conv2d(1, 8, 3), norm, nn.LeakyReLU(0.01))


class StandIn:
    """What ``Fused`` needs of nnU-Net's trainer, without nnU-Net."""

    is_ddp, local_rank, disable_checkpointing, num_input_channels = False, 0, False, 1
    device = torch.device("cpu")
    configuration_manager = SimpleNamespace(batch_size=2, patch_size=(16, 16))

    def __init__(self, norm):
        self.norm, self.log = norm, []

    @staticmethod
    def build_network_architecture(norm):
        return Network(block(norm), nn.Conv2d(8, 2, 1))

    def initialize(self):
        # nnU-Net looks at this signature.
        assert "norm" in inspect.signature(self.build_network_architecture).parameters
        self.network = self.build_network_architecture(self.norm)
        self.compiled = self._do_i_compile()
        if self.compiled:
            self.network = torch.compile(self.network)
        if self.is_ddp:
            self.network = nn.SyncBatchNorm.convert_sync_batchnorm(self.network)
        self.loss = self._build_loss()

    def _do_i_compile(self):
        return self.device.type == "cuda"

    def train_step(self, batch):
        self.network.zero_grad()
        loss = self.loss(self.network(batch["data"]), batch["target"])
        loss.backward()
        return {"loss": loss.item()}

    def perform_actual_validation(self, save_probabilities=False):
        self.network.eval()
        with torch.inference_mode():
            # nnU-Net's predictor adds what the network returns for a mirrored window.
            x = torch.linspace(-1, 1, 256, device=self.device).view(1, 1, 16, 16)
            self.prediction = self.network(x)
            self.prediction += self.network(x.flip(3)).flip(3)

    def _build_loss(self):
        return nn.L1Loss()

    def print_to_log_file(self, *args, **options):
        self.log += map(str, args)

    def save_checkpoint(self, filename):
        torch.save({"trainer_name": type(self).__name__, "network_weights": self.network.state_dict()}, filename)


class FusedStandIn(nnunet.Fused, StandIn):
    pass


def initialized(kind=FusedStandIn, norm=None, **attributes):
    """A trainer of a class, with attributes that are set before it initialises itself."""
    trainer = kind(nn.BatchNorm2d(8) if norm is None else norm)
    vars(trainer).update(attributes)
    trainer.initialize()
    return trainer


class OfThree(FusedStandIn):
    num_input_channels = 3

    @staticmethod
    def build_network_architecture(norm):
        made = StandIn.build_network_architecture(norm)
        return Network(nn.Conv2d(3, 8, 3, padding=2), *list(made)[1:])


def nnunet_trainer(rank, world):
    torch.manual_seed(5)
    trainer = initialized(OfThree, nn.GroupNorm(4, 8), is_ddp=world > 1)
    return trained(nn.Sequential(trainer.network.double(), nn.AdaptiveAvgPool2d(16)), rank, world)
