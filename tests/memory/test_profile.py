"""``profile``: its rows, the keepers of tensors, the tensors alive at the peak, and a model that is not changed."""

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn.modules import module as modules
from torch.utils.checkpoint import checkpoint

from fusedseg.memory import curve, plan, profile
from fusedseg.memory.meter import measure
from fusedseg.unet import UNet
from tests.resnet import ResNet18

MEBIBYTE = 2**20
# Bytes of one activation of ``block``.
ACTIVATION = 2 * 8 * 16 * 16 * 4
X = (2, 3, 16, 16)


def block() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(8, 4, 1)
    )


def rows_of(report, name, hook_type="fwd"):
    return [row for row in report.rows if row.name == name and row.hook_type == hook_type]


def test_resnet18_rows_are_those_known():
    """The rows have the MiB of docs/design.md, at full size on tensors without values."""
    report = profile(ResNet18, (128, 3, 224, 224))
    forward = [row for row in report.rows if row.hook_type == "fwd" and row.layer_type not in ("Sequential",)]
    found = [(row.layer_type, round(row.mem_all_diff / MEBIBYTE, 1)) for row in forward]
    stem = [("Conv2d", 392.0), ("BatchNorm2d", 392.0), ("ReLU", 0.0), ("MaxPool2d", 294.0)]
    assert found[:4] == stem
    conv_bn = [("Conv2d", 98.0), ("BatchNorm2d", 98.0)]
    assert found[4:9] == [*conv_bn, ("ReLU", 0.0), *conv_bn]
    # The block's second ReLU writes over the sum, which was written over bn2's output.
    assert found[9] == ("ReLU", 0.0)
    assert report.saved / MEBIBYTE == pytest.approx(2708, rel=0.001)
    assert report.peak / MEBIBYTE == pytest.approx(2668, rel=0.01)
    indices = report.saved_by("kind")["pool indices"]
    assert indices == 196 * MEBIBYTE
    assert any("196.0 MiB → 24.5 MiB with fusedseg.MaxPool2d" in str(finding) for finding in report.findings())


def test_numbers_are_those_of_the_meter():
    x = torch.randn(X)
    footprint, report = measure(block(), x), profile(block(), x)
    assert (report.saved, report.peak) == (footprint.saved, footprint.peak)


def test_rows_follow_the_calls_and_backward_comes_in_reverse():
    report = profile(block(), torch.randn(X), label="run")
    forward = [row.name for row in report.rows if row.hook_type == "fwd"]
    backward = [row.name for row in report.rows if row.hook_type == "bwd"]
    assert forward == ["0", "1", "2", "3", "4", "(model)"]
    assert backward == ["4", "3", "2", "1", "0", "(model)"]
    assert [row.call_idx for row in report.rows] == list(range(len(report.rows)))
    assert {row.exp for row in report.rows} == {"run"}
    assert [row.layer_idx for row in report.rows][:3] == [0, 1, 1]
    for before, row in zip(report.rows, report.rows[1:], strict=False):
        assert row.mem_all_diff == row.mem_all - before.mem_all
        assert row.mem_cached_diff == row.mem_cached - before.mem_cached
        assert row.mem_cached >= row.mem_all
    # Kept activations are freed after their module's backward, so nothing is left for the first convolution.
    parameters = sum(p.nbytes for p in block().parameters())
    assert report.rows[-1].mem_all <= report.resident + parameters + 64


def test_who_keeps_what():
    report = profile(block(), torch.randn(X))
    assert sum(report.saved_by("module").values()) == report.saved
    assert sum(report.saved_by("op").values()) == report.saved
    assert report.saved_by("kind")["pool indices"] == ACTIVATION // 4 * 2
    assert report.saved_by("dtype")["int64"] == ACTIVATION // 4 * 2
    # Only the norm keeps the convolution's output; the ReLU and the pool keep the ReLU's output.
    of_norm = {"1": ACTIVATION + 64, "2": ACTIVATION / 2}
    kept = report.saved_by("module")
    assert {name: kept[name] for name in of_norm} == of_norm
    assert report.saved_by("op")["MaxPool2DWithIndices"] == ACTIVATION / 2 + ACTIVATION // 4 * 2
    with pytest.raises(ValueError, match="by must be one of module, op, dtype, kind, size, got 'layer'"):
        report.saved_by("layer")


