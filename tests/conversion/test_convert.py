"""``convert``: published blocks and plain containers compute what their stock form computes, and keep fewer bytes."""

import copy
import gc
import pickle
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fusedseg
from fusedseg.convert import LIBRARY, BlockPlan, FusedStock, _library_steps, digest_of
from fusedseg.memory.meter import graph_of, measure
from tests.conversion import networks
from tests.conversion.compare import assert_same, results, saved
from tests.resnet import ResNet18

LEAKY = partial(nn.LeakyReLU, 0.01, inplace=True)
KWARGS = {"conv_bias": True, "norm_op": nn.InstanceNorm3d, "norm_op_kwargs": {"eps": 1e-5, "affine": True},
          "nonlin": nn.LeakyReLU, "nonlin_kwargs": {"inplace": True}}  # fmt: skip


def nnunet(name, *args, **options):
    module = pytest.importorskip("dynamic_network_architectures.architectures.unet")
    return getattr(module, name)(1, 3, (8, 16, 32), nn.Conv3d, 3, (1, 2, 2), *args, **KWARGS, **options)


def monai(name, *args, **options):
    return getattr(pytest.importorskip("monai.networks.nets"), name)(3, 1, 2, *args, **options)


def block(cin=3, act=LEAKY, norm=nn.BatchNorm2d):
    return nn.Sequential(nn.Conv2d(cin, 8, 3, padding=1), norm(8), act())


def leaky_unet():
    return networks.UNet(LEAKY)


VOLUME, IMAGE = (2, 1, 16, 16, 16), (2, 3, 32, 32)
# Networks, the shape of an input, and the most that they keep of what their stock form keeps.
NETWORKS = {
    "MONAI UNet": (lambda: monai("UNet", (8, 16, 32), (2, 2), num_res_units=2), VOLUME, 0.72),
    "MONAI DynUNet": (lambda: monai("DynUNet", [3] * 3, [1, 2, 2], [2, 2], filters=(8, 16, 32)), VOLUME, 0.63),
    "MONAI DynUNet, residual": (
        lambda: monai("DynUNet", [3] * 3, [1, 2, 2], [2, 2], filters=(8, 16, 32), res_block=True), VOLUME, 0.75),
    "MONAI BasicUNet": (lambda: monai("BasicUNet", features=(8, 8, 16, 16, 16, 8)), (2, 1, 32, 16, 16), 0.66),
    "MONAI VNet": (lambda: monai("VNet"), (1, 1, 32, 16, 16), 0.85),
    "PlainConvUNet": (lambda: nnunet("PlainConvUNet", 2, 2, 2), VOLUME, 0.63),
    "ResidualEncoderUNet": (lambda: nnunet("ResidualEncoderUNet", (1, 2, 2), 2, (1, 1)), VOLUME, 0.66),
    "U-Net, LeakyReLU": (leaky_unet, IMAGE, 0.63),
    "U-Net, ELU": (lambda: networks.UNet(partial(nn.ELU, inplace=True)), IMAGE, 0.63),
    "U-Net, SiLU": (lambda: networks.UNet(nn.SiLU), IMAGE, 0.75),
    "U-Net, ReLU": (networks.UNet, IMAGE, 0.99),
    "ResNet": (partial(ResNet18, width=8), (2, 3, 32, 32), 1.0),
}  # fmt: skip


def converted(model, x):
    """The stock model and its converted copy, in the dtype of ``x``."""
    stock = model.to(x.dtype)
    return stock, fusedseg.convert(copy.deepcopy(stock))


def kept(model, x):
    return measure(model, x).saved


@pytest.fixture
def x():
    return torch.randn(IMAGE, dtype=torch.float64)


# Its convolutions of 5×5×5 take a minute in fp64, and the other networks have its norm, activation and sums.
LARGE = ("MONAI VNet",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LARGE else ()) for name in NETWORKS]
)
def test_networks(name):
    """Outputs and buffers have the stock model's bits on a CPU; gradients agree to rounding, in fp64."""
    make, shape, most = NETWORKS[name]
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64)
    stock, ours = converted(make(), x)
    assert list(ours.state_dict()) == list(stock.state_dict())
    assert repr(ours) == repr(stock)
    for training in (True, False):
        assert_same(ours, stock, x, training=training)
        assert torch.equal(results(ours, x, training)[0], results(stock, x, training)[0])
    assert kept(ours.train(), x) <= most * kept(stock.train(), x)
    fusedseg.revert(ours)
    assert not any(isinstance(module, FusedStock) for module in ours.modules())
    assert kept(ours, x) == kept(stock, x)


