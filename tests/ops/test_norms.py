"""Random norms beside float64: every activation, statistic, dtype and memory format, on each implementation.

``tests/norms.py`` draws the cases.
"""

import contextlib
import inspect

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import fusedseg
from fusedseg import _backend
from fusedseg.activation import TABLE, Activation
from fusedseg.functional import norm_act
from fusedseg.memory.meter import LiveBytes
from fusedseg.ops import reuse
from fusedseg.ops.norm import aten_norms, graph
from fusedseg.ops.norm import triton as norm_triton
from fusedseg.ops.norm.call import Norm
from fusedseg.ops.norm.stock import KINDS as OF_NAME
from tests.norms import ACTIVATIONS, INVERTIBLE, KINDS, SLOPES, Leaves, drawn, exact, functional, leaves, stock
from tests.reference import FORWARD_TOLERANCE, GRADIENT_TOLERANCE, PARAMS, relative_error, stock_activation
from tests.tools.cuda_rules import CudaRules
from tests.tools.spy import spied
from tests.tools.tensors import channels_last

# Cases of each activation.
DRAWS = {"aten": 3, "tiles": 2, "CUDA's rules": 1, "triton": 1, "triton, split": 1}
# The backends that take the most time: with them each activation has one of the statistics.
IN_PART = ("tiles", "triton, split")
# Aten cuts large tensors into tiles: a part of a plane, half a plane, or two planes of (8, 8).
TILES = (7, 32, 128)


@pytest.fixture(autouse=True)
def every_size(monkeypatch):
    """Backward writes over small gradients too, as it does over large ones that nobody else sees."""
    monkeypatch.setattr(reuse, "LEAST_BYTES", 1)


@pytest.fixture(params=DRAWS)
def backend(request, monkeypatch):
    """How the norm is computed: aten whole, in tiles, and as CUDA demands it; or Triton's kernels.

    Split, several programs of a kernel share a channel, as those of a large tensor do.
    """
    if "split" in request.param and request.config.getoption("--ptx"):
        pytest.skip("tests/ptx cannot execute exp of fp64 in loops; tests/kernels has split norms")
    if "triton" in request.param:
        request.getfixturevalue("small_tiles" if "split" in request.param else "needs_interpreter")
    monkeypatch.setattr(fusedseg, "backend", "triton" if "triton" in request.param else "aten")
    if request.param == "CUDA's rules":
        monkeypatch.setattr(_backend, "off_cpu", lambda t: True)
    return request.param


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keep", ["input", "output"])
def test_values_and_gradients(keep, kind, backend, device, monkeypatch):
    rules = CudaRules() if backend == "CUDA's rules" else contextlib.nullcontext()
    place = device if backend == "aten" or "triton" in backend else "cpu"
    activations = [*ACTIVATIONS] if keep == "input" else INVERTIBLE
    for activation in turn(activations, kind) if backend in IN_PART else activations:
        for number in range(DRAWS[backend]):
            tile = TILES[len(activation + kind) % 3 - number] if backend != "aten" else 2**60
            monkeypatch.setattr(aten_norms, "TILE", tile)
            monkeypatch.setattr(aten_norms, "TILE_GPU", max(tile, 32) if len(activation) % 2 else 2**60)
            case = drawn(f"{backend} {number}", keep, kind, activation)
            with rules:
                check(case, place, backend)
    if backend == "CUDA's rules" and kind != "group":
        assert "native_batch_norm" in rules.called


def turn(activations, kind):
    """Those of the activations whose turn this kind of statistics has."""
    return activations[KINDS.index(kind) :: len(KINDS)]


