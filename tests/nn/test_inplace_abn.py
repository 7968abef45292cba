"""Compares the module with nn.BatchNorm and an activation: function, state and behaviour."""

import pytest
import torch
from torch import nn

import fusedseg
from fusedseg import InPlaceABN
from tests.nn.test_inplace_norm_act import assert_same_step, pair
from tests.tools.compiling import check_compiled_follows


@pytest.mark.parametrize(("dims", "shape"), [(1, (5, 4)), (1, (3, 4, 7)), (2, (2, 4, 5, 3)), (3, (2, 4, 3, 2, 2))])
@pytest.mark.parametrize(
    "options",
    [{}, {"affine": False}, {"track_running_stats": False}, {"momentum": None}, {"momentum": 0.3, "eps": 1e-2}],
    ids=str,
)
def test_training_and_eval_as_stock(backend, device, dims, shape, options):
    stock, ours = pair("batch", dims, **options)
    stock, ours = stock.to(device), ours.to(device)
    for _ in range(2):
        assert_same_step(stock, ours, torch.randn(shape, dtype=torch.float64, device=device))
    stock.eval()
    ours.eval()
    assert_same_step(stock, ours, torch.randn(shape, dtype=torch.float64, device=device))


@pytest.mark.parametrize("shape", [(2, 4, 5, 3), (2, 4, 96, 130)], ids=["one launch", "two launches"])
@pytest.mark.parametrize("cls", [InPlaceABN, fusedseg.BatchNormAct])
def test_batches_are_counted(backend, device, cls, shape):
    """If a kernel moves the running statistics, it also counts the batches, and autograd sees the change."""
    module = cls(4, dtype=torch.float64).to(device)
    count, x = module.num_batches_tracked, torch.randn(shape, dtype=torch.float64, device=device)
    for n in (1, 2):
        version = count._version
        module(x.clone())
        assert count.item() == n
        assert count._version > version
    module.eval()(x.clone())
    assert module.num_batches_tracked is count
    assert count.item() == 2


def test_batches_that_no_kernel_can_count(backend, device):
    module = InPlaceABN(4, dtype=torch.float64).to(device)
    module.num_batches_tracked = torch.zeros((), dtype=torch.int32, device=device)
    module(torch.randn(2, 4, 5, 3, dtype=torch.float64, device=device))
    assert module.num_batches_tracked.item() == 1


def test_parametrized_weight(device):
    """A parametrized weight is no longer in ``_parameters``, which the module reads first."""

    class Doubled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    stock, ours = pair("batch")
    with torch.no_grad():
        stock.weight.mul_(2)
    nn.utils.parametrize.register_parametrization(ours, "weight", Doubled())
    x = torch.randn(2, 4, 5, 3, dtype=torch.float64)
    torch.testing.assert_close(ours(x.clone()), nn.functional.leaky_relu(stock(x), 0.01))


@pytest.mark.parametrize("which", ["eval", "requires_grad"])
def test_frozen(backend, device, which):
    stock, ours = pair("batch")
    for module in (stock.to(device), ours.to(device)):
        module.requires_grad_(which == "eval")
        module.train(which != "eval")
    assert_same_step(stock, ours, torch.randn(2, 4, 5, 3, dtype=torch.float64, device=device))


def test_device_and_dtype_arguments():
    module = InPlaceABN(3, device="meta", dtype=torch.float16)
    assert module.weight.is_meta
    assert module.running_mean.dtype == torch.float16


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=lambda d: str(d)[6:])
def test_half_input_beside_fp32_or_half_parameters(backend, device, dtype):
    x = torch.randn(4, 3, 8, 8, device=device, dtype=dtype)
    expected = nn.LeakyReLU(0.01)(nn.BatchNorm2d(3, device=device)(x.float()))
    for module in (InPlaceABN(3), InPlaceABN(3).to(dtype)):
        z = module.to(device)(x.clone())
        assert z.dtype == dtype
        torch.testing.assert_close(z.float(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_sync_batchnorm_conversion_is_refused():
    with pytest.raises(RuntimeError, match=r"fusedseg\.InPlaceABN: .* call fusedseg\.convert_sync"):
        nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(InPlaceABN(3)))


def test_parameters_changed_between_calls_are_seen():
    module = InPlaceABN(3)
    x = torch.randn(2, 3, 4, 4)
    for change, count in (
        (lambda: nn.init.zeros_(module.weight), 3),
        (lambda: nn.init.ones_(module.weight), 0),
        (lambda: module.load_state_dict(module.state_dict() | {"weight": torch.tensor([1.0, 0.0, 1.0])}), 1),
        (lambda: setattr(module, "weight", nn.Parameter(torch.zeros(3))), 3),
    ):
        change()
        module(x.clone().requires_grad_() * 1)
        assert (module._kept.kept.count if module._kept.kept else 0) == count


# The graphs of both backends hold the same op, and strides can only be wrong in channels_last.
COMPILED = [
    ("aten", "aot_eager"),
    ("triton", "aot_eager"),
    pytest.param("aten", "inductor", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("backend", "compiler"), COMPILED, indirect=["backend"])
def test_compile_fullgraph_follows_eager(backend, device, compiler):
    """Several steps run, with channels that become kept and a state dict that is loaded in between."""
    elu = InPlaceABN(3, activation="elu", activation_param=1.0)
    eager = nn.Sequential(nn.Conv2d(2, 4, 3), InPlaceABN(4), nn.Conv2d(4, 3, 1), elu)
    eager.to(device, torch.float64, memory_format=torch.channels_last)
    batches = torch.randn(4, 2, 2, 8, 8, dtype=torch.float64, device=device)
    batches = [x.contiguous(memory_format=torch.channels_last) for x in batches]
    check_compiled_follows(eager, compiler, batches, {2: lambda net: net[1].weight[1].zero_()})


@pytest.mark.parametrize(
    ("attempt", "error", "text"),
    [
        (lambda: InPlaceABN(3, activation="relu"), ValueError, "fusedseg.InPlaceABN: activation 'relu' cannot be"),
        (lambda: InPlaceABN(3)(torch.randn(2, 4, 5)), ValueError, r"must have shape \(N, 3\) .* got \(2, 4, 5\)"),
        (lambda: InPlaceABN(3)(torch.randn(3)), ValueError, r"x must have shape \(N, 3\) .* got \(3,\)"),
        (lambda: InPlaceABN(3)("x"), TypeError, "fusedseg.InPlaceABN: x must be a tensor, got str"),
        (lambda: InPlaceABN(3)(torch.ones(2, 3, dtype=torch.int32)), TypeError,
         r"x must be float16, .* got torch.int32"),
        (lambda: InPlaceABN(3).to_norm(4), ValueError, "dims must be 1, 2 or 3, got 4"),
        (lambda: InPlaceABN(3, dtype=torch.complex64), TypeError, r"dtype must be float16, .* got torch.complex64"),
    ],
)  # fmt: skip
def test_refused(attempt, error, text):
    with pytest.raises(error, match=text):
        attempt()


def test_backend_is_checked():
    with pytest.raises(ValueError, match=r"fusedseg.backend must be one of auto, triton, aten, got 'cuda'"):
        fusedseg.backend = "cuda"
