"""Code that looks for norms by their class finds the norms of a converted model."""

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


@pytest.fixture(params=[nn.ReLU, nn.LeakyReLU], ids=["keeps its input", "keeps its output"])
def models(request):
    """A stock model and a converted copy of it."""
    torch.manual_seed(0)
    stock = networks.UNet(request.param).double()
    ours = copy.deepcopy(stock)
    assert sum("BatchNorm2d" in row.what for row in fusedseg.convert(ours).replaced) == 6
    return stock, ours


def test_update_bn(models):
    batches = [3 + torch.randn(4, 3, 16, 16, dtype=torch.float64) for _ in range(3)]
    for model in models:
        update_bn(batches, model)
    for (name, buffer), expected in zip(models[1].named_buffers(), models[0].buffers(), strict=True):
        assert torch.allclose(buffer, expected, rtol=1e-9), name
    assert models[1].inc[0][1].running_mean.abs().min() > 0
    assert models[1].inc[0][1].num_batches_tracked == 3
    assert models[1].inc[0][1].momentum == 0.1


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


def test_left_out_of_weight_decay(models):
    """The loop of torchvision's ``set_weight_decay``, over the parameters that each module holds itself."""
    classes = nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm, nn.modules.instancenorm._InstanceNorm

    def found(model):
        norms = [(at, module) for at, module in model.named_modules() if isinstance(module, classes)]
        return [f"{at}.{name}" for at, module in norms for name, _ in module.named_parameters(recurse=False)]

    assert found(models[0]) == found(models[1])
    assert len(found(models[0])) == 12


@pytest.mark.parametrize("frozen", [False, True], ids=["eval mode", "frozen"])
def test_norms_that_a_program_finds_by_their_class(models, frozen):
    """The ``train`` of mmseg's backbones: norms stay in eval mode while the rest trains; others freeze them."""
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    update_bn([3 + x], models[0])
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        model.train()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d if frozen else _BatchNorm):
                module.eval()
                module.requires_grad_(not frozen)
    before = {name: buffer.clone() for name, buffer in models[1].named_buffers()}
    for model in models:
        model(x).square().sum().backward()
    for (name, p), expected in zip(models[1].named_parameters(), models[0].parameters(), strict=True):
        assert (p.grad is None) == (expected.grad is None), name
        assert p.grad is None or torch.allclose(p.grad, expected.grad, rtol=1e-9), name
    assert all(torch.equal(buffer, before[name]) for name, buffer in models[1].named_buffers())


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
    (row,) = fusedseg.convert(ours).replaced
    assert isinstance(ours[1], type(stock[1]))
    # The report and the printed model name the public class.
    assert hasattr(fusedseg, row.to.split("(")[0])
    assert hasattr(fusedseg, repr(ours[1]).split("(")[0]) or repr(ours[1]).startswith("NormOfConv(")
    x = torch.randn(2, 3, *[6] * dims, dtype=torch.float64)
    assert_same(copy.deepcopy(ours), copy.deepcopy(stock), x)
    assert_same(pickle.loads(pickle.dumps(ours)), copy.deepcopy(stock), x, training=False)


# PyTorch warns that there is only one process.
@pytest.mark.filterwarnings("ignore")
def test_stock_synchronisation_would_drop_activations(models):
    """PyTorch replaces every ``_BatchNorm`` by an ``nn.SyncBatchNorm``, which has no activation."""
    with pytest.raises(RuntimeError, match=r"without its activation; call fusedseg\.convert_sync\(model\) instead"):
        nn.SyncBatchNorm.convert_sync_batchnorm(models[1])
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
