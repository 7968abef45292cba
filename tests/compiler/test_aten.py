"""The codegen "aten": eager mode's bits and fewer bytes, for stock networks."""

import copy

import pytest
import torch
from torch import nn

from tests.compiler.networks import beside_eager, compiled, kept, make, results, same


@pytest.mark.parametrize("name", ["two encoders", "3D U-Net"])
def test_bits_and_bytes(name):
    """Outputs, gradients and running statistics of two steps are eager mode's, and statistics move once a step.

    ``test_budget.py`` has the other networks, with budgets and without.
    """
    net, inputs = make(name)
    assert same(*beside_eager(net, inputs))
    assert kept(net, compiled(net), inputs) < 0.75 * kept(net, net, inputs)


def calls_of(step):
    """The calls of aten in a step, also those that ops make."""
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    return sum(row.count for row in profile.key_averages() if row.key.startswith("aten::"))


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.InstanceNorm2d, lambda channels: nn.GroupNorm(2, channels)])
def test_a_step_makes_about_as_many_calls_as_in_eager_mode(norm):
    """Backward of norms ran tile by tile in Python: a step of ResNet-50 with 4 channels took 3.5 times eager mode's."""
    layers = [layer for _ in range(4) for layer in (nn.Conv2d(4, 4, 1), norm(4), nn.ReLU())]
    net, x = nn.Sequential(*layers), torch.randn(2, 4, 8, 8)
    run = compiled(net)
    ours, eager = (calls_of(lambda call=call: call(x).square().mean().backward()) for call in (run, net))
    assert ours <= 1.2 * eager, (ours, eager)


@pytest.mark.parametrize(
    ("layer", "channels"), [(nn.Hardswish(), 8), (nn.PixelShuffle(2), 2), (nn.AdaptiveAvgPool2d(12), 8)], ids=str
)
def test_functions_that_are_not_marked_as_elementwise_run_again(layer, channels):
    """PyTorch does not mark these ops as elementwise, and the backend kept their results."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), layer, nn.Conv2d(channels, 4, 3))
    x = [torch.randn(2, 3, 16, 16)]
    assert same(*beside_eager(net, x))
    # Eager mode keeps the result of the layer, of the norm, and the outputs of both convolutions.
    assert kept(net, compiled(net), x) < 0.6 * kept(net, net, x)


MODES = [("nearest", 1), ("linear", 1), ("nearest", 2), ("nearest-exact", 2), ("bilinear", 2), ("bicubic", 2),
         ("trilinear", 3), ("area", 2)]  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "p"),
    [(torch.bfloat16, 0.1), (torch.float16, 0.1), (torch.float16, 0.3), (torch.float32, 0.3), (torch.bfloat16, 1.0)],
    ids=str,
)
def test_dropout_of_half_precision_has_the_bits_of_forward(dtype, p):
    """The bug: backward multiplied by 1 / (1 - p), which PyTorch's op on a CPU rounds to the dtype.

    So the gradient of the convolution behind it was that of another input, by 3e-3 in bf16.  The gradients before the
    dropout are those of PyTorch's ``native_dropout_backward``, which eager mode does not call on a CPU.
    """
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Dropout(p), nn.Conv2d(8, 4, 3)).to(dtype)
    x = [torch.randn(2, 3, 9, 9).to(dtype)]
    twin = copy.deepcopy(net)
    wanted = results(twin, torch.compile(twin, backend="aot_eager"), x)
    assert same(results(net, compiled(net), x), wanted)
    assert kept(net, compiled(net), x) < kept(net, net, x)


SIZES = ({"scale_factor": 2}, {"scale_factor": 1.7, "recompute_scale_factor": True}, {"size": 7})


# All sizes for one mode, and the others in turn.
@pytest.mark.parametrize(
    ("mode", "dims", "sizes"),
    [*((*of, SIZES[k % 3]) for k, of in enumerate(MODES)), *(("bilinear", 2, SIZES[k]) for k in (0, 2))],
)
def test_interpolation_has_eager_bits(mode, dims, sizes):
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    net = nn.Sequential(conv(2, 3, 3), nn.Upsample(mode=mode, **sizes), conv(3, 2, 1))
    assert same(*beside_eager(net, [torch.randn(2, 2, *(7,) * dims)], steps=1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_interpolation_has_eager_modes_dtype_under_autocast(dtype):
    net, x = nn.Upsample(scale_factor=2, mode="bilinear"), torch.randn(1, 2, 4, 4, dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = net(x), compiled(net)(x)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("pool", "layout"),
    [
        (nn.MaxPool2d(2), torch.contiguous_format),
        (nn.MaxPool2d(3, 2, 1), torch.contiguous_format),
        (nn.MaxPool2d(3, 2, 1), torch.channels_last),
        (nn.MaxPool2d(2, ceil_mode=True), torch.channels_last),
        (nn.MaxPool2d(3, 1, 1, 2), torch.contiguous_format),
    ],
    ids=str,
)
def test_pools_keep_a_byte(pool, layout):
    """ReLU makes ties in the windows; the gradient goes to the same position as in aot_eager."""
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), pool, nn.Conv2d(3, 2, 1)).to(memory_format=layout)
    x = [torch.randn(2, 2, 11, 9).to(memory_format=layout)]
    twin = copy.deepcopy(net)
    # In channels_last, aot_eager's convolutions have other bits than eager mode's.
    assert same(results(net, compiled(net), x), results(twin, torch.compile(twin, backend="aot_eager"), x))
    assert kept(net, compiled(net), x) < kept(net, net, x)


def test_views_of_channels_last_and_of_strange_strides():
    """A norm of a transposed tensor is not rebuilt from its statistics, which would multiply in another order."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.norm = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 2, 3), nn.BatchNorm2d(4)

        def forward(self, x):
            return self.b(torch.relu(self.norm(self.a(x).transpose(2, 3))))

    assert same(*beside_eager(Net(), [torch.randn(3, 2, 9, 7)]))


