"""Code that looks for norms by their class finds the norms of a converted model, and of one that is built of ours."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import update_bn

import fusedseg
from tests.conversion import networks
from tests.conversion.compare import assert_same


def norms_of(model: nn.Module, cls: type) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, cls)]


def built() -> tuple[nn.Module, nn.Module]:
    """A stock network, and one of this package's norms."""
    ours = nn.Sequential(
        fusedseg.ConvABN2d(3, 4, 3),
        nn.Conv2d(4, 4, 3), fusedseg.InPlaceABN(4),
        nn.Conv2d(4, 4, 3), fusedseg.BatchNormAct(4, activation="relu"),
        nn.Conv2d(4, 4, 3), fusedseg.InPlaceInstanceNormAct(4, affine=True),
        nn.Conv2d(4, 4, 3), fusedseg.GroupNormAct(2, 4),
    ).double()  # fmt: skip
    leaky = nn.LeakyReLU(0.01)
    stock = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), leaky),
        nn.Conv2d(4, 4, 3), nn.Sequential(nn.BatchNorm2d(4), leaky),
        nn.Conv2d(4, 4, 3), nn.Sequential(nn.BatchNorm2d(4), nn.ReLU()),
        nn.Conv2d(4, 4, 3), nn.Sequential(nn.InstanceNorm2d(4, affine=True), leaky),
        nn.Conv2d(4, 4, 3), nn.Sequential(nn.GroupNorm(2, 4), leaky),
    ).double()  # fmt: skip
    for mine, theirs in zip(ours.parameters(), stock.parameters(), strict=True):
        theirs.data.copy_(mine.data)
    return stock, ours


def test_built_norms_are_not_of_the_class_of_one_dimension():
    """Code that exchanges every ``nn.BatchNorm2d`` for another norm would drop their activations without an error."""
    norms = [m for m in built()[1].modules() if isinstance(m, _BatchNorm)]
    assert len(norms) == 3
    assert not any(isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)) for m in norms)


@pytest.fixture(params=["built", nn.ReLU, nn.LeakyReLU], ids=["built", "keeps its input", "keeps its output"])
def pairs(request):
    """A stock model, and one of fused norms."""
    return built() if request.param == "built" else converted_unet(request.param)


@pytest.fixture(params=[nn.ReLU, nn.LeakyReLU], ids=["keeps its input", "keeps its output"])
def models(request):
    return converted_unet(request.param)


def converted_unet(act: type[nn.Module]) -> tuple[nn.Module, nn.Module]:
    """A stock model and a converted copy of it."""
    torch.manual_seed(0)
    stock = networks.UNet(act).double()
    ours = copy.deepcopy(stock)
    report = fusedseg.convert(ours, example_inputs=torch.randn(2, 3, 16, 16, dtype=torch.float64))
    assert sum("BatchNorm2d" in row.what for row in report.replaced) == 6
    return stock, ours


def test_update_bn(pairs):
    batches = [3 + torch.randn(4, 3, 16, 16, dtype=torch.float64) for _ in range(3)]
    for model in pairs:
        update_bn(batches, model)
    for mine, theirs in zip(pairs[1].buffers(), pairs[0].buffers(), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-9)
    norm = next(m for m in pairs[1].modules() if isinstance(m, _BatchNorm))
    assert (norm.num_batches_tracked, norm.momentum) == (3, 0.1)


def test_found_where_stock_norms_are(models):
    for cls in (nn.BatchNorm2d, _BatchNorm):
        assert norms_of(models[1], cls) == norms_of(models[0], cls) != []
    for name in norms_of(models[1], nn.BatchNorm2d):
        module = models[1].get_submodule(name)
        assert isinstance(module, (fusedseg.BatchNormAct, fusedseg.InPlaceABN))
        assert not isinstance(module, (nn.BatchNorm1d, nn.BatchNorm3d))
    copied = pickle.loads(pickle.dumps(models[1]))
    assert [type(m) for m in copied.modules()] == [type(m) for m in models[1].modules()]
    assert list(copied.state_dict()) == list(models[0].state_dict())


def test_left_out_of_weight_decay(pairs):
    """The loop of torchvision's ``set_weight_decay``, over the parameters that each module holds itself."""
    classes = nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm, nn.modules.instancenorm._InstanceNorm

    def decayed(model):
        norms = {id(p) for m in model.modules() if isinstance(m, classes) for p in m.parameters(recurse=False)}
        return [id(p) not in norms for p in model.parameters()]

    assert decayed(pairs[0]) == decayed(pairs[1])
    assert not all(decayed(pairs[1]))