def check(case, device, backend):
    given, running = leaves(case, device)
    before, moved = [t.detach().clone() for t in given.given], [v.clone() for v in running or ()] or None
    # Now and then a gradient that is expanded, as that of a sum.
    expanded = case.affine == (True, True) and len(case.shape) > 2
    dz = torch.randn(1 if expanded else case.shape[0], *case.shape[1:], dtype=torch.float64)
    dz = dz.to(device, case.dtype).expand(case.shape)
    kept_dz, saved = dz.clone(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        z = functional(case, given, moved)
    wanted, gradients = exact(case, given, running, dz)
    # A sum of m values has an error of sqrt(m) roundings.
    rounding = (z.numel() / case.shape[1]) ** 0.5 * torch.finfo(case.parameters).eps / 2
    forward, backward = (max(of[case.dtype], rounding) for of in (FORWARD_TOLERANCE, GRADIENT_TOLERANCE))
    assert z.stride() == given.x.stride(), case
    assert relative_error(z, wanted.out) <= forward, case
    # An op that keeps its output keeps no input; an identity has no use for its residual.
    large = {t.data_ptr() for t in saved if t.numel() >= z.numel()}
    added = given.residual is not None and (case.keep == "output" or case.activation != "identity")
    expected = [z if case.keep == "output" else given.x, *([given.residual] if added else [])]
    assert large == {t.data_ptr() for t in expected}, case
    if running is not None and case.own:
        for mine, theirs in zip(moved, wanted[1:], strict=True):
            assert relative_error(mine, theirs) <= max(FORWARD_TOLERANCE[case.parameters], rounding), case
    # PyTorch 2.13 sums the rows of a group norm in another order.
    summed_alike = not (case.rows and case.kind == "group")
    if backend == "aten" and case.keep == "input" and summed_alike and torch.device(device).type == "cpu":
        bits_of_stock(case, given, running, z, moved)
    for v in moved or ():
        # Another forward pass may move them before backward.
        v.fill_(100.0)
    other = torch.randn_like(z).requires_grad_()
    # The addition passes the same gradient to both of its inputs.
    found = torch.autograd.grad(z + other, [*given.given, other], dz, retain_graph=True)
    assert torch.equal(found[-1], kept_dz), case
    assert torch.equal(dz, kept_dz), case
    assert all(map(torch.equal, given.given, before)), case
    for mine, theirs, leaf in zip(found, gradients, given.given, strict=False):
        assert mine.dtype == leaf.dtype, case
        assert relative_error(mine, theirs) <= backward, case
    # Nobody else sees the gradient of the product, so that backward writes over it.
    over = torch.autograd.grad(z * 1, given.given, dz, retain_graph=True)
    again = torch.autograd.grad(z, given.given, dz)
    assert all(map(torch.equal, found, again)), case
    assert all(map(torch.equal, found, over)), case
    # A residual of other strides, which alone needs a gradient.
    fixed = [None if t is None else t.detach() for t in given]
    if given.residual is not None:
        fixed[3] = fixed[3].mT.contiguous().mT.requires_grad_()
    twin = functional(case, Leaves(*fixed), None if running is None else [v.clone() for v in running])
    assert torch.equal(twin, z), case
    assert twin.stride() == given.x.stride(), case
    if given.residual is not None:
        (alone,) = torch.autograd.grad(twin, fixed[3], dz)
        assert relative_error(alone, found[3 - sum(t is None for t in given[:3])]) <= FORWARD_TOLERANCE[case.dtype], (
            case
        )


def bits_of_stock(case, given, running, z, moved):
    """Output and running statistics come from the functions that the stock modules call.

    InstanceNorm in channels_last agrees to rounding alone, and so do norms of signals and volumes: stock copies them.
    """
    if case.dtype.itemsize == 2 or (case.rows and (case.norm == "instance" or len(case.shape) != 4)):
        return
    theirs = [v.clone() for v in running or ()]
    assert torch.equal(z, stock(case, given, theirs or None)), case
    assert all(map(torch.equal, moved or [], theirs)), case


@pytest.mark.parametrize("kind", KINDS)
def test_the_op_of_compiled_graphs(kind, backend):
    """With the statistics that it returns, it gives the output again.  It computes what norms in eager mode compute."""
    rules = CudaRules() if backend == "CUDA's rules" else contextlib.nullcontext()
    for activation in turn([name for name, (of, _) in ACTIVATIONS.items() if not TABLE[of].learned], kind):
        case = drawn(f"graph {backend}", "input", kind, activation)._replace(of_samples=False)
        given, running = leaves(case)
        name, param = ACTIVATIONS[activation]
        over = OF_NAME[case.norm].over(case.groups)
        norm = Norm("input", Activation(name, param), momentum=0.3, own=case.own, over=over)
        dz, added = torch.randn(case.shape, dtype=torch.float64).to(case.dtype), given.residual is not None
        tensors = [None if t is None else t.detach() for t in (given.x, given.weight, given.bias, given.residual)]
        with rules:
            z, mean, rstd, *_ = graph.Forward(norm)(*tensors, *(running or (None, None)), None, None)
            # A norm of given statistics returns none: its gradient reads the mean and the variance.
            again = graph.Forward(norm)(*tensors, None, None, mean, rstd)[0] if case.own else z
            statistics = (mean, rstd) if case.own else running
            found = graph.Backward(norm, affine=True, of_residual=added)(dz, *tensors, *statistics)
        wanted, gradients = exact(case, given, running, dz)
        assert z.stride() == given.x.stride(), case
        for out in (z, again):
            assert relative_error(out, wanted.out) <= FORWARD_TOLERANCE[case.dtype], case
        mine = [t for t, leaf in zip(found, given, strict=False) if leaf is not None]
        for grad, theirs in zip(mine, gradients, strict=True):
            assert relative_error(grad, theirs) <= GRADIENT_TOLERANCE[case.dtype], case


TAILS = torch.tensor([-0.0, 0.0, 1e-42, -1e-42, 1e-30, -1e-30, 3.0, -3.0, 6.0, 7.0, -7.0, 30.0, -30.0, 200.0, -200.0,
                      1e30, -1e30, float("inf"), -float("inf"), float("nan"), 0.5, -0.5])  # fmt: skip


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_kinks_and_tails(activation):
    """y equals x, which holds zeros of both signs, kinks, subnormal and infinite values, and NaN."""
    name, param = ACTIVATIONS[activation]
    x = TAILS.repeat(3).view(1, 3, -1)
    slope = torch.tensor(SLOPES[:1] if activation == "shared slope" else SLOPES) if name == "prelu" else None
    word, of = TABLE[name].selected_by or (name, param if name in PARAMS else None)
    results = []
    for ours in (False, True):
        leaf = x.clone().requires_grad_()
        # This eps does not change a variance of 1; PyTorch 2.11 refuses 0.
        given = leaf, torch.zeros(3), torch.ones(3)
        if ours:
            z = norm_act(*given, eps=1e-30, activation=word, activation_param=of, slope=slope)
        else:
            # The stock norm turns minus zero into zero, so it runs here too.
            z = stock_activation(name, param if slope is None else slope)(F.batch_norm(*given, eps=1e-30))
        results.append((z, *torch.autograd.grad(z, leaf, torch.linspace(1, 2, x.numel()).view_as(x))))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(torch.signbit(found), torch.signbit(expected))


def test_instance_norm_by_running_statistics_needs_no_positions():
    x, running = torch.randn(5, 3), (torch.randn(3), torch.rand(3) + 0.5)
    expected = F.leaky_relu(F.instance_norm(x, *running, use_input_stats=False), 0.01)
    assert torch.equal(norm_act(x, *running, norm="instance"), expected)


# The shape, whether it lies in rows, and the dtype with the most bytes in units of x.
MEMORY = {
    "samples": ((2, 64, 128, 256), True, torch.float32, 1.2),
    "one sample": ((1, 64, 256, 256), False, torch.float16, 1.4),
    "one channel": ((1, 1, 1024, 1024), False, torch.float16, 1.4),
}
NORMS = ("batch", "instance", "group")


def of_kind(norm, x, groups, **options):
    return norm_act(x, None, None, training=True, norm=norm, num_groups=groups if norm == "group" else None, **options)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("shape", "rows", "dtype", "most"), MEMORY.values(), ids=MEMORY)
