"""A bundle's configuration and a ``SupervisedTrainer`` of MONAI, with the stock network and loss, and with ours."""

import copy

import pytest
import torch

import fusedseg
from tests.integrations.real import bytes_of, difference, framework, gradients, told, without_fusedseg

framework("monai")
pytestmark = pytest.mark.filterwarnings("ignore")

NETWORK = {
    "_target_": "UNet", "spatial_dims": 3, "in_channels": 1, "out_channels": 2, "channels": [8, 16, 32],
    "strides": [2, 2], "num_res_units": 2, "norm": ["instance", {"affine": True}],
    "act": ["leakyrelu", {"negative_slope": 0.01}],
}  # fmt: skip
STOCK = {
    "imports": ["$import torch", "$import monai"],
    "network_def": NETWORK,
    "network": "$@network_def",
    "loss": {"_target_": "DiceCELoss", "softmax": True, "to_onehot_y": True},
    "optimizer": {"_target_": "torch.optim.SGD", "params": "$@network.parameters()", "lr": 0.05},
    "data": "$[{'image': monai.data.MetaTensor(torch.randn(1, 32, 32, 32, generator=torch.Generator().manual_seed(i)),"
    " meta={'filename_or_obj': f'{i}.nii'})} for i in range(4)]",
    "dataset": "$[d | {'label': (d['image'] > 0).float()} for d in @data]",
    "loader": {"_target_": "DataLoader", "dataset": "@dataset", "batch_size": 2},
    "trainer": {
        "_target_": "SupervisedTrainer", "device": "$torch.device('cpu')", "max_epochs": 2,
        "train_data_loader": "@loader", "network": "@network", "optimizer": "@optimizer", "loss_function": "@loss",
    },
}  # fmt: skip
# What a user changes: the lines of the network and of the loss, or the arguments of the trainer.
LOSS = STOCK["loss"] | {"_target_": "fusedseg.DiceCELoss"}
COMPILED = {"compile": True, "compile_kwargs": {"backend": "fusedseg", "options": {"codegen": "aten"}}}
NORM = {"affine": True}
BY_FACTORY = {"network_def": NETWORK | {"norm": ["fused_instance", NORM], "act": ""}, "loss": LOSS}
IN_PLACE = {"network_def": NETWORK | {"norm": ["fused_instance", NORM | {"inplace": True}], "act": ""}, "loss": LOSS}
CHANGES = {"factory": BY_FACTORY, "in place": IN_PLACE}


def parsed(changes):
    from monai.bundle import ConfigParser

    torch.manual_seed(0)
    parser = ConfigParser(copy.deepcopy(STOCK) | copy.deepcopy(changes))
    parser.parse()
    return parser


def trained(parser):
    pytest.importorskip("ignite")
    from ignite.engine import Events

    trainer, losses = parser.get_parsed_content("trainer"), []

    def record(engine):
        # The engine decollates its output into a list of samples.
        out = engine.state.output
        losses.append(float((out[0] if isinstance(out, list) else out)["loss"]))

    trainer.add_event_handler(Events.ITERATION_COMPLETED, record)
    trainer.run()
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_a_bundle(name, tmp_path):
    from monai.data import MetaTensor
    from monai.networks.nets import UNet

    from fusedseg.integrations import monai as plugin

    plugin.register()
    stock, ours = parsed({}), parsed(CHANGES[name])
    nets = [parser.get_parsed_content("network") for parser in (stock, ours)]
    nets[1].load_state_dict(nets[0].state_dict())
    start = [copy.deepcopy(net) for net in nets]
    losses = [trained(parser) for parser in (stock, ours)]
    # fp32, four steps
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert len(losses[0]) == 4
    batch = next(iter(stock.get_parsed_content("loader")))
    x, y = batch["image"], batch["label"]
    assert isinstance(x, MetaTensor)
    out = nets[1](x)
    assert type(out) is type(nets[0](x)) is MetaTensor
    assert out.meta["filename_or_obj"] == nets[0](x).meta["filename_or_obj"]
    both = [bytes_of(net, x) for net in start]
    told(f"MONAI, {name}", stock=both[0], ours=both[1])
    assert both[1].saved < 0.8 * both[0].saved
    kinds = [parser.get_parsed_content("loss") for parser in (stock, ours)]
    assert isinstance(kinds[1], fusedseg.DiceCELoss)
    pairs = zip(start, kinds, strict=True)
    found = [gradients(net, lambda model, kind=kind: kind(model(x.double()), y.double())) for net, kind in pairs]
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-9)
    worst = difference(found[1][1], found[0][1])
    print(f"\nMONAI, {name}: largest difference of a gradient in float64 {worst:.1g}")
    # The loss of MONAI sums in float64 too.
    assert worst < 1e-9

    torch.save(nets[1].state_dict(), tmp_path / "ours.pt")
    options = {key: value for key, value in NETWORK.items() if key != "_target_"}
    code = f"import torch\nfrom monai.networks.nets import UNet\nmodel = UNet(**{options!r})\n"
    code += "model.load_state_dict(torch.load(sys.argv[1]))\n"
    code += "print(model.eval()(torch.ones(1, 1, 32, 32, 32)).double().sum().item())"
    expected = nets[1].eval()(torch.ones(1, 1, 32, 32, 32)).double().sum().item()
    assert float(without_fusedseg(code, tmp_path / "ours.pt")) == pytest.approx(expected, rel=1e-3)
    assert isinstance(start[0], UNet)


