"""segmentation_models_pytorch and timm import ``inplace_abn``, and get our norms.

Each program runs in a process of its own, since the libraries look for the package when they are imported.
"""

import json
import sys

import pytest
import torch

from tests.integrations.real import LIBRARY, framework, last_line, told, without_fusedseg

pytestmark = [pytest.mark.slow]

HEAD = """
import sys, json, copy, warnings
warnings.simplefilter("ignore")
sys.path[:] = PATHS
LIBRARY
import torch
from torch import nn
from torch.nn import functional as F
import fusedseg
from tests.integrations.real import bytes_of, difference, gradients
import fusedseg.integrations.inplace_abn
fusedseg.integrations.inplace_abn.install()
torch.manual_seed(0)

def fit(model, x, y, of=lambda out: out):
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = F.cross_entropy(of(model(x)), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses

def told(ours, stock, x, y, path, **more):
    def loss(model):
        return F.cross_entropy(model(x.double()), y)
    start = copy.deepcopy(ours.state_dict())
    # timm's InplaceAbn counts no batches.
    missing, unexpected = stock.load_state_dict(start, strict=False)
    assert not unexpected and all(name.endswith("num_batches_tracked") for name in missing)
    found = {"difference": difference(gradients(ours, loss)[1], gradients(stock, loss)[1])}
    found["ours"], found["stock"] = vars(bytes_of(ours, x)), vars(bytes_of(stock, x))
    found["losses"] = fit(ours, x, y), fit(stock, x, y)
    torch.save(ours.state_dict(), path)
    found["out"] = ours.eval()(torch.ones_like(x)).double().sum().item()
    print(json.dumps(found | more))
"""

SMP = """
import segmentation_models_pytorch as smp
def net(norm):
    return smp.Unet("resnet18", encoder_weights=None, decoder_channels=(32, 16, 16, 8, 8), classes=3,
                    decoder_use_norm=norm)

def leaky(model):
    for module in model.decoder.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ReLU):
                setattr(module, name, nn.LeakyReLU(0.01))
    return model
"""
SMP_RUN = """
from inplace_abn import InPlaceABN
ours, stock = net("inplace"), net("batchnorm")
norms = [m for m in ours.modules() if isinstance(m, InPlaceABN)]
assert all(m.KEEP == "input" for m in norms)
told(ours, stock, torch.randn(2, 3, 192, 192), torch.randint(3, (2, 192, 192)), sys.argv[1], norms=len(norms))
"""
SMP_LEAKY = """
slope = {"type": "inplace", "activation": "leaky_relu", "activation_param": 0.01}
ours, stock = net(slope), leaky(net("batchnorm"))
told(ours, stock, torch.randn(2, 3, 192, 192), torch.randint(3, (2, 192, 192)), sys.argv[1])
"""

# TResNet, whose norms were InplaceAbn when it was published, and are BatchNormAct2d in timm today.
TIMM = """
from timm.models.tresnet import TResNet
def net():
    return TResNet([1, 1, 1, 1], width_factor=0.25, num_classes=3)
"""
TIMM_RUN = """
from timm.layers import BatchNormAct2d
from timm.layers.inplace_abn import InplaceAbn, has_iabn
assert has_iabn
ours, stock = net(), net()
for module in list(ours.modules()):
    for name, norm in list(module.named_children()):
        if isinstance(norm, BatchNormAct2d):
            act = getattr(norm.act, "negative_slope", None)
            new = InplaceAbn(norm.num_features, apply_act=act is not None, act_param=act or 0.0)
            setattr(module, name, new)
norms = sum(isinstance(m, InplaceAbn) for m in ours.modules())
assert norms > 10
told(ours, stock, torch.randn(2, 3, 64, 64), torch.randint(3, (2,)), sys.argv[1], norms=norms)
"""

PROGRAMS = {
    "smp": (SMP, SMP_RUN, 'net("batchnorm")'),
    "smp, slope 0.01": (SMP, SMP_LEAKY, 'leaky(net("batchnorm"))'),
    "timm": (TIMM, TIMM_RUN, "net()"),
}
FRAMEWORKS = {"smp": "segmentation_models_pytorch", "timm": "timm"}


def run(code, *arguments):
    head = HEAD.replace("PATHS", repr(sys.path)).replace("LIBRARY", "" if torch.version.cuda else LIBRARY)
    return json.loads(last_line(head + code, *arguments))


@pytest.mark.parametrize("name", PROGRAMS)
def test_training(name, tmp_path):
    framework(FRAMEWORKS[name.split(",")[0]])
    network, program, stock = PROGRAMS[name]
    found = run(network + program, tmp_path / "ours.pt")
    from fusedseg.memory import Footprint

    told(name, **{which: Footprint(**found[which]) for which in ("stock", "ours")})
    print(f"\n{name}: largest difference of a gradient in float64 {found['difference']:.1g}")
    assert found["difference"] < 1e-9
    assert found["ours"]["saved"] < found["stock"]["saved"]
    # fp32 and four steps
    assert found["losses"][0] == pytest.approx(found["losses"][1], rel=1e-3)
    shape = "2, 3, 192, 192" if name.startswith("smp") else "2, 3, 64, 64"
    code = "import torch\nfrom torch import nn\nfrom torch.nn import functional as F\n" + network
    code += f"\nmodel = {stock}\nmodel.load_state_dict(torch.load(sys.argv[1]), strict={name != 'timm'})\n"
    code += f"print(model.eval()(torch.ones({shape})).double().sum().item())"
    assert float(without_fusedseg(code, tmp_path / "ours.pt")) == pytest.approx(found["out"], rel=1e-4)