@pytest.mark.parametrize("frozen", [False, True], ids=["eval mode", "frozen"])
def test_norms_that_a_program_finds_by_their_class(pairs, frozen):
    """The ``train`` of mmseg's backbones: norms stay in eval mode while the rest trains; others freeze them."""
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    for model in pairs:
        update_bn([3 + x], model)
        model.train()
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.eval()
                module.requires_grad_(not frozen)
    before = {name: buffer.clone() for name, buffer in pairs[1].named_buffers()}
    for model in pairs:
        model(x).square().sum().backward()
    for (name, p), expected in zip(pairs[1].named_parameters(), pairs[0].parameters(), strict=True):
        assert (p.grad is None) == (expected.grad is None), name
        assert p.grad is None or torch.allclose(p.grad, expected.grad, rtol=1e-8, atol=1e-9), name
    assert all(torch.equal(buffer, before[name]) for name, buffer in pairs[1].named_buffers())


@pytest.mark.parametrize("act", [nn.ReLU, nn.LeakyReLU])
@pytest.mark.parametrize(
    ("dims", "norm"),
    [(1, nn.BatchNorm1d), (2, nn.BatchNorm2d), (3, nn.BatchNorm3d), (1, nn.InstanceNorm1d), (2, nn.InstanceNorm2d),
     (3, nn.InstanceNorm3d), (2, lambda c: nn.GroupNorm(2, c))],
    ids=["bn1", "bn2", "bn3", "in1", "in2", "in3", "gn"],
)  # fmt: skip
def test_every_norm_stays_of_its_class(dims, norm, act):
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    stock = nn.Sequential(conv(3, 4, 3), norm(4), act()).double()
    ours = copy.deepcopy(stock)
    x = torch.randn(2, 3, *[6] * dims, dtype=torch.float64)
    (row,) = fusedseg.convert(ours, example_inputs=x).replaced
    assert isinstance(ours[1], type(stock[1]))
    # The report and the printed model name the public class.
    assert hasattr(fusedseg, row.to.split("(")[0])
    assert hasattr(fusedseg, repr(ours[1]).split("(")[0]) or repr(ours[1]).startswith("NormOfConv(")
    assert_same(copy.deepcopy(ours), copy.deepcopy(stock), x)
    assert_same(pickle.loads(pickle.dumps(ours)), copy.deepcopy(stock), x, training=False)


def convert_sync_batchnorm(module: nn.Module) -> nn.Module:
    """What timm's function of this name does, which is a copy of PyTorch's."""
    out = module
    if isinstance(module, _BatchNorm):
        out = nn.SyncBatchNorm(module.num_features)
        if hasattr(module, "qconfig"):
            out.qconfig = module.qconfig
    for name, child in module.named_children():
        out.add_module(name, convert_sync_batchnorm(child))
    return out


@pytest.mark.parametrize("convert", [nn.SyncBatchNorm.convert_sync_batchnorm, convert_sync_batchnorm])
def test_stock_synchronisation_would_drop_activations(pairs, convert):
    """Both replace every ``_BatchNorm`` by an ``nn.SyncBatchNorm``, which has no activation."""
    with pytest.raises(RuntimeError, match=r"without its activation; call fusedseg\.convert_sync\(model\) instead"):
        convert(pairs[1])


# PyTorch warns that there is only one process.
@pytest.mark.filterwarnings("ignore")
def test_synchronised(models):
    fusedseg.convert_sync(models[1])
    found = [type(models[1].get_submodule(name)) for name in norms_of(models[0], nn.BatchNorm2d)]
    assert set(found) in ({fusedseg.BatchNormActSync}, {fusedseg.InPlaceABNSync})
    with pytest.raises(RuntimeError, match=r"fusedseg\.convert_sync"):
        nn.SyncBatchNorm.convert_sync_batchnorm(models[1])
    assert_same(models[1], models[0], torch.randn(2, 3, 16, 16, dtype=torch.float64))


def test_quantisation_asks_for_the_same_attribute(models):
    norm = models[1].inc[0][1]
    assert not hasattr(norm, "qconfig")
    assert getattr(norm, "qconfig", 3) == 3
    norm.qconfig = None
    assert norm.qconfig is None
    assert copy.deepcopy(norm).qconfig is None
    del norm.qconfig
    assert not hasattr(norm, "qconfig")
    with pytest.raises(AttributeError, match="no attribute 'qconfig'"):
        _ = norm.qconfig
