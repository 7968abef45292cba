"""The promises of ``convert`` and ``revert`` on objects, hooks, modes, exceptions and copies."""

import copy
import gc
import pickle
import sys
import weakref

import pytest
import torch
from torch import nn

import fusedseg
from fusedseg.conversion import scope, twins
from fusedseg.memory.meter import measure
from tests.conversion import networks
from tests.conversion.compare import assert_same, converted, pair, reasons, replaced, results

pytestmark = pytest.mark.usefixtures("uncounted")


def anatomy(model: nn.Module) -> list[tuple]:
    """For each module its class, the names of its attributes, its hooks and flags, and the ids of its tensors."""
    return [
        (
            path, id(module), type(module), sorted(module.__dict__), module.training,
            [(name, id(p), p.requires_grad) for name, p in module._parameters.items() if p is not None],
            [(name, id(b)) for name, b in module._buffers.items() if b is not None],
            list(module._forward_hooks.values()), list(module._forward_pre_hooks.values()),
        )
        for path, module in model.named_modules(remove_duplicate=False)
    ]  # fmt: skip


@pytest.mark.parametrize("name", networks.NETWORKS)
def test_five_steps_of_training_follow_the_stock_model(name):
    torch.manual_seed(3)
    stock = networks.NETWORKS[name]()
    ours = copy.deepcopy(stock)
    data = [torch.randn(4, 3, 32, 32) for _ in range(5)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9) for net in (ours, stock)]
    fusedseg.convert(ours, example_inputs=data[0])
    for x in data:
        losses = []
        for net, optimizer in zip((ours, stock), optimizers, strict=True):
            optimizer.zero_grad()
            out = net(x)
            loss = (out - torch.linspace(-1, 1, out.numel()).view(out.shape)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("name", networks.NETWORKS)
def test_revert_gives_back_what_was_there(name, image):
    model = networks.NETWORKS[name]().double()
    before, expected = anatomy(model), copy.deepcopy(model)
    fusedseg.convert(model, example_inputs=image)
    assert anatomy(model) != before
    assert fusedseg.revert(model) is model
    assert anatomy(model) == before
    out, gradients = results(model, image)
    expected_out, expected_gradients = results(expected, image)
    assert torch.equal(out, expected_out)
    assert all(torch.equal(gradients[name], expected_gradients[name]) for name in expected_gradients)


@pytest.mark.parametrize("name", networks.NETWORKS)
def test_converting_twice_is_converting_once(name, image, counted):
    model = networks.NETWORKS[name]().double()
    first = fusedseg.convert(model, example_inputs=image)
    once = anatomy(model)
    second = fusedseg.convert(model, example_inputs=image)
    assert anatomy(model) == once
    assert (second.replaced, second.recomputed, second.skipped) == (first.replaced, first.recomputed, first.skipped)
    assert (second.before, second.after) == (first.before, first.after)


def test_modes_can_be_changed(image):
    model = networks.UNet().double()
    fusedseg.convert(model, example_inputs=image)
    fusedseg.convert(model, example_inputs=image, mode="leaky", slope=0.3)
    assert isinstance(model.inc[0][1], fusedseg.InPlaceABN)
    fusedseg.convert(model, example_inputs=image)
    assert model.inc[0][1].activation_param == 0.3


@pytest.mark.parametrize("after", range(0, 14, 3))
@pytest.mark.parametrize("was_converted", [False, True], ids=["stock", "converted"])
def test_an_exception_leaves_the_model_as_it_was(image, monkeypatch, after, was_converted):
    model = networks.UNet(nn.LeakyReLU).double()
    if was_converted:
        fusedseg.convert(model, example_inputs=image)
    before, real, calls = anatomy(model), twins.become, []

    def fails(module, twin):
        calls.append(module)
        if len(calls) > after:
            raise KeyboardInterrupt
        real(module, twin)

    # `fusedseg.conversion.convert` is the function; the module of this name is found in sys.modules.
    monkeypatch.setattr(sys.modules["fusedseg.conversion.convert"], "become", fails)
    monkeypatch.setattr(scope, "install", lambda root, wiring: fails(root, None))
    with pytest.raises(KeyboardInterrupt):
        fusedseg.convert(model, example_inputs=image)
    assert anatomy(model) == before


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mode": "fast"}, ValueError, r"fusedseg\.convert: mode must be one of exact, leaky, got 'fast'"),
        ({"mode": "leaky", "slope": 0.0}, ValueError, r"fusedseg\.convert: leaky_relu with slope 0.0 cannot be"),
        ({"example_inputs": "image"}, TypeError, r"fusedseg\.convert: the example must be a tensor, a sequence"),
        ({"example_inputs": (1, 3, 64, 64)}, TypeError,
         r"fusedseg\.convert: the example must be a tensor, got the numbers \(1, 3, 64, 64\); pass torch\.randn"),
        ({"example_inputs": torch.randn(1, 5, 8, 8)}, ValueError,
         r"fusedseg\.convert: the model cannot be called with the example: RuntimeError: .*5 channels"),
    ],
    ids=["mode", "slope", "example", "shape", "example of other channels"],
)  # fmt: skip
def test_errors(options, error, message):
    model = networks.UNet()
    before = anatomy(model)
    with pytest.raises(error, match=message):
        fusedseg.convert(model, **options)
    assert anatomy(model) == before


