"""Convolutions of a converted model that read a concatenation, or that do the work of the norm after them."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

import fusedseg
from fusedseg.conversion import convs
from fusedseg.memory.fake import fake_mode
from fusedseg.memory.meter import measure
from fusedseg.ops.conv import sources
from fusedseg.scope import joins
from tests.conversion import networks
from tests.conversion.compare import assert_same, converted, pair, replaced


@pytest.fixture
def apart(monkeypatch):
    """Treats concatenations of any size as large."""
    monkeypatch.setattr(sources, "FORMED_BYTES", 0)


@pytest.fixture
def seen(monkeypatch):
    """The sources of each convolution of a concatenation, in the order of the calls."""
    found = []
    real = convs._LeanConv._joined

    def joined(self, sources, formed):
        # `convert` counts bytes on fake tensors; those calls do not count here.
        if not isinstance(formed, FakeTensor):
            found.append(sources)
        return real(self, sources, formed)

    monkeypatch.setattr(convs._LeanConv, "_joined", joined)
    return found


class Joins(nn.Module):
    """Convolves a concatenation of a skip and of a map of half the size that ``enlarge`` has enlarged."""

    def __init__(self, enlarge, act=nn.ReLU, **options) -> None:
        super().__init__()
        self.skip, self.down = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.enlarge = enlarge
        self.conv, self.bn, self.act = nn.Conv2d(12, 6, 3, padding=1, **options), nn.BatchNorm2d(6), act()

    def join(self, skip, up):
        return torch.cat([skip, up], dim=1)

    def forward(self, x):
        return self.act(self.bn(self.conv(self.join(self.skip(x), self.enlarge(self.down(x))))))


ENLARGE = {
    "bilinear": nn.Upsample(scale_factor=2, mode="bilinear"),
    "aligned": nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
    "nearest": lambda x: F.interpolate(x, scale_factor=2.0),
    "bicubic": lambda x: F.interpolate(x, size=(16, 16), mode="bicubic"),
    "area": lambda x: F.interpolate(x, scale_factor=(2, 2), mode="area"),
}


@pytest.mark.parametrize("act", [nn.ReLU, nn.LeakyReLU])
@pytest.mark.parametrize("enlarge", ENLARGE)
def test_neither_the_concatenation_nor_the_enlarged_tensor_is_needed(image, apart, seen, enlarge, act):
    _, report = converted(lambda: Joins(ENLARGE[enlarge], act), image)
    assert any(row.what.startswith("cat() + Conv2d") and row.paths[0] == "conv" for row in report.replaced)
    skip, up = seen[0]
    assert type(skip) is torch.Tensor
    assert type(up) is sources.Interpolated
    assert up.x.shape == (3, 4, 8, 8)


class Reduces(nn.Module):
    """Enlarges a map, and convolves it with a kernel of 1x1."""

    def __init__(self, enlarge, channels=4) -> None:
        super().__init__()
        self.down, self.bn = nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.BatchNorm2d(6)
        self.enlarge, self.conv = enlarge, nn.Conv2d(6, channels, 1)

    def forward(self, x):
        return self.conv(self.enlarge(F.relu(self.bn(self.down(x)))))


@pytest.mark.parametrize("enlarge", ENLARGE)
def test_the_gradients_of_a_pointwise_convolution_come_from_the_small_tensor(image, seen, enlarge):
    _, report = converted(lambda: Reduces(ENLARGE[enlarge]), image)
    assert [row.what for row in report.replaced if row.paths[0] == "conv"] == ["interpolate() + Conv2d"]
    assert seen
    assert all(source.x.shape == (3, 6, 8, 8) for sources in seen for source in sources)


def test_a_convolution_that_adds_channels_to_an_enlarged_tensor_is_left(image, seen):
    _, report = converted(lambda: Reduces(ENLARGE["bilinear"], 7), image)
    assert "conv" not in replaced(report)
    assert not seen


@pytest.mark.parametrize(
    "enlarge",
    [
        lambda x: F.interpolate(x, size=(16, 16), mode="bilinear", antialias=True),
        # 8 * 2.01 is no integer, so positions follow the factor and not the sizes.
        lambda x: F.interpolate(x, scale_factor=2.01, mode="bilinear"),
        nn.ConvTranspose2d(4, 4, 2, 2),
    ],
    ids=["antialias", "factor", "transposed convolution"],
)
def test_what_cannot_be_enlarged_later_is_a_source_as_it_is(image, apart, seen, enlarge):
    converted(lambda: Joins(enlarge), image)
    assert all(type(source) is torch.Tensor for source in seen[0])


class Overwrites(Joins):
    """Changes a source after the concatenation has read it."""

    def join(self, skip, up):
        out = torch.cat([skip, up], 1)
        skip.mul_(2.0)
        return out


class Changes(Joins):
    """Changes the concatenation."""

    def join(self, skip, up):
        return torch.cat([skip, up], 1).mul_(2.0)


@pytest.mark.parametrize("cls", [Overwrites, Changes])
def test_what_was_changed_is_not_taken_for_what_it_was(image, apart, seen, cls):
    converted(lambda: cls(ENLARGE["bilinear"]), image)
    assert not seen


@pytest.mark.parametrize("options", [{"groups": 2}, {"padding_mode": "reflect"}], ids=str)
def test_convolutions_whose_sources_cannot_be_told_apart(image, options):
    _, report = converted(lambda: Joins(ENLARGE["bilinear"], **options), image)
    assert "conv" not in replaced(report)


def test_concatenations_that_are_not_of_channels(image, apart, seen):
    class Batch(Joins):
        def join(self, skip, up):
            return torch.cat([torch.cat([skip, up], 1)] * 2)

    converted(lambda: Batch(ENLARGE["bilinear"]), image)
    assert not seen


def test_the_peak_goes_down():
    """On tensors without values, with a concatenation that is larger than the other tensors at the peak."""
    with fake_mode():
        model, x = Joins(ENLARGE["bilinear"]), torch.empty(2, 3, 512, 512)
        stock = measure(model, x)
        fusedseg.convert(model, example_inputs=x)
        ours = measure(model, x)
        model.conv.__class__ = nn.Conv2d
        scope_alone = measure(model, x)
    assert ours.saved == scope_alone.saved
    # The scope alone rebuilds the concatenation source by source.  Both peak in forward, which forms it for a moment.
    assert ours.peak <= scope_alone.peak < stock.peak


def test_a_join_under_autocast(image, apart, seen):
    x, outs = image.float(), []
    ours, stock = pair(Joins(ENLARGE["bilinear"]), x)
    for net in (ours, stock):
        with torch.autocast("cpu", torch.bfloat16):
            out = net(x)
        out.float().square().mean().backward()
        outs.append(out)
    assert seen
    assert outs[0].dtype == outs[1].dtype
    assert torch.allclose(outs[0].float(), outs[1].float(), atol=2e-2)
    for p, q in zip(ours.parameters(), stock.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, atol=2e-2 * q.grad.abs().max().item() + 1e-6)


# -- convolution, norm and activation as one op


@pytest.fixture
def one_op(monkeypatch):
    """Uses one op wherever it is possible; the convolutions that were computed by one op."""
    found = []
    real = convs.convolved_and_normalised

    def fused(op, conv, norm, sources):
        if not isinstance(sources[0], FakeTensor):
            found.append(conv)
        return real(op, conv, norm, sources)

    monkeypatch.setattr(convs, "pays", lambda x: True)
    monkeypatch.setattr(convs, "convolved_and_normalised", fused)
    return found


def leaky_unet() -> nn.Module:
    return networks.UNet(lambda: nn.LeakyReLU(0.2))


@pytest.mark.parametrize(
    "make",
    [leaky_unet, lambda: networks.double_conv(3, 8, nn.ELU()), lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.LeakyReLU(), nn.Conv2d(4, 4, 3, 2, padding=1), nn.BatchNorm2d(4),
        nn.Identity(), nn.LeakyReLU(0.3, inplace=True),
    )],
    ids=["unet", "elu", "biased"],
)  # fmt: skip
def test_one_op_is_the_same_function(image, one_op, make):
    model, report = converted(make, image)
    # A convolution of a concatenation keeps the sources instead.
    fused = {row.paths[0] for row in report.replaced if row.what.startswith("Conv2d + BatchNorm2d + ")}
    assert fused == {path for path, module in model.named_modules() if any(module is conv for conv in one_op)}
    for copied_by in (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))):
        model.zero_grad()
        copied = copied_by(model)
        one_op.clear()
        assert_same(copied, model, image)
        assert one_op
        assert all(any(conv is module for module in (*copied.modules(), *model.modules())) for conv in one_op)


def test_one_op_with_an_activation_module_that_follows_sums_too(image, one_op):
    model = networks.ResNet().double()
    fusedseg.convert(model, example_inputs=image, mode="leaky", slope=0.2)
    stock = fusedseg.revert(copy.deepcopy(model))
    assert_same(model, stock, image)
    assert len({*one_op}) == 5


@pytest.mark.parametrize("which", [0, 1])
def test_a_hook_that_is_added_later_sees_what_the_convolution_gives(image, one_op, which):
    model = networks.double_conv(3, 8, nn.LeakyReLU()).double()
    fusedseg.convert(model, example_inputs=image)
    seen = []
    if which == 0:
        model[0].register_forward_hook(lambda m, args, out: seen.append(out.detach().clone()))
    else:
        model[1].register_forward_pre_hook(lambda m, args: seen.append(args[0].detach().clone()))
    one_op.clear()
    model(image).sum().backward()
    assert not one_op
    assert torch.equal(seen[0], F.conv2d(image, model[0].weight, padding=1))


def test_one_small_volume_on_a_cpu_is_not_convolved_by_a_loop(monkeypatch):
    calls = []
    real = convs.convolved_and_normalised
    monkeypatch.setattr(convs, "convolved_and_normalised", lambda *args: calls.append(args[1]) or real(*args))
    make = lambda: nn.Sequential(nn.Conv3d(2, 4, 3, padding=1, bias=False), nn.BatchNorm3d(4), nn.LeakyReLU())  # noqa: E731
    model, report = converted(make, torch.randn(1, 2, 6, 6, 6), 1e-5)
    assert replaced(report) == {"0": "ConvABN3d(leaky_relu(0.01))"}
    assert model[0] in calls
    calls.clear()
    model(torch.randn(2, 2, 6, 6, 6)).sum().backward()
    assert not calls


def test_norms_that_other_convolutions_feed_too_stay_on_their_own(image, one_op):
    class Shares(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)
            self.bn, self.act = nn.BatchNorm2d(4), nn.LeakyReLU()

        def forward(self, x):
            return self.act(self.bn(self.a(x))) + self.act(self.bn(self.b(x)))

    _, report = converted(Shares, image)
    assert replaced(report) == {"bn": "InPlaceABN(leaky_relu(0.01))"}
    assert not one_op


# PyTorch warns that there is only one process.
@pytest.mark.filterwarnings("ignore")
def test_synchronised_norms_do_their_own_work(image, one_op):
    model = networks.double_conv(3, 8, nn.LeakyReLU()).double()
    fusedseg.convert(model, example_inputs=image)
    fusedseg.convert_sync(model)
    assert type(model[1]) is fusedseg.InPlaceABNSync
    stock = fusedseg.revert(copy.deepcopy(model))
    assert type(stock[1]) is nn.BatchNorm2d
    assert_same(model, stock, image)
    assert not one_op


def test_a_note_says_nothing_outside_of_the_scope():
    # Only the scope of a converted model takes notes, of tensors that are made in it.
    with fusedseg.recompute.of_converted():
        a = torch.randn(1, 2, 4, 4, requires_grad=True) * 1
        out = torch.cat([a, a], 1)
        assert joins.sources_of(out) is not None
        with torch.no_grad():
            assert joins.sources_of(out) is None
    assert joins.sources_of(out) is None


def test_deterministic_algorithms_note_no_enlarged_tensor():
    """PyTorch enlarges by another function then, and the backward of the usual one raises an error on a GPU."""
    x = torch.empty(1, 2, 4, 4, device="meta", requires_grad=True) * 1
    noted = []
    for wanted in (False, True):
        torch.use_deterministic_algorithms(wanted)
        try:
            with fusedseg.recompute.of_converted():
                noted.append(joins.sources_of(F.interpolate(x, (8, 8), mode="bilinear")) is not None)
        finally:
            torch.use_deterministic_algorithms(False)
    assert noted == [True, False]


class Grouped(nn.Module):
    """A grouped convolution and an ordinary one read the same concatenation, and norms follow both."""

    def __init__(self, **options):
        super().__init__()
        self.first = nn.Conv2d(3, 5, 3, padding=1)
        self.grouped = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, **options), nn.BatchNorm2d(8), nn.LeakyReLU())
        self.whole = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.LeakyReLU())

    def forward(self, x):
        both = torch.cat([x, self.first(x)], 1)
        return self.grouped(both) + self.whole(both)


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("options", [{"groups": 8}, {"padding_mode": "circular"}])
def test_a_convolution_before_a_norm_that_cannot_be_joined(options, image):
    """A grouped convolution once raised an error, because another convolution joins the same concatenation."""
    ours, stock = pair(Grouped(**options), image)
    expected, got = (torch.autograd.grad(net(image).square().mean(), [*net.parameters()]) for net in (stock, ours))
    torch.testing.assert_close(got, expected)
