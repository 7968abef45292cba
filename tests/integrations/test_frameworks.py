"""The integrations with small stand-ins for the frameworks; the files ``test_*_real.py`` use the real ones."""

import importlib
import logging
import sys
import types

import pytest
import torch
from torch import nn

import fusedseg
from fusedseg.memory.meter import measure
from tests.conversion import networks

pytestmark = pytest.mark.usefixtures("uncounted")


def integration(monkeypatch, name, **modules):
    """Imports an integration anew, with these modules in place of the framework's; None stands for an absent one."""
    names = {key.replace("__", ".") for key in modules}
    # Another test may have imported parts of the real framework, which a stand-in does not hide.
    for imported in [key for key in sys.modules if key.partition(".")[0] in names]:
        monkeypatch.delitem(sys.modules, imported)
    for key, module in modules.items():
        monkeypatch.setitem(sys.modules, key.replace("__", "."), module)
    # Both entries are restored after the test, so that no later test finds an integration with stand-ins.
    monkeypatch.setitem(sys.modules, f"fusedseg.integrations.{name}", None)
    monkeypatch.delitem(sys.modules, f"fusedseg.integrations.{name}")
    return importlib.import_module(f"fusedseg.integrations.{name}")


@pytest.fixture
def uncounted(monkeypatch):
    monkeypatch.setattr(sys.modules["fusedseg.conversion.convert"], "_footprint", lambda model, inputs: None)


@pytest.mark.parametrize(
    ("name", "missing", "text"),
    [
        ("monai", {"monai": None}, "needs monai, which is not installed; run: pip install monai"),
        ("lightning", {"lightning": None, "pytorch_lightning": None}, "needs lightning or pytorch_lightning"),
        ("transformers", {"transformers": None}, "run: pip install transformers"),
    ],
)
def test_an_absent_framework(name, missing, text, monkeypatch):
    with pytest.raises(ImportError, match=rf"fusedseg\.integrations\.{name} .*{text}"):
        integration(monkeypatch, name, **missing)


class MetaTensor(torch.Tensor):
    """A tensor with metadata, whose new_empty wants a tuple, as MONAI's."""

    def as_tensor(self):
        return self.as_subclass(torch.Tensor)

    def copy_meta_from(self, other, copy_attr=True):
        self.meta = dict(other.meta)

    def new_empty(self, size, dtype=None, device=None, requires_grad=False):
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


@pytest.fixture
def monai(monkeypatch):
    factories, meta = types.ModuleType("factories"), types.ModuleType("meta_tensor")
    factories.Norm, meta.MetaTensor = Factory(), MetaTensor
    package, inferers = types.ModuleType("monai"), types.ModuleType("inferers")
    inferers.Inferer = object
    return integration(
        monkeypatch, "monai", monai=package, monai__networks=package, monai__networks__layers=package,
        monai__networks__layers__factories=factories, monai__data=package, monai__data__meta_tensor=meta,
        monai__inferers=inferers,
    )  # fmt: skip


def test_factories_of_monai(monai):
    monai.register()
    monai.register()
    made = monai._factories.Norm.components
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
    norm = monai._factories.Norm.components[name](2)(**groups, inplace=inplace).to(dtype)
    x = torch.randn(2, 4, 5, 5, dtype=dtype)
    expected = norm(x.clone())
    out = norm(with_meta(x))
    assert type(out) is MetaTensor
    assert out.meta == {"name": "a.nii"}
    assert torch.equal(out.as_tensor(), expected)


def test_converted_for_a_bundle(monai, caplog):
    """A converted model kept most of its bytes when MONAI's data loaders called it: nothing rebuilds a subclass."""
    stock = networks.UNet(nn.LeakyReLU)
    x = torch.randn(2, 3, 32, 32)
    with caplog.at_level(logging.INFO):
        ours = monai.converted(networks.UNet(nn.LeakyReLU), example_inputs=with_meta(x))
    assert "UNet is converted: " in caplog.text
    # A second call converts nothing, and adds no second hook.
    with caplog.at_level(logging.INFO):
        assert monai.converted(ours) is ours
    assert "UNet is converted already" in caplog.text
    assert (len(ours._forward_pre_hooks), len(ours._forward_hooks)) == (1, 1)
    ours.load_state_dict(stock.state_dict())
    kept = {kind: measure(ours, given).saved for kind, given in (("plain", x), ("meta", with_meta(x)))}
    assert kept["meta"] == kept["plain"] < 0.6 * measure(stock, x).saved
    out = ours(with_meta(x))
    assert type(out) is MetaTensor
    assert out.meta == {"name": "a.nii"}
    assert type(ours(x)) is torch.Tensor
    assert torch.allclose(out.as_tensor(), stock(x), atol=1e-5)


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


