"""Every family of kernels with every dtype and memory format, on Triton and on aten, against float64 on the CPU.

Cases are computed twice, and must give the same bits.  The families of the losses and of packing stand in
``tests/ops``, with the same marker.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fusedseg.functional import (
    inplace_abn,
    inplace_group_norm_act,
    inplace_instance_norm_act,
    max_pool,
    norm_act,
    upsample,
)
from fusedseg.memory import SavedBytes
from tests import reference
from tests.ops import conv_abn_cases as convs
from tests.reference import FORWARD_TOLERANCE, GRADIENT_TOLERANCE, relative_error
from tests.tools.tensors import channels_last

pytestmark = pytest.mark.gpu
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp64": torch.float64}
by_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
by_format = pytest.mark.parametrize("rows", [False, True], ids=["contiguous", "channels_last"])

C, GROUPS = 6, 3
# Planes of odd sizes.  A GPU also takes planes of which several programs share a channel.
SHAPES = {"cpu": [(2, C, 9, 7)], "cuda": [(2, C, 9, 7), (2, C, 130, 257)]}
# Channels that are kept, because their weight is 0 or small beside their bias, and channels that are not.
WEIGHT, BIAS = torch.tensor([1.0, -1.0, 0.7, 1e-4, 0.0, 2.0]), torch.tensor([0.5, 3.0, -0.5, 0.5, 0.5, 0.0])
MEAN, VAR = torch.linspace(-0.5, 0.8, C), torch.linspace(0.6, 1.5, C)


class Norm(NamedTuple):
    """Statistics: the groups of the reference, and whether they are those of the input; whether there are others."""

    groups: int | None
    own: bool = True
    running: bool = False


NORMS = {
    "batch": Norm(None, running=True),
    "instance": Norm(C, running=True),
    "group": Norm(GROUPS),
    "eval": Norm(None, own=False, running=True),
}


def in_place(x: Tensor, name: str, running: list[Tensor], weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    """The norm that keeps its output, written over ``x``."""
    if name == "group":
        return inplace_group_norm_act(x, GROUPS, weight, bias, residual=residual)
    if name == "instance":
        return inplace_instance_norm_act(x, *running, weight, bias, residual=residual)
    return inplace_abn(x, *running, weight, bias, NORMS[name].own, residual=residual)


def exact(x: Tensor, name: str, running: list[Tensor], weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    """The norm that keeps its input, with an activation that has no inverse."""
    norm, own = NORMS[name], name if name in ("instance", "group") else "batch"
    groups = GROUPS if name == "group" else None
    return norm_act(x, *(running or (None, None)), weight, bias, norm.own, activation="silu", norm=own,
                    num_groups=groups, residual=residual)  # fmt: skip


class Form(NamedTuple):
    call: Callable[..., Tensor]
    activation: str
    param: float


FORMS = {"in place": Form(in_place, "leaky_relu", 0.01), "exact": Form(exact, "silu", 0.0)}


def away_from_the_kink(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, options: dict[str, Any]) -> Tensor:
    """A residual with which no value is near 0, where a rounding decides which side of an activation it is on."""
    y = reference.norm_act(x, weight, bias, residual=residual, **options | {"activation": "identity"}).out
    return torch.where(y.abs() < 0.25, residual + 0.5 * torch.where(y < 0, -1, 1), residual).to(residual.dtype)


class Step(NamedTuple):
    """What a call returned, its gradients, the running statistics after it, and the bytes that autograd kept."""

    z: Tensor
    grads: tuple[Tensor, ...]
    running: list[Tensor]
    kept: int

    @property
    def tensors(self) -> list[Tensor]:
        return [self.z, *self.grads, *self.running]


def step(call: Callable[..., Tensor], dz: Tensor, leaves: list[Tensor], running: list[Tensor]) -> Step:
    """``call`` gets copies of the leaves, because it may overwrite them."""
    leaves = [t.detach().clone().requires_grad_() for t in leaves]
    running = [t.clone() for t in running]
    x = leaves[0] * 1
    before = x.data_ptr()
    with SavedBytes(leaves[1:]) as saved:
        z = call(x, running, *leaves[1:])
    assert z.data_ptr() == before or call is not in_place
    return Step(z.detach().clone(), torch.autograd.grad(z, leaves, dz), running, saved.nbytes)


def check_same_bits(first: Step, second: Step) -> None:
    for a, b in zip(first.tensors, second.tensors, strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()


@pytest.mark.parametrize("name", FORMS)
@by_format
@by_dtype
def test_norm(backend, device, dtype, rows, name):
    """Values, gradients of all arguments, running statistics, strides and kept bytes of each kind of statistics."""
    form = FORMS[name]
    of = dtype if dtype == torch.float64 else torch.float32
    for shape, (kind, norm) in itertools.product(SHAPES[device.type], NORMS.items()):
        x, residual, dz = torch.randn(3, *shape, dtype=torch.float64)
        # The residual has the size that the choice of kept channels assumes.  The sum of dz * x is not near 0, so that
        # its relative error says something.
        x, residual, dz = (t.to(dtype) for t in (2 * x, residual, dz + x / 2))
        weight, bias = WEIGHT.to(of), BIAS.to(of)
        running = [t.to(of) for t in (MEAN, VAR)] if norm.running else []
        options = {"groups": norm.groups, "training": norm.own, "activation": form.activation, "param": form.param}
        options |= dict(zip(("running_mean", "running_var"), running, strict=False))
        residual = away_from_the_kink(x, weight, bias, residual, options)
        # A sum of m values has an error of sqrt(m) roundings.
        rounding = (x.numel() / C) ** 0.5 * torch.finfo(of).eps / 2
        forward, backward = (max(table[dtype], rounding) for table in (FORWARD_TOLERANCE, GRADIENT_TOLERANCE))
        expected = reference.norm_act(x, weight, bias, residual=residual, **options)
        wanted = reference.gradients(dz, x, weight, bias, residual, **options)

        x, residual, dz = (channels_last(t) if rows else t for t in (x, residual, dz))
        given = [t.to(device) for t in (x, weight, bias, residual)]
        moved = [t.to(device) for t in running]

        def call(x, running, weight, bias, residual, kind=kind):
            return form.call(x, kind, running, weight, bias, residual)

        found = step(call, dz.to(device), given, moved)
        assert found.z.dtype == dtype
        assert found.z.stride() == found.grads[0].stride() == found.grads[3].stride() == x.stride()
        assert relative_error(found.z, expected.out) <= forward, (shape, kind)
        for argument, mine, theirs in zip(("x", "weight", "bias", "residual"), found.grads, wanted, strict=True):
            assert relative_error(mine, theirs) <= backward, (shape, kind, argument)
        for mine, theirs in zip(found.running, (expected.running_mean, expected.running_var), strict=False):
            assert relative_error(mine, theirs) <= max(FORWARD_TOLERANCE[of], rounding), (shape, kind)
        # The output or the input, the residual, three kept channels at most, and statistics.
        assert found.kept <= (2 + 3 / C) * x.nbytes + 1024, (shape, kind)
        check_same_bits(found, step(call, dz.to(device), given, moved))


POOLS = {
    "halving": ((2, 3, 8, 6), (2,)),
    "overlapping": ((2, 3, 9, 7), (3, 2, 1)),
    "volume": ((1, 2, 5, 4, 6), (3, 2, 1, 1, True)),
}


@by_format
@by_dtype
def test_max_pool(backend, device, dtype, rows):
    """A pool picks values, and its gradient adds the few windows of a position.  One byte a window is kept."""
    for name, (shape, arguments) in POOLS.items():
        stock = F.max_pool2d if len(shape) == 4 else F.max_pool3d
        # Many values are equal: the first one of a window wins.
        x = torch.randint(-3, 4, shape).to(dtype)
        leaf = x.double().requires_grad_()
        expected = stock(leaf, *arguments)
        dz = torch.randn(expected.shape, dtype=torch.float64).to(dtype)
        (wanted,) = torch.autograd.grad(expected, leaf, dz.double())
        given = (channels_last(x) if rows else x).to(device)

        def call(x, running, arguments=arguments):
            return max_pool(x, *arguments)

        found = step(call, dz.to(device), [given], [])
        assert torch.equal(found.z.cpu().double(), expected)
        assert found.z.movedim(1, -1).is_contiguous() if rows else found.z.is_contiguous()
        assert relative_error(found.grads[0], wanted) <= FORWARD_TOLERANCE[dtype]
        assert found.grads[0].stride() == given.stride()
        assert found.kept <= expected.numel()
        # PyTorch's own backward adds the gradients of overlapping windows by atomics on a GPU.
        if backend == "triton" or name == "halving":
            check_same_bits(found, step(call, dz.to(device), [given], []))


@by_format
def test_convolution(backend, device, rows):
    """The format of the output, and the same bits in two steps; ``tests/ops/test_conv_abn.py`` compares values."""
    case = convs.CASES["2d"]
    given = convs.inputs(case, torch.float16, device, "channels_last" if rows else "contiguous", params=torch.float32)
    for training in (True, False):
        steps = []
        for _ in range(2):
            running = convs.running(case, torch.float32, device)
            z = convs.fused(given, backend, training, running, case)
            dz = torch.linspace(-1, 1, z.numel(), device=device).view_as(z).to(z.dtype)
            steps.append([z, *running, *torch.autograd.grad(z, given.given, dz)])
        assert z.stride() == (channels_last(z) if rows else z.contiguous()).stride()
        assert steps[0][3].stride() == given.x.stride()
        assert all(map(torch.equal, *steps))


# Ours, beside what it computes.
STRIDED = {
    "max-pool": (lambda x: max_pool(x, 3, 2, 1), lambda x: F.max_pool3d(x, 3, 2, 1)),
    "max-pool without a batch": (lambda x: max_pool(x[0], 3, 2, 1), lambda x: F.max_pool2d(x[0], 3, 2, 1)),
    "in place": (
        lambda x: inplace_abn(x * 1, None, None, training=True),
        lambda x: reference.norm_act(x).out,
    ),
    "exact": (
        lambda x: norm_act(x, None, None, norm="group", num_groups=3),
        lambda x: reference.norm_act(x, groups=3).out,
    ),
}


@pytest.mark.parametrize("name", STRIDED)
def test_other_strides(backend, device, name):
    """An input that is neither contiguous nor channels_last, and a gradient that is expanded from one number.

    aten's pool of such an input found indices with strides that CUDA's kernel does not expect, and wrote outside.
    """
    base, results = torch.randn(4, 3, 5, 6, 2, dtype=torch.float64), []
    for f, to in zip(STRIDED[name], (device, "cpu"), strict=True):
        leaf = base.to(to).permute(4, 1, 0, 3, 2).requires_grad_()
        z = f(leaf)
        results.append((z.cpu(), torch.autograd.grad(z.sum(), leaf)[0].cpu()))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


MAPS = {
    "image": ((1, 16, 5, 8), (10, 16), False),
    "corners": ((2, 3, 4, 9), (7, 20), True),
    "volume": ((1, 8, 3, 4, 4), (6, 8, 8), False),
    "volume-odd": ((1, 3, 3, 2, 3), (5, 2, 7), False),
    "pixel": ((3, 8, 1, 1), (5, 7), False),
}


@by_format
@by_dtype
def test_upsample(backend, device, dtype, rows):
    """Values and gradients of linear upsampling; equal bits from the kernels."""
    for name, (shape, size, corners) in MAPS.items():
        x = torch.randn(shape).to(dtype)
        leaf = x.double().requires_grad_()
        mode = {2: "bilinear", 3: "trilinear"}[len(size)]
        expected = F.interpolate(leaf, size, mode=mode, align_corners=corners)
        dy = torch.randn(expected.shape, dtype=torch.float64).to(dtype)
        (wanted,) = torch.autograd.grad(expected, leaf, dy.double())
        given, dy = ((channels_last(t) if rows else t).to(device) for t in (x, dy))

        def call(x, running, size=size, corners=corners):
            return upsample(x, size, align_corners=corners)

        found = step(call, dy, [given], [])
        # PyTorch's own kernels add half precision in half precision on a CPU.
        if backend == "triton":
            assert relative_error(found.z, expected) <= FORWARD_TOLERANCE[dtype], name
            assert relative_error(found.grads[0], wanted) <= FORWARD_TOLERANCE[dtype], name
            assert found.kept == 0
            check_same_bits(found, step(call, dy, [given], []))
        assert found.z.stride() == dy.stride() or name == "pixel"