def test_backward_holds_one_tensor_beyond_dz(norm, shape, rows, dtype, most):
    """That is dx.  Tiles of backward have a sixteenth of the tensor or 2^18 elements; a few are alive at once, in fp32.

    Once a tile was two channels at least, and in channels_last the whole tensor.
    """
    x = torch.randn(shape, dtype=dtype)
    x = (channels_last(x) if rows else x).requires_grad_()
    z = of_kind(norm, x, min(32, shape[1]), activation="silu")
    dz = torch.randn_like(z)
    with LiveBytes() as live:
        torch.autograd.grad(z, x, dz)
    assert live.peak <= most * x.nbytes, live.peak / x.nbytes


@pytest.mark.parametrize("norm", NORMS)
def test_without_values_two_tiles_stand_for_all(norm, monkeypatch):
    """Gradients have the shapes of the inputs, and the peak is that of a real step where no tile has whole planes."""
    monkeypatch.setattr(aten_norms, "_plane_tiles", lambda x, norm: None)
    shape = (2, 12, 32, 64)
    peaks, tiles = [], spied(monkeypatch, aten_norms, "_tiles")
    for mode in (contextlib.nullcontext(), FakeTensorMode()):
        with mode:
            x, residual = (torch.empty(shape).requires_grad_() for _ in range(2))
            weight, bias, slope = (torch.ones(12).requires_grad_() for _ in range(3))
            options = {"weight": weight, "bias": bias, "slope": slope, "residual": residual}
            z = of_kind(norm, x, 6, activation="prelu", **options)
            dz = torch.empty(shape)
            with LiveBytes() as live:
                grads = torch.autograd.grad(z, [x, *options.values()], dz)
        assert [g.shape for g in grads] == [t.shape for t in (x, *options.values())]
        peaks.append(live.peak)
    assert [len(each) for each in tiles] == [12, 2]
    assert peaks[1] == pytest.approx(peaks[0], rel=0.005)


@pytest.mark.parametrize("name", ["forward", "recompute", "backward", "moments"])
def test_both_implementations_have_one_signature(name):
    mine, other = (inspect.signature(getattr(of, name)) for of in (norm_triton, aten_norms))
    assert mine == other