@pytest.fixture
def said():
    return []


@pytest.fixture
def lightning(monkeypatch, said):
    pl = types.ModuleType("pytorch_lightning")

    class LightningModule(nn.Module):
        example_input_array = torch.zeros(2, 3, 16, 16)
        device = torch.device("cpu")

        def configure_model(self):
            pass

    pl.LightningModule, pl.Callback = LightningModule, type("Callback", (), {})
    pl.utilities = types.SimpleNamespace(rank_zero_info=said.append)
    monkeypatch.setitem(sys.modules, "lightning", None)
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    return integration(monkeypatch, "lightning", pytorch_lightning=pl)


TRAINER = types.SimpleNamespace(is_global_zero=True, strategy=types.SimpleNamespace())


def lit(lightning, net=None):
    module = lightning._pl.LightningModule()
    module.net = networks.UNet() if net is None else net
    module.metric = nn.Identity()
    return module


def test_a_lightning_module_is_converted_once(lightning, said):
    module, callback = lit(lightning), lightning.Convert(example_inputs=torch.zeros(1, 3, 16, 16), inplace=False)
    for stage in ("validate", "fit", "fit"):
        callback.setup(TRAINER, module, stage)
    callback.on_fit_start(TRAINER, module)
    assert callback.report.model is module.net
    assert said[0] == f"fusedseg: UNet is converted: {len(callback.report.replaced)} modules are replaced"
    assert said[1] == "fusedseg: UNet is converted already, so it stays as it is"
    assert len(said) == 2


def test_a_network_of_configure_model_is_converted_later(lightning):
    class Late(lightning._pl.LightningModule):
        def configure_model(self):
            self.net = networks.UNet()

    module, callback = Late(), lightning.Convert()
    callback.setup(TRAINER, module, "fit")
    assert callback.report is None
    module.configure_model()
    callback.on_fit_start(TRAINER, module)
    assert callback.report.replaced


@pytest.mark.parametrize("late", [False, True])
def test_sync_batchnorm_of_lightning(late, lightning):
    """``Trainer(sync_batchnorm=True)`` raised an error for a converted network."""
    stock = type("TorchSyncBatchNorm", (), {})()
    trainer = types.SimpleNamespace(is_global_zero=True, strategy=types.SimpleNamespace(_layer_sync=stock))

    class Lit(lightning._pl.LightningModule):
        def configure_model(self):
            self.net = networks.UNet(nn.LeakyReLU)

    if not late:
        del Lit.configure_model
    module, callback = Lit(), lightning.Convert()
    if not late:
        module.net = networks.UNet(nn.LeakyReLU)
    callback.setup(trainer, module, "fit")
    assert (callback.report is None) == late
    if late:
        module.configure_model()
    plugin = trainer.strategy._layer_sync
    assert plugin.apply(module) is module
    callback.on_fit_start(trainer, module)
    assert sum(isinstance(norm, fusedseg.InPlaceABNSync) for norm in module.modules()) == 6
    assert plugin.revert(module) is module
    assert not any(type(norm).__name__.endswith("Sync") for norm in module.modules())
    assert sum(isinstance(norm, nn.BatchNorm2d) for norm in module.modules()) == 6


def test_a_plugin_of_the_user_stays(lightning):
    mine = types.SimpleNamespace()
    trainer = types.SimpleNamespace(is_global_zero=True, strategy=types.SimpleNamespace(_layer_sync=mine))
    lightning.Convert().setup(trainer, lit(lightning), "fit")
    assert trainer.strategy._layer_sync is mine


def test_a_lightning_module_is_compiled(lightning, said):
    """In place, so that checkpoints have the stock names; the log says what the backend keeps, once."""
    module, callback = lit(lightning), lightning.Compile(codegen="aten", bits=4)
    names = list(module.state_dict())
    callback.on_fit_start(TRAINER, module)
    for _ in range(2):
        module.net(torch.randn(2, 3, 32, 32)).mean().backward()
        callback.on_train_batch_end(TRAINER, module, None, None, 0)
    (text,) = said
    assert "\nUNet: 1 graph, from eager mode to this backend" in text
    eager, ours = callback.report.kept
    assert ours < 0.4 * eager
    assert list(module.state_dict()) == names
    # A second network of the class runs the graphs of the first one.
    again = lit(lightning)
    callback.on_fit_start(TRAINER, again)
    again.net(torch.randn(2, 3, 32, 32)).mean().backward()
    callback.on_train_batch_end(TRAINER, again, None, None, 0)
    assert said[1] == text
    with pytest.raises(ValueError, match=r"options must be among .*, got 'bit'"):
        lightning.Compile(bit=4).on_fit_start(TRAINER, module)
    module.net = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"lightning\.Compile: Sequential\.compile\(\) of PyTorch has no effect"):
        lightning.Compile().on_fit_start(TRAINER, module)