@pytest.mark.parametrize("key", LIBRARY, ids=lambda key: key[1])
def test_library_blocks_are_those_that_were_read(key):
    """A new version of a library makes its blocks stock, until somebody has read them."""
    module = pytest.importorskip(key[0])
    assert digest_of(getattr(module, key[1])) == LIBRARY[key][0]


def test_another_version_of_a_library_stays_stock(monkeypatch):
    dynunet = pytest.importorskip("monai.networks.blocks.dynunet_block")
    block = dynunet.UnetBasicBlock(2, 1, 4, 3, 1, "instance")
    monkeypatch.setattr(dynunet.UnetBasicBlock, "forward", lambda self, inp: self.norm1(self.conv1(inp)))
    _library_steps.cache_clear()
    try:
        found = fusedseg.conversion(fusedseg.convert(block))
        assert [row.why for row in found.left] == ["the forward of another version of UnetBasicBlock calls it"] * 2
    finally:
        monkeypatch.undo()
        _library_steps.cache_clear()
    assert len(fusedseg.conversion(fusedseg.convert(block)).served) == 2


def test_what_it_says():
    model = nn.Sequential(block(), nn.MaxPool2d(2), block(8, nn.ReLU), nn.Conv2d(8, 2, 1))
    model.add_module("last", networks.Twice())
    found = fusedseg.conversion(fusedseg.convert(model))
    assert [(row.name, row.cls) for row in found.served] == [("0.1", "BatchNorm2d and LeakyReLU"), ("1", "MaxPool2d")]
    relu, calls = found.left
    assert (relu.name, calls.name) == ("2.1", "last.bn")
    assert relu.why.startswith("ReLU after it keeps its own output")
    assert calls.why == "the forward of Twice calls it"
    text = str(found)
    assert text.startswith("fusedseg.convert serves 2 norms and pools, and leaves 2.\n")
    assert 'torch.compile(model, backend="fusedseg")' in text


class Reads(nn.Module):
    """Programs in which a flow that was observed once misled an earlier ``convert``."""

    def __init__(self, how):
        super().__init__()
        self.how, self.conv, self.norm, self.act = how, nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), LEAKY()
        self.block = block(8)

    def forward(self, x):
        y = self.conv(x)
        if self.how == "closure":
            return (lambda: self.block(self.act(self.norm(y.clone()))) + y)()
        if self.how == "grad mode":
            return self.block(y) + (y if torch.is_grad_enabled() else 0)
        return self.block(y) + self.block(y.to_sparse().to_dense())


@pytest.mark.parametrize("how", ["closure", "grad mode", "sparse"])
def test_programs_that_read_a_tensor_twice(how, x):
    stock, ours = converted(Reads(how), x)
    assert fusedseg.conversion(ours).served
    assert_same(ours, stock, x)
    with torch.no_grad():
        assert torch.equal(ours(x), stock(x))


def test_sparse_empty_and_wrong_inputs_meet_the_stock_modules():
    net, stock = fusedseg.convert(block(act=nn.PReLU)), block(act=nn.PReLU)
    stock.load_state_dict(net.state_dict())
    assert net(torch.randn(0, 3, 8, 8)).shape == (0, 8, 8, 8)
    linear = fusedseg.convert(nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.PReLU()))
    assert linear(torch.randn(4, 3).to_sparse()).shape == (4, 8)
    for given in (torch.randn(1, 4, 8, 8), torch.randn(3, 8, 8), torch.zeros(2, 3, 8, 8, dtype=torch.int)):
        errors = []
        for model in (net, stock):
            with pytest.raises((RuntimeError, ValueError)) as error:
                model(given)
            errors.append(str(error.value))
        assert errors[0] == errors[1]