def test_only_modules_are_converted():
    with pytest.raises(TypeError, match=r"fusedseg\.convert: model must be an nn\.Module, got function"):
        fusedseg.convert(lambda x: x)
    with pytest.raises(TypeError, match=r"by its name, such as fusedseg\.convert\(model, example_inputs=.* got Tensor"):
        fusedseg.convert(networks.UNet(), torch.randn(1, 3, 16, 16))
    with pytest.raises(TypeError, match=r"model must not be a torch\.fx\.GraphModule; convert the module that"):
        fusedseg.convert(torch.fx.symbolic_trace(nn.Sequential(nn.ReLU())))
    with pytest.raises(TypeError, match=r"fusedseg\.revert: model must be an nn\.Module, got int"):
        fusedseg.revert(3)


def test_without_an_example_the_model_gets_the_scope_alone(image):
    model = networks.UNet().double()
    stock = copy.deepcopy(model)
    report = fusedseg.convert(model)
    assert report.replaced == []
    assert "pass example_inputs to have modules replaced" in report.how
    assert reasons(report)["pool"] == "no call was observed: pass example_inputs to have it replaced"
    assert measure(model, image).saved < 0.6 * measure(stock, image).saved
    assert_same(model, stock, image)


def test_looking_at_a_model_leaves_no_trace(image, counted):
    """Neither its tensors, attributes and hooks nor the random state change."""

    class Counts(networks.Twice):
        calls, features = 0, []

        def forward(self, x):
            self.calls += 1
            self.feature = self.conv(x)
            self.features.append(self.feature)
            return nn.functional.dropout(self.act(self.bn(self.feature)), 0.5, self.training)

    model = Counts().double()
    model.features = []
    state, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    fusedseg.convert(model, example_inputs=image)
    assert (model.calls, model.features, hasattr(model, "feature")) == (0, [], False)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert type(model.bn.weight) is nn.Parameter


def test_a_forward_that_looks_at_values(image, counted):
    """Fake tensors have no values, so the model is observed on real tensors.  Its buffers stay as they were."""

    class Looks(networks.UNet):
        def forward(self, x):
            return super().forward(x if x.abs().sum().item() > 0 else x + 1)

    model, report = converted(Looks, image)
    assert len(report.replaced) == 8
    assert report.before is report.after is None
    assert "\nA training step on the example is not counted: without values, DataDependent" in str(report)
    assert model.inc[0][1].num_batches_tracked.item() == 1


def test_the_own_step_of_the_converted_model_fails(image, monkeypatch, counted):
    """The error was swallowed: ``report.after`` was None, and the model failed in its first step."""

    def fails(self, *args):
        raise ValueError("no such norm\nat all")

    model = networks.UNet().double()
    before = anatomy(model)
    monkeypatch.setattr(fusedseg.BatchNormAct, "forward", fails)
    with pytest.raises(RuntimeError, match=r"the stock model did not \(ValueError: no such norm\); the model is left"):
        fusedseg.convert(model, example_inputs=image)
    assert anatomy(model) == before


def test_keywords(image):
    class Keywords(networks.Functional):
        def forward(self, *, image, scale=None):
            y = self.conv(image if scale is None else image * scale)
            return self.bn(y).relu()

    report = fusedseg.convert(Keywords().double(), example_inputs={"image": image, "scale": 2.0})
    assert [row.what for row in report.recomputed] == ["BatchNorm2d", "relu()"]


def test_frozen_norms(image):
    def make():
        model = networks.UNet(nn.LeakyReLU)
        for parameter in model.inc.parameters():
            parameter.requires_grad_(False)
        return model

    ours, stock = pair(make(), image)
    for net in (ours, stock):
        net.train()
        net.inc.eval()
    before = ours.inc[0][1].running_mean.clone()
    outs = [net(image) for net in (ours, stock)]
    assert torch.allclose(*outs, rtol=1e-12)
    outs[0].sum().backward()
    assert torch.equal(ours.inc[0][1].running_mean, before)
    assert ours.inc[0][0].weight.grad is None