def test_a_view_of_one_sample_in_channels_last():
    """Seed 128: it has other strides than the graph said, and so the group norm raised in compiled code."""
    net, x = nn.GroupNorm(2, 4), torch.randn(1, 4, 8, 8).to(memory_format=torch.channels_last)

    def run(x):
        return net(x.view_as(x))

    # Eager mode's group norm copies the view, and so its sums have another order.
    torch.testing.assert_close(compiled(run)(x), run(x))


class Tokens(nn.Module):
    """A layer on tokens, as of attention, after which the image lies in channels_last, and group norms behind it."""

    def __init__(self):
        super().__init__()
        self.first, self.layer = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 8)
        self.norms = nn.ModuleList(nn.GroupNorm(4, 8) for _ in range(3))
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        x = self.layer(x.flatten(2).transpose(1, 2)).transpose(1, 2).view(x.shape)
        for norm, conv in zip(self.norms, self.convs, strict=True):
            x = conv(nn.functional.silu(norm(x)))
        return x


@pytest.mark.parametrize("options", [{}, {"bits": 8}, {"budget": 0.5}], ids=str)
def test_a_group_norm_keeps_channels_last_and_the_trace_does_not_know_it(options):
    """Backward took a view of what the trace calls contiguous, and raised, in diffusion networks with torch 2.14."""
    torch.manual_seed(0)
    found, expected = beside_eager(Tokens(), [torch.randn(2, 3, 32, 32)], **options)
    assert same(found, expected) or options
    for ours, eager in zip(found, expected, strict=True):
        assert (ours - eager).norm() <= 0.01 * eager.norm()


def test_batched_gradients():
    """A batched gradient was written over a tensor without a batch, or into ``grad_input``, which has no rule."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.SiLU(), nn.MaxPool2d(2), nn.Upsample(scale_factor=2))
    x, g = torch.randn(2, 3, 6, 6, requires_grad=True), torch.randn(3, 2, 4, 4, 4)

    def gradients(run):
        return torch.autograd.grad(run(x), [x, *net.parameters()], g, is_grads_batched=True)

    # The gradient of a bias before a norm is rounding alone.
    for ours, eager in zip(gradients(compiled(net)), gradients(net), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: (y, y.clone()),
        lambda x, y: (y.clone(), y.clone()),
        lambda x, y: (y[:1], y.clone().flatten()),
        lambda x, y: (y, x.flatten().clone()),
        lambda x, y: (y, y.unsafe_chunk(2)[0].clone()),
    ],
    ids=["value", "twice", "views", "argument", "unsafe_chunk"],
)
def test_a_copy_that_is_returned_has_its_own_memory(function):
    """It was the copied tensor itself: a write to one result changed the other, and a gradient came as None."""
    x = torch.randn(2, 3, requires_grad=True)
    found = compiled(lambda x: function(x, x.sin() * 2))(x)
    assert len({t.untyped_storage().data_ptr() for t in (x, *found)}) == 3
    wanted = function(x, x.sin() * 2)
    gradients = [torch.autograd.grad(sum(t.square().sum() for t in results), x)[0] for results in (found, wanted)]
    assert torch.equal(*gradients)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: (y.unsafe_chunk(2)[0].sigmoid(), y + x),
        lambda x, y: (nn.functional.fold(y, (7, 7), 3) + 1,),
    ],
    ids=["unsafe_chunk", "fold"],
)
def test_nothing_is_written_to_memory_of_ops_that_the_table_does_not_know(function):
    """A sigmoid of a part changed the whole; a sum lay in the memory of a fold, several times as large."""
    x = torch.randn(2, 36, 25)
    found = compiled(lambda x: function(x, x * 2))(x)
    assert same(found, function(x, x * 2))
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in found)
