"""The names of the package ``inplace_abn``: modules, functions, checkpoints, and who imports them."""

import copy
import pickle
import sys
import types
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fusedseg
from fusedseg.integrations import inplace_abn as plugin
from fusedseg.memory import SavedBytes
from tests.conversion.compare import assert_same

# (activation, its parameter, the stock module, whether a module in place keeps the output)
ACTIVATIONS = {
    "leaky": ("leaky_relu", 0.1, lambda: nn.LeakyReLU(0.1), True),
    "elu": ("elu", 0.5, lambda: nn.ELU(0.5), True),
    "identity": ("identity", 0.01, nn.Identity, True),
    # segmentation_models_pytorch asks for this one, and the package trains it with wrong gradients.
    "slope 0": ("leaky_relu", 0.0, nn.ReLU, False),
    "relu": ("relu", 0.01, nn.ReLU, False),
    "negative slope": ("leaky_relu", -0.5, lambda: nn.LeakyReLU(-0.5), False),
}


@pytest.fixture
def uninstalled(monkeypatch):
    """No module of the name ``inplace_abn``, and no library that has looked for it."""
    for name in (*plugin.NAMES, *plugin.READERS):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, name)


def pair(cls, name):
    """A network with the plug-in's norm, and its stock twin."""
    activation, param, stock_act, _ = ACTIVATIONS[name]
    norm = cls(6, activation=activation, activation_param=param)
    stock = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), stock_act(), nn.Conv2d(6, 2, 1)).double()
    ours = nn.Sequential(nn.Conv2d(3, 6, 3), norm, nn.Identity(), nn.Conv2d(6, 2, 1)).double()
    with torch.no_grad():
        stock[1].weight.copy_(torch.tensor([1.0, -1.0, 0.5, -0.05, 0.0, 2.0]))
        stock[1].bias.normal_()
    assert list(ours.state_dict()) == list(stock.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours.load_state_dict(stock.state_dict())
    return ours, stock


@pytest.mark.parametrize("cls", [plugin.ABN, plugin.InPlaceABN], ids=["ABN", "InPlaceABN"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_module_is_batchnorm_and_activation(name, cls):
    ours, stock = pair(cls, name)
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    for training in (True, False):
        assert_same(ours, stock, x, training=training)
    assert_same(pickle.loads(pickle.dumps(ours)), copy.deepcopy(stock), x)
    assert isinstance(ours[1], plugin.ABN)
    in_place = ACTIVATIONS[name][3] and cls is plugin.InPlaceABN
    assert (ours[1].KEEP == "output") == in_place
    assert (ours[1].activation, ours[1].activation_param) == ACTIVATIONS[name][:2]


def test_a_module_in_place_keeps_one_tensor():
    kept = {}
    for cls in (plugin.ABN, plugin.InPlaceABN):
        net = nn.Sequential(nn.Conv2d(3, 16, 3), cls(16), nn.Conv2d(16, 2, 1))
        x = torch.randn(2, 3, 34, 34)
        with SavedBytes(owned=[x, *net.parameters(), *net.buffers()]) as saved:
            _out = net(x)
        kept[cls] = saved.nbytes
    tensor = 2 * 16 * 32 * 32 * 4
    # A small vector for each of the statistics comes on top.
    assert tensor <= kept[plugin.InPlaceABN] < 1.01 * tensor
    assert 2 * tensor <= kept[plugin.ABN] < 2.01 * tensor


def test_arguments_of_the_package():
    made = plugin.InPlaceABN(4, 1e-3, 0.2, False, False, "elu", 0.3)
    assert (made.eps, made.momentum, made.affine, made.track_running_stats) == (1e-3, 0.2, False, False)
    assert (made.activation, made.activation_param) == ("elu", 0.3)
    group = object()
    assert plugin.InPlaceABNSync(4, group=group).process_group is group
    with pytest.raises(ValueError, match=r"activation must be one of .*, got 'swish'"):
        plugin.InPlaceABN(4, activation="swish")
    # The module was made, and its first forward raised an error about an argument that it does not have.
    with pytest.raises(ValueError, match=r"no learned slope, got 'prelu'; use fusedseg.BatchNormAct"):
        plugin.InPlaceABN(4, activation="prelu")


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_functions(name):
    activation, param, act, in_place = ACTIVATIONS[name]
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    weight, bias = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    for training in (True, False):
        mean, var = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
        leaf = x.clone().requires_grad_()
        y = leaf * 1
        out = plugin.inplace_abn(y, weight, bias, mean, var, training, 0.1, 1e-5, activation, param)
        assert (out.data_ptr() == y.data_ptr()) == in_place
        other = x.clone().requires_grad_()
        means = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
        expected = act()(F.batch_norm(other, *means, weight, bias, training))
        found = [torch.autograd.grad(z.square().sum(), (v, weight, bias)) for z, v in ((out, leaf), (expected, other))]
        for ours, stock in zip(*found, strict=True):
            # float64, sums of 50 values
            assert torch.allclose(ours, stock, rtol=1e-9, atol=1e-11)
        assert torch.allclose(mean, means[0])
        assert torch.allclose(var, means[1])


def test_sync_function_in_one_process():
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    vectors = [torch.ones(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)]
    with warnings.catch_warnings():
        # A warning, once in a process, says that there is one process.
        warnings.simplefilter("ignore")
        out = plugin.inplace_abn_sync(x.clone(), *vectors, None, None)
    assert torch.equal(out, plugin.inplace_abn(x.clone(), *vectors, None, None))


def test_convert_sync_keeps_the_names_of_the_package():
    net = nn.Sequential(plugin.InPlaceABN(3), plugin.InPlaceABN(3, activation_param=0.0), plugin.ABN(3))
    fusedseg.convert_sync(net)
    assert [type(module) for module in net] == [plugin.InPlaceABNSync] * 3
    assert [module.KEEP for module in net] == ["output", "input", "input"]
    with pytest.raises(RuntimeError, match=r"fusedseg\.InPlaceABNSync: .* call fusedseg\.convert_sync"):
        nn.SyncBatchNorm.convert_sync_batchnorm(net)


def test_checkpoint_of_the_package():
    """The package scales by |weight| + eps."""
    net = nn.Sequential(plugin.InPlaceABN(3), plugin.ABN(3), plugin.InPlaceABN(3, affine=False))
    state = {name: value.clone() for name, value in net.state_dict().items()}
    state["0.weight"], state["1.weight"] = torch.tensor([1.0, -0.5, 0.0]), torch.tensor([1.0, -0.5, 0.0])
    loaded = plugin.equal_weights(state, net)
    assert torch.equal(loaded["0.weight"], torch.tensor([1.0, 0.5, 0.0]) + 1e-5)
    # The ABN of the package scales by its weight.
    assert torch.equal(loaded["1.weight"], state["1.weight"])
    assert torch.equal(state["0.weight"], torch.tensor([1.0, -0.5, 0.0]))
    stock = nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3), nn.BatchNorm2d(3, affine=False))
    assert torch.equal(plugin.equal_weights(state, stock, nn.BatchNorm2d)["1.weight"], loaded["0.weight"])
    with pytest.raises(ValueError, match="model must have a module of the classes"):
        plugin.equal_weights(state, stock)
    with pytest.raises(ValueError, match=r"must have the key '0\.weight'"):
        plugin.equal_weights({}, net)


def test_equal_weights_of_a_shared_module():
    """The weight under its second name stayed as it was, and was loaded last."""
    norm = plugin.InPlaceABN(2)
    net = nn.Sequential(norm, norm)
    state = {name: -value if name.endswith("weight") else value for name, value in net.state_dict().items()}
    net.load_state_dict(plugin.equal_weights(state, net))
    assert torch.equal(norm.weight.detach(), torch.ones(2) + norm.eps)


def test_negative_weights_of_others_are_noticed_once():
    plugin._warn_of_negative_weights.cache_clear()
    ours, theirs = plugin.InPlaceABN(2), nn.BatchNorm2d(2)
    for norm in (ours, theirs):
        norm.weight.data[0] = -1.0
    # Its own checkpoints may have negative weights.
    plugin.InPlaceABN(2).load_state_dict(ours.state_dict())
    with pytest.warns(UserWarning, match=r"load fusedseg\.integrations\.inplace_abn\.equal_weights"):
        plugin.InPlaceABN(2).load_state_dict(theirs.state_dict())
    plugin.InPlaceABN(2).load_state_dict(theirs.state_dict())
    # The checkpoint loads into stock modules.
    nn.BatchNorm2d(2).load_state_dict(ours.state_dict())


def test_install(uninstalled):
    assert plugin.install() is plugin.install() is plugin
    import inplace_abn
    from inplace_abn.functions import inplace_abn_sync

    assert inplace_abn.InPlaceABN is plugin.InPlaceABN
    assert inplace_abn_sync is plugin.inplace_abn_sync
    for name in plugin.NAMES:
        del sys.modules[name]


def test_install_refuses_to_come_too_late(uninstalled, monkeypatch):
    monkeypatch.setitem(sys.modules, "inplace_abn", types.ModuleType("inplace_abn"))
    with pytest.raises(RuntimeError, match="the package inplace_abn is imported already"):
        plugin.install()
    monkeypatch.delitem(sys.modules, "inplace_abn")
    reader = types.ModuleType("segmentation_models_pytorch.base.modules")
    reader.InPlaceABN = None
    monkeypatch.setitem(sys.modules, reader.__name__, reader)
    with pytest.raises(RuntimeError, match="is imported already and has not found inplace_abn"):
        plugin.install()
    assert "inplace_abn" not in sys.modules
