"""The integration of MONAI with small stand-ins for the framework; ``test_monai_real.py`` uses the real one."""

import importlib
import sys
import types

import pytest
import torch
from torch import nn

import fusedseg


class MetaTensor(torch.Tensor):
    """A tensor with metadata, whose new_empty wants a tuple, as MONAI's."""

    def as_tensor(self):
        return self.as_subclass(torch.Tensor)

    def copy_meta_from(self, other, copy_attr=True):
        self.meta = dict(other.meta)

    def new_empty(self, size, dtype=None, device=None, requires_grad=False):
        if not isinstance(size, tuple):
            raise TypeError("new_empty(): argument 'size' must be tuple of ints, not int")
        return self.as_tensor().new_empty(size, dtype=dtype, device=device).as_subclass(MetaTensor)


def with_meta(x):
    x = x.clone().as_subclass(MetaTensor)
    x.meta, x.is_batch = {"name": "a.nii"}, True
    return x


class Factory:
    def __init__(self):
        self.components = {}

    def add_factory_class(self, name, cls):
        assert name.upper() not in self.components
        self.components[name.upper()] = lambda dims=None: cls


def module(**names):
    made = types.ModuleType("a stand-in")
    vars(made).update(names)
    return made


@pytest.fixture
def monai(monkeypatch):
    stand_ins = {
        **{f"monai{name}": module() for name in ("", ".data", ".networks", ".networks.layers", ".networks.nets")},
        "monai.data.meta_tensor": module(MetaTensor=MetaTensor),
        "monai.inferers": module(Inferer=object),
        "monai.networks.layers.factories": module(Norm=Factory()),
        "monai.networks.nets.basic_unet": module(UpCat=UpCat),
    }
    # Another test may have imported parts of the real framework, which a stand-in does not hide.
    for imported in [name for name in sys.modules if name.partition(".")[0] == "monai"]:
        monkeypatch.delitem(sys.modules, imported)
    for name, stand_in in stand_ins.items():
        monkeypatch.setitem(sys.modules, name, stand_in)
    # Both entries are restored after the test, so that no later test finds an integration with stand-ins.
    monkeypatch.setitem(sys.modules, "fusedseg.integrations.monai", None)
    monkeypatch.delitem(sys.modules, "fusedseg.integrations.monai")
    return importlib.import_module("fusedseg.integrations.monai")


class UpCat(nn.Module):
    """A block that asks as MONAI's."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x, skip=None):
        if skip is not None and torch.jit.isinstance(skip, torch.Tensor):
            x = torch.cat([x, skip], 1)[:, :3]
        return self.conv(x)


@pytest.mark.usefixtures("compiled_afresh")
def test_blocks_of_monai_are_one_graph(monai, monkeypatch):
    """The compiler ended a graph at ``torch.jit.isinstance``."""
    monkeypatch.setattr(UpCat, "forward", UpCat.forward)
    monai.in_one_graph()
    forward = UpCat.forward
    monai.in_one_graph()
    assert UpCat.forward is forward
    block, x, skip = UpCat(), torch.randn(1, 2, 4, 4), torch.randn(1, 2, 4, 4)
    compiled = torch.compile(block, backend="fusedseg", options={"codegen": "aten"}, fullgraph=True)
    assert torch.equal(compiled(x, skip), block(x, skip))
    assert torch.equal(compiled(torch.cat([x, x], 1)[:, :3]), block(torch.cat([x, x], 1)[:, :3]))


def test_factories_of_monai(monai):
    monai.register()
    monai.register()
    made = monai.Norm.components
    assert set(made) == {"FUSED_BATCH", "FUSED_INSTANCE", "FUSED_GROUP"}
    assert type(made["FUSED_BATCH"](2)(num_features=4)) is fusedseg.BatchNormAct
    norm = made["FUSED_INSTANCE"](3)(num_features=4, affine=True, activation="elu", activation_param=0.5)
    assert type(norm) is fusedseg.InstanceNormAct
    assert (norm.affine, norm.activation) == (True, "elu")
    group = made["FUSED_GROUP"](3)(num_groups=2, num_channels=4, inplace=True)
    assert type(group) is fusedseg.InPlaceGroupNormAct
    with pytest.raises(ValueError, match="fused_batch: activation must have an inverse if inplace is True, got relu"):
        made["FUSED_BATCH"](2)(4, inplace=True, activation="relu")
    with pytest.raises(TypeError, match="fused_batch: inplace must be True or False, got 1"):
        made["FUSED_BATCH"](2)(4, inplace=1)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name", ["FUSED_BATCH", "FUSED_INSTANCE", "FUSED_GROUP"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_keep_metadata(name, dtype, inplace, monai):
    """The norms did not run on MONAI's tensors in float64, and lost their metadata."""
    monai.register()
    groups = {"num_groups": 2, "num_channels": 4} if name == "FUSED_GROUP" else {"num_features": 4}
    norm = monai.Norm.components[name](2)(**groups, inplace=inplace).to(dtype)
    x = torch.randn(2, 4, 5, 5, dtype=dtype)
    expected = norm(x.clone())
    out = norm(with_meta(x))
    assert type(out) is MetaTensor
    assert out.meta == {"name": "a.nii"}
    assert torch.equal(out.as_tensor(), expected)


def test_labels_of_windows(monai):
    torch.manual_seed(0)
    net = nn.Conv2d(1, 3, 3, padding=1)
    x = torch.randn(2, 1, 20, 14)
    inferer = monai.SlidingWindowLabels((8, 8), 2, 0.5, "gaussian", sigma_scale=0.2)
    expected = fusedseg.sliding_window_labels(net, x, 8, 0.5, sw_batch_size=2, mode="gaussian", sigma_scale=0.2)
    assert torch.equal(inferer(x, net), expected[:, None])
    labels = inferer(with_meta(x), lambda y, *, scale: net(y) * scale, scale=2.0)
    assert type(labels) is MetaTensor
    assert labels.meta == {"name": "a.nii"}
    assert torch.equal(labels.as_tensor(), expected[:, None])
    regions = monai.SlidingWindowLabels(8, overlap=0.5, regions=True)(x, net)
    assert (regions.shape, regions.dtype) == ((2, 3, 20, 14), torch.bool)
    with pytest.raises(TypeError, match=r"monai\.SlidingWindowLabels: got an unexpected keyword .*'buffer_steps'"):
        monai.SlidingWindowLabels(8, buffer_steps=2)