HOOKS = {
    "forward": lambda m, see: m.register_forward_hook(lambda m, args, out: see(out)),
    "forward, replaces": lambda m, see: m.register_forward_hook(lambda m, args, out: out * 0.5),
    "forward pre": lambda m, see: m.register_forward_pre_hook(lambda m, args: see(args[0])),
    "backward": lambda m, see: m.register_full_backward_hook(lambda m, into, out: see(out[0])),
    "global": lambda m, see: nn.modules.module.register_module_forward_hook(lambda m, args, out: see(out)),
}


@pytest.mark.parametrize("place", ["0", "1", "2", ""])
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("how", HOOKS)
def test_hooks_see_what_they_see_in_the_stock_model(how, before, place, x):
    # PyTorch forbids an activation in place behind a module with a backward hook.
    stock, found = nn.Sequential(block(act=nn.LeakyReLU), nn.Conv2d(8, 2, 1)).double(), []
    ours = copy.deepcopy(stock)
    for model in (stock, ours):
        seen, handles = [], []
        if not before and model is ours:
            fusedseg.convert(model)
            copy.deepcopy(model)(x)
        handles.append(HOOKS[how](model[0].get_submodule(place), lambda t, seen=seen: seen.append(t.detach().clone())))
        if before and model is ours:
            fusedseg.convert(model)
        out = model(x.clone().requires_grad_())
        out.sum().backward()
        handles[0].remove()
        found.append([out.detach(), *seen])
    assert len(found[0]) == len(found[1])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_a_hook_that_goes_lets_the_block_be_lean_again(x):
    stock, ours = converted(block(), x)
    lean = kept(ours, x)
    handle = ours[1].register_forward_hook(lambda *args: None)
    assert kept(ours, x) == kept(stock, x)
    handle.remove()
    assert kept(ours, x) == lean < kept(stock, x)


def test_children_that_are_called_by_themselves_are_stock(x):
    stock, ours = converted(nn.Sequential(block(), block(8), nn.Conv2d(8, 2, 1)), x)
    for part in (lambda m: m[0][0](x), lambda m: m[0][1](m[0][0](x)), lambda m: m[0][:2](x), lambda m: m[:1](x)):
        assert torch.equal(part(ours), part(stock))
    y = x
    for layer in ours:
        for child in layer if isinstance(layer, nn.Sequential) else [layer]:
            y = child(y)
    assert torch.equal(y, stock(x))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.__setitem__(1, nn.Identity()),
        lambda m: m.__setitem__(2, nn.Tanh()),
        lambda m: m._modules.__setitem__("1", nn.InstanceNorm2d(8)),
        lambda m: m.append(nn.Sigmoid()),
        lambda m: m.__delitem__(2),
        lambda m: setattr(m[2], "negative_slope", 0.5),
        lambda m: setattr(m[2], "inplace", False),
        # Such an activation has no inverse, and PyTorch does not differentiate it in place.
        lambda m: vars(m[2]).update(negative_slope=-0.5, inplace=False),
        lambda m: setattr(m[1], "eps", 0.3),
        lambda m: setattr(m[1], "momentum", None),
        lambda m: m[1].eval().requires_grad_(False),
        lambda m: nn.utils.parametrizations.weight_norm(m[0]),
        lambda m: nn.utils.parametrize.register_parametrization(m[1], "weight", nn.Softplus()),
        lambda m: setattr(m[1], "forward", lambda x: x * 2),
    ],
)
def test_a_child_that_changes_later(change, x):
    stock, ours = converted(block(), x)
    for model in (stock, ours):
        model(x)
        change(model)
    for _ in range(2):
        assert_same(ours, stock, x)


class Own(nn.Sequential):
    def forward(self, x):
        return super().forward(x) + 1


class Kept(nn.Sequential):
    """A plain subclass, as libraries have them."""


def test_subclasses_of_sequential(x):
    stock, ours = converted(nn.Sequential(Own(*block()), Kept(*block(8))), x)
    assert [row.name for row in fusedseg.conversion(ours).served] == ["1.1"]
    assert isinstance(ours[1], Kept)
    assert_same(ours, stock, x)


def test_a_child_in_two_blocks(x):
    shared = block()
    model = nn.Sequential(shared, nn.Conv2d(8, 3, 1), nn.Sequential(shared[0], shared[1], LEAKY()), shared[1])
    stock, ours = converted(model, x)
    assert_same(ours, stock, x)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), saved])
