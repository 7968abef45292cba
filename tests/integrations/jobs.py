"""Programs for one or two processes, and a trainer with the methods of nnU-Net's; a forked process can import them.

Each program returns the losses, and what ``end`` says of the network.  Two processes get half of each batch each.
"""

import copy
import inspect
import os
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import fusedseg
from fusedseg.integrations import inplace_abn, nnunet
from tests.conversion import networks
from tests.integrations.real import framework

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


def converted(rank, world, leaky):
    """``convert``, and then ``convert_sync``."""
    torch.manual_seed(0)
    net = networks.UNet(nn.LeakyReLU if leaky else nn.ReLU).double()
    fusedseg.convert(net)
    if world > 1:
        fusedseg.convert_sync(net)
    return trained(net, rank, world)


class Network(nn.Sequential):
    """It has a forward of its own, because ``compile`` has no effect on that of PyTorch."""

    def forward(self, x):
        for layer in self:
            x = layer(x)
        return x


def block(norm):
    return nn.Sequential(nn.Conv2d(1, 8, 3), norm, nn.LeakyReLU(0.01, inplace=True))


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

    def _build_loss(self):
        return nn.L1Loss()

    def print_to_log_file(self, *args, **options):
        self.log += map(str, args)

    def save_checkpoint(self, filename):
        torch.save({"trainer_name": type(self).__name__, "network_weights": self.network.state_dict()}, filename)


class FusedStandIn(nnunet.Fused, StandIn):
    pass


class WithPlans:
    def __init__(self, plans, configuration, fold, dataset_json, device):
        self.plans = plans


class LeakyStandIn(nnunet.Leaky, WithPlans):
    pass


class OfThree(FusedStandIn):
    num_input_channels = 3

    @staticmethod
    def build_network_architecture(norm):
        made = StandIn.build_network_architecture(norm)
        return nn.Sequential(nn.Conv2d(3, 8, 3, padding=2), *list(made)[1:])


def nnunet_trainer(rank, world):
    torch.manual_seed(0)
    trainer = OfThree(nn.BatchNorm2d(8))
    trainer.is_ddp = world > 1
    trainer.initialize()
    return trained(nn.Sequential(trainer.network.double(), nn.AdaptiveAvgPool2d(16)), rank, world)


# The programs below need a framework.


def environment(rank, world):
    """The variables that ``torchrun`` sets; the process group exists already."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0",
    }  # fmt: skip


def lightning(rank, world):
    """A converted network whose norms are synchronised before the trainer is made."""
    pl = framework("lightning.pytorch")
    if world > 1:
        environment(rank, world)

    class Lit(pl.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net, self.losses = fusedseg.convert(networks.UNet(nn.LeakyReLU).double()), []
            if world > 1:
                fusedseg.convert_sync(self.net)

        def training_step(self, data, index):
            loss = F.cross_entropy(self.net(data[0][0]), data[1][0])
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)

    x, y = mine(rank, world)
    loader = torch.utils.data.DataLoader([(x, y)] * STEPS, batch_size=1)
    options = {"strategy": "ddp", "devices": world, "use_distributed_sampler": False} if world > 1 else {"devices": 1}
    model = Lit()
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, precision="64-true", **options,
    )  # fmt: skip
    trainer.fit(model, loader)
    # What the trainer of two processes has set up ends with the test's own group.
    return model.losses, end(model.net)


def hugging_face(rank, world, folder):
    """``convert_sync`` before the trainer is made; the decode head of SegFormer has a BatchNorm."""
    transformers = framework("transformers")
    if world > 1:
        environment(rank, world)
    torch.manual_seed(0)
    model = transformers.SegformerForSemanticSegmentation(
        transformers.SegformerConfig(
            depths=[1, 1, 1, 1], hidden_sizes=[8, 16, 24, 32], num_attention_heads=[1, 1, 2, 2],
            decoder_hidden_size=16, num_labels=3, drop_path_rate=0.0, classifier_dropout_prob=0.0,
        )
    ).double()  # fmt: skip
    if world > 1:
        fusedseg.convert_sync(model)
    start = copy.deepcopy(model)
    x = torch.randn(4, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x = x + torch.arange(4.0).view(-1, 1, 1, 1)
    data = [{"pixel_values": image, "labels": (image[0] > 0).long()} for image in x]
    args = transformers.TrainingArguments(
        folder, max_steps=STEPS, per_device_train_batch_size=4 // world, learning_rate=0.05, logging_steps=1,
        report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True, lr_scheduler_type="constant", optim="sgd",
        # Otherwise the trainer multiplies the loss by the number of processes.
        average_tokens_across_devices=False,
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=args, train_dataset=data)
    trainer.train()
    assert not all(torch.equal(p, q) for p, q in zip(model.parameters(), start.parameters(), strict=True))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, end(model)