def test_mode_and_flags_are_kept():
    model = networks.UNet().eval()
    model.down.train()
    model.dec.requires_grad_(False)
    flags = [(m.training, [p.requires_grad for p in m.parameters(recurse=False)]) for m in model.modules()]
    fusedseg.convert(model, example_inputs=torch.randn(2, 3, 16, 16))
    assert flags == [(m.training, [p.requires_grad for p in m.parameters(recurse=False)]) for m in model.modules()]


def test_wrappers_are_seen_through(image):
    _, report = converted(lambda: nn.DataParallel(networks.double_conv(3, 8)), image)
    assert replaced(report) == {"module.1": "BatchNormAct(relu)"}


def test_leaky(image):
    model = networks.UNet().double()
    stock = networks.UNet(lambda: nn.LeakyReLU(0.2)).double()
    stock.load_state_dict(model.state_dict())
    report = fusedseg.convert(model, example_inputs=image, mode="leaky", slope=0.2)
    assert set(replaced(report).values()) == {"ConvABN2d(leaky_relu(0.2))", "MaxPool2d"}
    assert_same(model, stock, image)
    fusedseg.revert(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in stock.modules()]
    assert_same(model, stock, image)


def leaky_resnet(slope: float) -> nn.Module:
    model = networks.ResNet()
    for module in model.modules():
        if hasattr(module, "relu"):
            module.relu = nn.LeakyReLU(slope, inplace=True)
    return model


def test_leaky_with_an_activation_module_that_follows_sums_too(image):
    model, stock = networks.ResNet().double(), leaky_resnet(0.2).double()
    stock.load_state_dict(model.state_dict())
    report = fusedseg.convert(model, example_inputs=image, mode="leaky", slope=0.2)
    assert sum(to == "ConvABN2d(leaky_relu(0.2))" for to in replaced(report).values()) == 5
    assert_same(model, stock, image)
    assert_same(fusedseg.revert(model), stock, image)


def test_exact_does_not_rely_on_marks_where_twice_is_not_once(image):
    _, report = converted(lambda: leaky_resnet(0.2), image)
    assert replaced(report) == {"conv1": "ConvABN2d(leaky_relu(0.2))", "maxpool": "MaxPool2d"}
    assert reasons(report)["layers.0.bn1"] == "its activation module is also called elsewhere"


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("mode", ["exact", "leaky"])
def test_copies(image, copied, mode):
    model = networks.ResNet().double()
    fusedseg.convert(model, example_inputs=image, mode=mode)
    other = copied(model)
    assert_same(other, model, image)
    fusedseg.revert(other)
    assert all(type(m).__module__.startswith(("torch.", "tests.")) for m in other.modules())
    assert type(model.bn1) is not nn.BatchNorm2d


def test_a_fake_model(counted):
    with torch._subclasses.FakeTensorMode():
        model, x = networks.UNet(), torch.empty(2, 3, 64, 64)
        report = fusedseg.convert(model, example_inputs=x)
        model(x).sum().backward()
    assert len(report.replaced) == 8
    assert report.after.saved < report.before.saved


def test_nothing_is_kept_alive(image):
    model = networks.UNet().double()
    fusedseg.convert(model, example_inputs=image)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("mode", ["exact", "leaky"])
def test_compiled(mode):
    stem = (nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
    stock = nn.Sequential(*stem, networks.BasicBlock(4, 8, 2))
    x = torch.randn(2, 3, 16, 16)
    fusedseg.convert(stock, example_inputs=x, mode=mode)
    compiled = torch.compile(copy.deepcopy(stock), fullgraph=True, backend="aot_eager")
    out, gradients = results(compiled, x)
    expected, expected_gradients = results(stock, x)
    assert torch.allclose(out, expected, atol=1e-5)
    for name, gradient in gradients.items():
        assert torch.allclose(gradient, expected_gradients[name.removeprefix("_orig_mod.")], atol=1e-4)


def test_parameters_can_be_swapped(image):
    """The fake mode of ``convert`` left weak references to them, with which PyTorch swaps no tensor."""
    stock = networks.UNet(nn.LeakyReLU).double()
    model = copy.deepcopy(stock)
    # The garbage collector would drop the references at some time.
    gc.disable()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        fusedseg.convert(model, example_inputs=image)
        parameters = [*model.parameters()]
        for net in (model, stock):
            net.half().float().to(torch.float64)
        assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
        assert_same(model, stock, image)
        state = {name: value + 0.5 for name, value in stock.state_dict().items()}
        for net in (model, stock):
            net.zero_grad()
            net.load_state_dict(state)
            new = nn.Parameter(torch.zeros(8, dtype=torch.float64))
            torch.utils.swap_tensors(net.inc[0][1].weight, new)
        assert_same(model, stock, image)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
        gc.enable()