def test_copies_and_pickles_stay_converted_and_share_nothing(copied, x):
    stock, ours = converted(leaky_unet(), x)
    for model in (ours, stock):
        model(x)
    twin = copied(ours)
    assert kept(copy.deepcopy(twin), x) == kept(copy.deepcopy(ours), x) < kept(copy.deepcopy(stock), x)
    assert BlockPlan(twin.inc).pairs[0].norm is twin.inc[0][1]
    assert_same(twin, stock, x)
    assert {id(m) for m in twin.modules()}.isdisjoint(id(m) for m in ours.modules())


def test_no_grad_and_eval_and_checkpoints(x):
    stock, ours = converted(nn.Sequential(block(), block(8)), x)
    with torch.no_grad():
        assert torch.equal(ours(x), stock(x))
    with torch.inference_mode():
        assert torch.equal(ours.eval()(x), stock.eval()(x))
    found = []
    for model in (ours.train(), stock.train()):
        out = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
        found.append([*torch.autograd.grad(out.square().mean(), [*model.parameters()]), *model.buffers()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.InstanceNorm2d, partial(nn.GroupNorm, 2)], ids=str)
@pytest.mark.parametrize("act", [LEAKY, nn.PReLU, nn.GELU, nn.Softplus], ids=str)
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
def test_autocast_and_memory_formats(norm, act, last):
    x = torch.randn(IMAGE)
    stock, ours = converted(nn.Sequential(block(norm=norm, act=act), nn.Conv2d(8, 2, 1)), x)
    x = x.to(memory_format=torch.channels_last) if last else x
    for amp in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            out, expected = ours(x), stock(x)
            inner, wanted = ours[0](x), stock[0](x)
        assert (out.dtype, inner.dtype) == (expected.dtype, wanted.dtype)
        torch.testing.assert_close(out, expected, rtol=2e-2 if amp else 1e-5, atol=2e-2 if amp else 1e-5)
        out.float().square().mean().backward()


def test_a_caller_that_writes_over_the_output():
    """Eager mode allows that where the activation keeps its input: there the op must not keep its output."""
    for act, raises in ((partial(nn.LeakyReLU, 0.1), False), (LEAKY, True)):
        stock, ours = converted(block(act=act), torch.randn(IMAGE))
        for model in (stock, ours):
            out = model(torch.randn(IMAGE))
            out.add_(1)
            if raises:
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    out.sum().backward()
            else:
                out.sum().backward()


def test_a_second_derivative_is_a_clear_error(x):
    ours = fusedseg.convert(block().double())
    leaf = x.requires_grad_()
    (grad,) = torch.autograd.grad(ours(leaf).square().sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match=r"double backward is not supported.*fusedseg\.revert\(model\)"):
        grad.sum().backward()
    fusedseg.revert(ours)
    (grad,) = torch.autograd.grad(ours(leaf).square().sum(), leaf, create_graph=True)
    grad.sum().backward()


def test_transforms_and_tools_meet_stock_modules(x):
    stock, ours = converted(nn.Sequential(block(), nn.MaxPool2d(2), nn.Conv2d(8, 2, 1)).eval(), x)
    params = dict(ours.named_parameters())

    def loss(params, x):
        return torch.func.functional_call(ours, params, (x,)).square().mean()

    expected = torch.autograd.grad(stock(x).square().mean(), [*stock.parameters()])
    found = torch.func.grad(loss)(params, x)
    torch.testing.assert_close(list(found.values()), list(expected))
    _, tangent = torch.func.jvp(ours, (x,), (torch.ones_like(x),))
    torch.testing.assert_close(tangent, torch.func.jvp(stock, (x,), (torch.ones_like(x),))[1])
    graphs = [torch.fx.symbolic_trace(model) for model in (ours, stock)]
    assert [str(node) for node in graphs[0].graph.nodes] == [str(node) for node in graphs[1].graph.nodes]
    torch.testing.assert_close(graphs[0](x), stock(x))
    program = torch.export.export(ours, (x,))
    assert not [node for node in program.graph.nodes if "fusedseg" in str(node.target)]
    assert torch.equal(torch.jit.trace(ours, x)(x), stock(x))
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        y = copy.deepcopy(ours).train()(x.requires_grad_())
        y.add_(1)
        y.sum().backward()
    # torch.jit.script reads sources, and reverts what it is given.
    assert torch.equal(torch.jit.script(ours.eval())(x), stock(x))
    assert not any(isinstance(module, FusedStock) for module in ours.modules())