INFERER = {"_target_": "SlidingWindowInferer", "roi_size": [16, 16, 16], "sw_batch_size": 2, "overlap": 0.5}
EVALUATOR = {
    "inferer": INFERER,
    "post": [{"_target_": "AsDiscreted", "keys": "pred", "argmax": True}],
    "evaluator": {
        "_target_": "SupervisedEvaluator", "device": "$torch.device('cpu')", "val_data_loader": "@loader",
        "network": "@network", "inferer": "@inferer", "postprocessing": {"_target_": "Compose", "transforms": "@post"},
    },
}  # fmt: skip
# What a user changes: the class of the inferer, and no argmax after it.
LABELS = {"inferer": INFERER | {"_target_": "fusedseg.integrations.monai.SlidingWindowLabels"}, "post": []}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["constant", "gaussian"])
def test_labels_of_an_evaluator(mode):
    """``SlidingWindowLabels`` in the place of ``SlidingWindowInferer``; the network is stock, or compiled."""
    pytest.importorskip("ignite")
    from ignite.engine import Events
    from monai.data import MetaTensor

    found = []
    compiled = {"evaluator": EVALUATOR["evaluator"] | COMPILED}
    for changes in (EVALUATOR, EVALUATOR | LABELS, EVALUATOR | LABELS | compiled):
        changes = changes | {"inferer": changes["inferer"] | {"mode": mode}}
        parser = parsed(changes)
        evaluator, outputs = parser.get_parsed_content("evaluator"), []

        def record(engine, outputs=outputs):
            outputs.extend(one["pred"] for one in engine.state.output)

        evaluator.add_event_handler(Events.ITERATION_COMPLETED, record)
        evaluator.run()
        found.append(outputs)
    stock, *ours = found
    assert len(stock) == 4
    assert 0.05 < torch.stack([p.as_tensor() for p in stock]).mean() < 0.95
    for outputs in ours:
        for one, expected in zip(outputs, stock, strict=True):
            assert type(one) is type(expected) is MetaTensor
            assert one.shape == expected.shape == (1, 32, 32, 32)
            assert one.meta["filename_or_obj"] == expected.meta["filename_or_obj"]
            assert torch.equal(one.as_tensor(), expected.as_tensor().to(one.dtype))


@pytest.mark.slow
def test_compiled_trainer():
    """``SupervisedTrainer`` compiles the network by the backend, and passes it plain tensors."""
    from fusedseg import compiler

    stock, ours = parsed({}), parsed({"trainer": STOCK["trainer"] | COMPILED, "loss": LOSS})
    assert trained(ours) == pytest.approx(trained(stock), rel=1e-3)
    eager, kept = compiler.report(ours.get_parsed_content("network")).kept
    assert kept < 0.6 * eager


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("norm", ["fused_instance", "fused_batch", ("fused_group", {"num_groups": 2})], ids=str)
def test_every_factory_in_every_dimension(norm, dims):
    from monai.networks.nets import SegResNet, UNet

    from fusedseg.integrations.monai import register

    register()
    name, options = (norm, {}) if isinstance(norm, str) else norm
    plain = (name.removeprefix("fused_"), options)
    makers = [lambda **of: UNet(dims, 1, 2, (4, 8), (2,), **of)]
    if dims > 1:
        # Its blocks add the input of the first norm to their output, so a norm must not write over its input.
        makers.append(lambda **of: SegResNet(dims, 4, 1, 2, blocks_down=(1, 1), blocks_up=(1,), **of))
    x = torch.randn(2, 1, *[8] * dims)

    def loss(model):
        out = model(x.double())
        return (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum()

    for make in makers:
        nets = []
        for kind, act in ((norm, ""), (plain, ("leakyrelu", {"negative_slope": 0.01}))):
            torch.manual_seed(0)
            nets.append(make(norm=kind, act=act))
        assert list(nets[0].state_dict()) == list(nets[1].state_dict())
        found = [gradients(net, loss) for net in nets]
        assert found[0][0] == pytest.approx(found[1][0], rel=1e-9)
        assert difference(found[0][1], found[1][1]) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("size", [32, 36], ids=["even", "odd"])
def test_a_network_of_upcats_is_one_graph(size):
    """The compiler ended a graph at ``torch.jit.isinstance`` in each block of the decoder."""
    from monai.networks.nets import BasicUNetPlusPlus

    from fusedseg import compiler
    from fusedseg.integrations import monai as plugin

    torch.manual_seed(0)
    net = BasicUNetPlusPlus(2, 1, 2, features=(4, 4, 8, 8, 16, 4)).double()
    x = torch.randn(1, 1, size, size, dtype=torch.float64)
    found = []
    for call in (net, torch.compile(net, backend="fusedseg", options={"codegen": "aten"})):
        torch.manual_seed(1)
        (out,) = call(x)
        found.append(torch.autograd.grad(out.square().mean(), list(net.parameters()), allow_unused=True))
        plugin.in_one_graph()
    assert [grad is None for grad in found[0]] == [grad is None for grad in found[1]]
    # Backward of a norm adds its sums in another order than PyTorch's.  Biases before norms have gradients of rounding.
    stock, ours = (torch.cat([grad.flatten() for grad in grads if grad is not None]) for grads in found)
    assert (ours - stock).norm() <= 1e-12 * stock.norm()
    report = compiler.report(call)
    assert len(report.graphs) == 1
    eager, kept = report.kept
    assert kept <= 0.44 * eager