def test_detect_anomaly_of_lightning(lightning, said):
    """The callback of ``Trainer(detect_anomaly=True)`` raised, because its report looked for NaN without values."""
    module, callback = lit(lightning), lightning.Compile(codegen="aten")
    with torch.autograd.set_detect_anomaly(True):
        callback.on_fit_start(TRAINER, module)
        module.net(torch.randn(2, 3, 32, 32)).mean().backward()
        callback.on_train_batch_end(TRAINER, module, None, None, 0)
    eager, ours = callback.report.kept
    assert 0 < ours < eager


def test_what_convert_of_lightning_refuses(lightning):
    module = lit(lightning)
    module.other = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"module must name the network, .* has 2 children with parameters: net"):
        lightning.Convert().setup(TRAINER, module, "fit")
    callback = lightning.Convert("net", sync=True)
    callback.setup(TRAINER, module, "fit")
    assert any(isinstance(norm, fusedseg.BatchNormActSync) for norm in module.modules())
    module.net = type("FSDPUNet", (nn.Sequential,), {})(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match=r"sharded already; call fusedseg\.convert in configure_model"):
        lightning.Convert("net").on_fit_start(TRAINER, module)
    with pytest.raises(ValueError, match="batch must be an integer >= 0, got -1"):
        lightning.MemoryReport(-1)


def test_memory_report(lightning, said):
    module, report = lit(lightning), lightning.MemoryReport(batch=1)
    x = torch.randn(2, 3, 32, 32)
    for index in range(3):
        report.on_train_batch_start(TRAINER, module, x, index)
        out = module.net(x)
        loss = out.mean()
        report.on_before_backward(TRAINER, module, loss)
        loss.backward()
        del out
        report.on_train_batch_end(TRAINER, module, loss, x, index)
        module.zero_grad()
    report.on_fit_end(TRAINER, module)
    expected = measure(module.net, x)
    # The scalar loss is alive as well.
    assert expected.held <= report.held <= expected.held + 64
    assert abs(report.peak - expected.peak) <= 64
    (text,) = said
    assert text.startswith("fusedseg: training batch 1: ")
    lightning.MemoryReport(7).on_fit_end(TRAINER, module)
    assert "batch 7 was not counted" in said[1]


@pytest.fixture
def plugin(monkeypatch):
    framework = types.ModuleType("transformers")
    framework.TrainerCallback = object
    return integration(monkeypatch, "transformers", transformers=framework)


def test_a_model_of_transformers_is_compiled(plugin, caplog):
    model, callback = networks.UNet(), plugin.Compile(codegen="aten")
    state = types.SimpleNamespace(is_world_process_zero=True)
    callback.on_train_begin(None, state, None, model=model)
    for _ in range(2):
        model(torch.randn(2, 3, 32, 32)).mean().backward()
        callback.on_step_end(None, state, None, model=model)
    assert caplog.text.count("\nUNet: 1 graph, from eager mode to this backend") == 1
    eager, ours = callback.report.kept
    assert ours < 0.6 * eager


def test_a_model_of_transformers(plugin, caplog):
    model = networks.UNet()
    model.main_input_name, model.dtype = "pixel_values", torch.float32
    model.config = types.SimpleNamespace(num_channels=3)
    state = types.SimpleNamespace(is_world_process_zero=True)
    callback = plugin.Convert(example_inputs=torch.zeros(2, 3, 16, 16))
    callback.on_init_end(None, state, None, model=model)
    callback.on_train_begin(None, state, None, model=model)
    assert callback.report.replaced
    assert caplog.text.count("UNet is converted") == 1
    assert plugin._images(model)["pixel_values"].shape == (2, 3, 64, 64)
    later = plugin.Convert(example_inputs=torch.zeros(2, 3, 16, 16), sync=True)
    later.on_train_begin(None, state, None, model=model)
    assert "converted already" in caplog.text
    assert any(isinstance(norm, fusedseg.BatchNormActSync) for norm in model.modules())
    model.main_input_name = "input_ids"
    with pytest.raises(ValueError, match="example_inputs must be given for UNet, whose input is 'input_ids'"):
        plugin.Convert().on_init_end(None, state, None, model=model)
