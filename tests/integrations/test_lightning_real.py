"""A program for Lightning with a stock, a converted and a compiled network; ``lightning`` must be installed."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fusedseg
import fusedseg.compiler
from fusedseg.memory import SavedBytes
from tests.integrations.real import bytes_of, difference, framework, gradients, told, without_fusedseg

pl = framework("lightning.pytorch")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


PROGRAM = """
import torch
from torch import nn
from torch.nn import functional as F
import lightning.pytorch as pl

def block(a, b):
    return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.LeakyReLU(0.1),
                         nn.Conv2d(b, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.pool, self.second = block(3, 8), nn.MaxPool2d(2), block(8, 16)
        self.up, self.last, self.head = nn.Upsample(scale_factor=2), block(24, 8), nn.Conv2d(8, 3, 1)

    def forward(self, x):
        a = self.first(x)
        return self.head(self.last(torch.cat([a, self.up(self.second(self.pool(a)))], 1)))

class Lit(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.losses, self.example_input_array = Net(), [], torch.zeros(2, 3, 32, 32)
    def training_step(self, batch, index):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)

class Late(Lit):
    def configure_model(self):
        if not hasattr(self.net, "first"):
            torch.manual_seed(0)
            self.net = Net()

def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, 3, 32, 32, generator=generator)
    return torch.utils.data.DataLoader(list(zip(x, (x[:, 0] > 0) * 1 + (x[:, 1] > 0) * 1)), batch_size=2)

def fit(model, *callbacks, **options):
    trainer = pl.Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False,
                         enable_model_summary=False, enable_checkpointing=False, callbacks=list(callbacks), **options)
    trainer.fit(model, data())
    return trainer
"""
exec(PROGRAM, names := {})


def test_training(tmp_path):
    """A converted network: losses, gradients, bytes, and a checkpoint that loads without fusedseg."""
    stock, ours = names["Lit"](), names["Lit"]()
    fusedseg.convert(ours.net)
    for module in (stock, ours):
        trainer = names["fit"](module, precision="64-true")
    assert len(ours.losses) == 8
    # float64, through 8 steps of AdamW, whose first steps divide a gradient by its own size
    assert ours.losses == pytest.approx(stock.losses, rel=1e-6)
    ours.float()
    x = torch.randn(2, 3, 32, 32)
    both = [bytes_of(net.net, x) for net in (stock, ours)]
    told("Lightning", stock=both[0], ours=both[1])
    assert both[1].saved < both[0].saved
    fresh = names["Lit"]()
    fresh.load_state_dict(stock.state_dict())
    converted = fusedseg.convert(copy.deepcopy(fresh))
    y = torch.randint(3, (2, 32, 32))
    found = [gradients(m.net, lambda net: F.cross_entropy(net(x.double()), y)) for m in (converted, fresh)]
    worst = difference(found[0][1], found[1][1])
    print(f"\nLightning: largest difference of a gradient in float64 {worst:.1g}")
    assert worst < 1e-9

    trainer.save_checkpoint(tmp_path / "ours.ckpt")
    code = PROGRAM + "\nmodel = Lit.load_from_checkpoint(sys.argv[1], map_location='cpu', weights_only=False).eval()\n"
    code += "print(model.net(torch.ones(1, 3, 32, 32)).double().sum().item())"
    expected = ours.eval().net(torch.ones(1, 3, 32, 32)).double().sum().item()
    assert float(without_fusedseg(code, tmp_path / "ours.ckpt")) == pytest.approx(expected, rel=1e-5)


def test_averaged_weights_and_frozen_norms():
    """Lightning's callbacks that look for norms by class find those of a converted network."""
    averaged = names["Lit"]()
    fusedseg.convert(averaged.net)
    names["fit"](averaged, pl.callbacks.StochasticWeightAveraging(1e-2, swa_epoch_start=1))
    pl.callbacks.BaseFinetuning.freeze(averaged.net, train_bn=False)
    assert not any(p.requires_grad for p in averaged.net.parameters())
    norms = [m for m in averaged.net.modules() if isinstance(m, nn.BatchNorm2d)]
    assert len(norms) == 6
    assert not any(norm.track_running_stats for norm in norms)
    with SavedBytes() as kept:
        averaged.net(torch.randn(2, 3, 32, 32, requires_grad=True)).sum().backward()
    assert kept.nbytes == 0


@pytest.mark.parametrize("late", [False, True], ids=["network", "configure_model"])
def test_compiled_network(late, tmp_path):
    """The lines of docs/lightning.md; checkpoints have the stock names, and the losses those of eager mode."""
    options = {"codegen": "aten"}

    class Compiled(names["Late"] if late else names["Lit"]):
        def configure_model(self):
            if late:
                super().configure_model()
            self.net.compile(backend="fusedseg", options=options)

    stock, ours, whole = names["Lit"](), Compiled(), names["Lit"]()
    if late:
        ours.net = nn.Identity()
    names["fit"](stock)
    trainer = names["fit"](ours)
    # In fp32, where gradients of norms may be sums in another order.
    assert ours.losses == pytest.approx(stock.losses, rel=1e-5)
    (graph,) = fusedseg.compiler.report(ours.net).graphs
    assert graph.ours.kept < 0.6 * graph.eager.kept
    trainer.save_checkpoint(tmp_path / "ours.ckpt")
    fresh = names["Lit"]()
    fresh.load_state_dict(torch.load(tmp_path / "ours.ckpt", weights_only=False)["state_dict"])
    # Lightning's own way compiles the whole step.
    whole.losses = Silent()
    names["fit"](torch.compile(whole, backend="fusedseg", options=options))
    for (name, p), q in zip(whole.net.named_parameters(), stock.net.parameters(), strict=True):
        # The gradient of a bias before a norm is noise, of which AdamW makes steps of the learning rate.
        if p.dim() > 1 or name == "head.bias":
            torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)


class Silent:
    """A list would be another one in each step, and each step be compiled anew."""

    def append(self, value):
        pass