def test_what_is_alive_at_the_peak_adds_up():
    report = profile(UNet(3, 4, widths=(4, 8, 16), plain=True), torch.randn(2, 3, 32, 32))
    for by in ("kind", "module", "op", "dtype", "size"):
        assert sum(report.peak_by(by).values()) == pytest.approx(report.peak)
    assert report.saved_by("kind")["concatenation"] == 2 * 4 * (32 * 32 * 8 + 16 * 16 * 16)
    assert {"enlarged maps", "concatenations", "max-pool indices"} <= {
        finding.what for finding in report.findings()
    } | {"enlarged maps"}


class Shared(nn.Module):
    """One module is called twice, one is nested, one argument has several tensors, and so has an output."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.again = self.conv
        self.outer = nn.Sequential(nn.Sequential(nn.ReLU()))

    def forward(self, pair):
        a, b = pair
        a = self.outer(self.conv(a))
        return {"first": self.again(a), "others": (b.exp(), a)}


def test_shared_modules_nested_calls_and_several_inputs_and_outputs():
    a, b = torch.randn(1, 4, 8, 8), torch.randn(1, 4, 8, 8, requires_grad=True)
    report = profile(Shared(), (a, b))
    assert len(rows_of(report, "conv")) == 2
    assert len(rows_of(report, "conv", "bwd")) == 2
    nested = [row.name for row in report.rows if row.name.startswith("outer")]
    assert nested[:3] == ["outer", "outer.0", "outer.0.0"]
    # Kept are the input a, the ReLU's output and exp's result.
    assert report.saved == 3 * a.nbytes
    assert b.grad is None


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.inner, self.use_reentrant = nn.Sequential(*block()[:3]), use_reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant, preserve_rng_state=False)


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["saved tensors", "reentrant"])
def test_a_checkpointed_region_keeps_its_input_and_is_seen_to_run_again(use_reentrant):
    x = torch.randn(X, requires_grad=True)
    report = profile(Checkpointed(use_reentrant), x)
    assert report.saved == x.nbytes
    again = [row.name for row in report.rows if row.hook_type == "fwd" and row.phase == "backward"]
    assert "inner.0" in again
    assert report.flops["recomputed"] == report.flops["forward"]
    assert 0.2 < report.recomputed < 0.6
    assert "recomputed" in {storage.kind for storage in report.storages}
    assert "runs calls of the forward again: +" in report.summary()


def test_autocast_halves_what_is_kept_and_its_weights_are_told_apart():
    x = torch.randn(2, 3, 32, 32)
    full, half = profile(block(), x), profile(block(), x, autocast=torch.bfloat16)
    kinds = half.saved_by("kind")
    assert kinds["activation"] < 0.6 * full.saved_by("kind")["activation"]
    # Both convolutions keep copies of their weights; backward does not need copies of the biases.
    weights = sum(p.numel() for name, p in block().named_parameters() if name in ("0.weight", "4.weight"))
    assert kinds["weight copies"] == 2 * weights
    assert not torch.is_autocast_enabled("cpu")


def test_the_models_own_hooks_do_not_hide_what_they_keep():
    class Offloaded(nn.Module):
        def forward(self, x):
            with torch.autograd.graph.saved_tensors_hooks(lambda t: (t.clone(),), lambda held: held[0]):
                return x.exp().sin()

    x = torch.randn(X, requires_grad=True)
    report = profile(Offloaded(), x)
    assert report.saved == 2 * x.nbytes
    assert list(report.saved_by("op")) == ["held otherwise"]


def test_an_optimizer_has_its_state_from_the_start_and_the_parameters_stay():
    net, x = block(), torch.randn(X)
    before = [p.clone() for p in net.parameters()]
    report = profile(net, x, optimizer=lambda params: torch.optim.Adam(params, lr=0.1, foreach=False))
    values = sum(p.nbytes for p in net.parameters())
    assert report.resident_by_kind()["optimizer state"] >= 2 * values
    assert report.resident_by_kind()["parameters"] == values
    assert "optimizer" in report.marks
    assert all(torch.equal(p, was) and p.grad is None for p, was in zip(net.parameters(), before, strict=True))


def test_the_model_is_left_as_it_was():
    net, x = nn.Sequential(*block(), nn.Dropout()), torch.randn(X)
    net(x).sum().backward()
    grads = [p.grad for p in net.parameters()]
    values = [grad.clone() for grad in grads]
    state = {name: value.clone() for name, value in net.state_dict().items()}
    random = torch.random.get_rng_state()
    # The profile runs twice, to show that the first run leaves nothing behind.
    for _ in range(2):
        profile(net, x, loss=lambda out, target: (out - target).square().mean(), targets=torch.zeros(2, 4, 8, 8))
    assert torch.equal(torch.random.get_rng_state(), random)
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    for p, grad, value in zip(net.parameters(), grads, values, strict=True):
        assert p.grad is grad
        assert torch.equal(grad, value)


class Raises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x):
        self.conv(x)
        raise KeyError("mine")


def test_a_model_that_raises_leaves_nothing_behind():
    net = nn.Sequential(nn.BatchNorm2d(3), Raises())
    net[0].weight.grad = grad = torch.ones(3)
    hooks = (
        modules._global_forward_hooks,
        modules._global_forward_pre_hooks,
        modules._global_forward_hooks_always_called,
    )
    before = [dict(of) for of in hooks]
    with pytest.raises(KeyError, match="mine"):
        profile(net, torch.randn(X))
    assert [dict(of) for of in hooks] == before
    assert all(not m._forward_hooks and not m._forward_pre_hooks and not m._backward_hooks for m in net.modules())
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert torch._C._len_torch_dispatch_stack() == 0
    assert net[0].weight.grad is grad
    assert int(net[0].num_batches_tracked) == 0


def test_a_model_that_catches_what_a_module_raises():
    class Catches(nn.Module):
        def __init__(self):
            super().__init__()
            self.bad, self.good = Raises(), nn.Conv2d(3, 4, 1)

        def forward(self, x):
            try:
                self.bad(x)
            except KeyError:
                return self.good(x)

    report = profile(Catches(), torch.randn(X))
    kept = report.saved_by("module")
    assert kept == {"good": torch.randn(X).nbytes}


def test_fused_modules_run_as_without_hooks():
    # If its children have hooks, ConvABN calls the children, and forms concatenations.
    net, x = UNet(3, 4, widths=(4, 8)), torch.randn(1, 3, 16, 16)
    assert profile(net, x).saved == measure(net, x).saved


def test_without_gradients_there_is_no_backward():
    with torch.no_grad():
        report = profile(block(), torch.randn(X))
    assert report.saved == 0
    assert all(row.hook_type != "bwd" for row in report.rows)
    assert "forward only" in str(report)


def test_tensors_that_are_no_buffers_count():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.randn(X)

        def forward(self, x):
            return x * self.table

    x = torch.randn(X, requires_grad=True)
    report = profile(Positions(), x)
    assert report.saved_by("kind") == {"constants": x.nbytes}


def test_thousands_of_modules():
    net, x = nn.Sequential(*(nn.ReLU() for _ in range(2_000))), torch.randn(4, requires_grad=True)
    report = profile(net, x)
    assert len(report.rows) == 3 * 2_001
    assert report.saved == 2_000 * 16


@pytest.mark.filterwarnings("ignore:Using .torch.compile.module.. when there are global hooks:UserWarning")
def test_compiled_modules_are_said_to_run_uncompiled():
    report = profile(torch.compile(block()), torch.randn(X))
    assert "uncompiled" in str(report)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: profile(torch.relu, x), TypeError, "model must be an nn.Module, got builtin_function_or_method"),
        (lambda x: profile(block(), x, targets=x), ValueError, "targets need a loss that takes them"),
        (lambda x: profile(block(), x, loss=lambda out: 1.0), TypeError, "loss must return a tensor, got float"),
        (lambda x: profile(block(), x, loss=lambda out: out), ValueError, r"scalar, got a tensor of shape \(2, 4"),
        (
            lambda x: profile(block(), x, optimizer=torch.optim.SGD(block().parameters())),
            TypeError,
            "as torch.optim.SGD or a function is",
        ),
        (lambda x: profile(block().to("meta"), x), ValueError, "must be on one device, got cpu, meta"),
    ],
    ids=["model", "targets", "loss type", "loss shape", "optimizer", "devices"],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call(torch.randn(X))


def test_fake_tensors_outside_their_mode():
    with FakeTensorMode():
        net, x = block(), torch.empty(X)
    assert profile(net, x).saved == profile(block(), torch.randn(X)).saved


@pytest.mark.parametrize("check_nan", [True, False])
def test_anomaly_mode(check_nan):
    """Backward looked for NaN in tensors without values, and raised DataDependentOutputException."""
    with FakeTensorMode():
        model, x = block(), torch.empty(X)
    steps = (block, X), (model, x), (block(), torch.randn(X))
    expected = [profile(*step) for step in steps]
    with torch.autograd.set_detect_anomaly(True, check_nan):
        found = [profile(*step) for step in steps]
        assert (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()) == (True, check_nan)
        plan(block, X[1:], budget=2**30)
        curve(block, X[1:])
    assert [(report.saved, report.peak) for report in found] == [(report.saved, report.peak) for report in expected]