@pytest.mark.parametrize("options", [{"backend": "aot_eager"}, {"backend": "fusedseg", "options": {"codegen": "aten"}}])
def test_compiled(options, x):
    """A converted model compiles in one graph as the stock model, whose class attributes it has."""
    torch._dynamo.reset()
    stock, ours = converted(leaky_unet(), x)
    ours(x)
    run = torch.compile(ours, fullgraph=True, **options)
    found = [
        torch.autograd.grad(call(x).square().mean(), [*m.parameters()]) for call, m in ((run, ours), (stock, stock))
    ]
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)
    torch._dynamo.reset()


def test_data_parallel_replicas_have_plans_of_their_own(x):
    """A replica ran the modules of the block that it is a replica of, which are on another GPU."""
    stock, ours = converted(block(), x)
    ours(x)
    replica = ours._replicate_for_data_parallel()
    replica._modules = {name: child._replicate_for_data_parallel() for name, child in ours._modules.items()}
    # The parameters have other values here, so that the result says whose they are.
    for name, child in ours._modules.items():
        for key, parameter in child._parameters.items():
            setattr(replica._modules[name], key, (2 * parameter.detach()).requires_grad_())
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.mul_(2)
    torch.testing.assert_close(replica(x), stock(x))
    assert ours.__dict__[FusedStock.PLAN].pairs[0].norm is ours[1]


def test_data_parallel_replicas_go_when_they_have_run(x):
    """A replica and its plan had each other, so that the copies of many steps' parameters filled the GPUs."""
    _, ours = converted(block(), x)
    gc.collect()
    gc.disable()
    try:
        replica = ours._replicate_for_data_parallel()
        replica._modules = dict(ours._modules)
        replica(x)
        gone = weakref.ref(replica)
        del replica
        assert gone() is None
    finally:
        gc.enable()


def test_pools(x):
    """Max-pools keep a byte for each element; where they cannot, PyTorch's runs."""
    pools = nn.MaxPool2d(3, 2, 1), nn.MaxPool2d(2, return_indices=True), nn.MaxPool2d(17, 1), nn.MaxPool2d([2, 2])
    for pool in pools:
        ours = fusedseg.convert(copy.deepcopy(pool))
        for given in (x, x[0]):
            found, expected = ours(given), pool(given)
            assert type(found) is type(expected)
            pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
            assert all(torch.equal(a, b) for a, b in pairs)
    leaf = x.requires_grad_()
    assert kept(fusedseg.convert(nn.MaxPool2d(2)), leaf) < kept(nn.MaxPool2d(2), leaf) / 8


def test_a_call_looks_at_few_things(monkeypatch, x):
    """The plan is made once; a call makes no new one, and walks over no children."""
    ours = fusedseg.convert(leaky_unet()).double()
    ours(x)
    monkeypatch.setattr(BlockPlan, "__init__", None)
    monkeypatch.setattr(nn.Module, "modules", None)
    monkeypatch.setattr(nn.Module, "children", None)
    out = ours(x)
    # Each pair is one node of autograd.
    names = {type(node).__name__ for node in graph_of(out)}
    assert "NormFunctionBackward" in names
    assert not names & {"LeakyReluBackward0", "LeakyReluBackward1", "NativeBatchNormBackward0"}


def test_any_weight_trains_right(x):
    """Channels whose weight is zero or tiny cannot be rebuilt from the output; their normalised input is kept."""
    stock, ours = converted(nn.Sequential(block(), block(8)), x)
    for model in (stock, ours):
        for layer in model:
            layer[1].weight.data[:3] = torch.tensor([0.0, 1e-9, -1.0])
            layer[1].bias.data[:3] = 1.0
    assert_same(ours, stock, x)
    F.mse_loss(ours(x), ours(x).detach()).backward()
