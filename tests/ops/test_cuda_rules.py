"""The path without Triton under the rules of PyTorch's CUDA kernels (``tests/tools/cuda_rules.py``), on a CPU.

On an H100 that path had wrong outputs, wrong gradients, refused calls and one failed assertion in the device, where all
tests passed on a CPU.
"""

import pytest
import torch

import fusedseg
from fusedseg import _backend
from fusedseg.activation import Activation
from fusedseg.functional import max_pool
from fusedseg.ops.norm import aten_norms, stock
from fusedseg.ops.norm.call import BackwardCall, Exchange, Norm, Operands
from fusedseg.ops.norm.stock import KINDS
from tests import reference
from tests.ops import conv_abn_cases
from tests.ops.test_max_pool import CASES, STOCK, special
from tests.reference import FORWARD_TOLERANCE, GRADIENT_TOLERANCE, relative_error
from tests.tools.cuda_rules import CudaRules
from tests.tools.tensors import channels_last

C = 4
# Name -> groups of 4 channels; None takes the statistics of the batch, 0 takes given ones.
STATISTICS = {"batch": None, "given": 0, "instance": C, "groups of 2": 2, "one group": 1}
SHAPES = {"1d": (2, C, 7), "2d": (3, C, 2, 5), "3d": (2, C, 3, 2, 3), "one sample": (1, C, 3, 3)}
by_statistics = pytest.mark.parametrize("groups", STATISTICS.values(), ids=STATISTICS)
by_format = pytest.mark.parametrize("fmt", ["contiguous", "channels_last"])


@pytest.fixture
def rules(monkeypatch):
    """The aten path as on a GPU; the fixture's value notes which ops of the rules ran."""
    monkeypatch.setattr(fusedseg, "backend", "aten")
    monkeypatch.setattr(_backend, "off_cpu", lambda t: True)
    with CudaRules() as rules:
        yield rules


def laid(x, fmt):
    return channels_last(x) if fmt == "channels_last" else x.contiguous()


@pytest.mark.parametrize("keep", ["input", "output"])
@by_format
def test_norms_over_processes(rules, keep, fmt):
    """Processes exchange the sums of backward, which need a weight on CUDA although there is none."""
    x, dz = (laid(torch.randn(SHAPES["2d"], dtype=torch.float64), fmt) for _ in range(2))
    bias = torch.linspace(-0.4, 0.6, C, dtype=x.dtype)
    spec = Norm(keep, Activation("elu", 1.0), process_group="the processes of this test")
    var, mean = torch.var_mean(x, (0, 2, 3), correction=0)
    given, alone = Operands(x, None, bias, None, None, mean, var), spec._replace(own=False, process_group=None)
    z, stats = aten_norms.forward(given, alone, None, x.clone() if keep == "output" else None)
    saved = Operands(x if keep == "input" else z, None, bias)
    needs = (True, False, True, False, False)
    exchange = Exchange(lambda s1, s2: (s1, s2))
    dx, _, dbias, *_ = aten_norms.backward(BackwardCall(dz, saved, stats, spec, None, needs, exchange=exchange))
    settings = {"activation": "elu", "param": 1.0}
    exact = reference.gradients(dz, x, None, bias, **settings)
    assert relative_error(z, reference.norm_act(x, None, bias, **settings).out) <= FORWARD_TOLERANCE[x.dtype]
    assert relative_error(dx, exact.dx) <= GRADIENT_TOLERANCE[x.dtype]
    assert relative_error(dbias, exact.dbias) <= GRADIENT_TOLERANCE[x.dtype]


@by_statistics
@by_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_rebuilt_outputs(rules, groups, fmt, dtype):
    """Last bits may differ from those of forward, as CUDA multiplies by weight and rstd one after the other."""
    x = laid(torch.randn(SHAPES["2d"]).to(dtype), fmt)
    weight, bias = torch.tensor([[1.0, -0.7, 0.0, 1.3], [0.3, -0.2, 0.4, 0.0]])
    kind = {None: "batch", 0: "batch", C: "instance"}.get(groups, "group")
    spec = Norm("input", Activation("silu", 0.0), own=groups != 0, over=KINDS[kind].over(groups))
    running = (bias.clone(), bias + 1) if groups == 0 else (None, None)
    given = Operands(x, weight, bias, None, None, *running)
    z, stats = aten_norms.forward(given, spec, None, None)
    again = aten_norms.recompute(given, stats, spec, None)
    assert relative_error(again, z) <= FORWARD_TOLERANCE[dtype]


@pytest.mark.parametrize("kind", ["batch", "instance", "group"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_exported_norms_with_a_bias_alone(rules, kind, dtype):
    """PyTorch's own norms have no gradient on CUDA for a bias without a weight."""
    x = torch.randn(SHAPES["2d"]).to(dtype).requires_grad_()
    bias = torch.linspace(-0.4, 0.6, C, requires_grad=True)
    spec = Norm("input", Activation("elu", 1.0), over=KINDS[kind].over(2))
    z = stock.norm_act(Operands(x, None, bias), spec)
    dz = torch.randn_like(z)
    found = torch.autograd.grad(z, (x, bias), dz)
    groups = {"batch": None, "instance": C, "group": 2}[kind]
    exact = reference.gradients(dz, x, None, bias, activation="elu", param=1.0, groups=groups)
    for mine, theirs in zip(found, (exact.dx, exact.dbias), strict=True):
        assert relative_error(mine, theirs) <= GRADIENT_TOLERANCE[dtype]


@by_format
def test_convolutions_with_norms(rules, fmt):
    for training in (True, False):
        conv_abn_cases.check(conv_abn_cases.SMALL, "aten", torch.device("cpu"), fmt, torch.float32, training)


def check_pool(x, *arguments):
    """Compares values and gradients with the stock function of contiguous input."""
    dims = x.dim() - 2
    # ``clone`` would change the strides of dimensions of size 1.
    leaf, exact = x.detach().requires_grad_(), x.detach().contiguous().requires_grad_()
    z = max_pool(leaf, *arguments)
    expected = STOCK[dims](exact, *arguments)
    dz = torch.randn_like(expected)
    (dx,) = torch.autograd.grad(expected, exact, dz)
    torch.testing.assert_close(z, expected, rtol=0, atol=0, equal_nan=True)
    (found,) = torch.autograd.grad(z, leaf, dz)
    torch.testing.assert_close(found, dx)
    with torch.no_grad():
        torch.testing.assert_close(max_pool(leaf, *arguments), expected, rtol=0, atol=0, equal_nan=True)


@by_format
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_pools(rules, case, fmt):
    shape, *arguments = case
    check_pool(laid(torch.randn(shape), fmt), *arguments)
    check_pool(laid(special(shape), fmt), *arguments)
    assert len(rules.called) == 2


@pytest.mark.parametrize("shape", [(7, 6, 3), (5, 4, 6, 3)], ids=["2d", "3d"])
def test_pools_of_a_view_of_one_image(rules, shape):
    """Such a view is channels_last to every reader but the kernel, which asks for the strides of one sample too.

    The indices were those of other positions, at which an assertion in the device failed.
    """
    x = torch.randn(shape).movedim(-1, 0).unsqueeze(0)
    assert not x.is_contiguous()
    assert x.stride(0) < x.numel()
    check_pool(x, 3, 2, 1)
