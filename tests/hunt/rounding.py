"""How far gradients with the option "bits" are from eager mode's, beside a reference that rounds what it must.

The reference is eager mode in which the inputs of convolutions, and both factors of matrix products, are packed and
unpacked as the package does it.  Only the gradients of the other factors read them; all else is exact.  So the
reference has the error that no choice of what to pack can avoid.
"""

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fusedseg.compiler import backend
from fusedseg.compiler.plan import choose
from fusedseg.ops.low_bit import graph, reference
from fusedseg.ops.low_bit.spec import FEWEST_VALUES, ChannelLines

# The error may be this many times that of the reference,
TIMES = 3.0
# and below these errors a gradient counts as right, whatever the reference has: where the reference is exact, a norm or
# an activation may still read packed values, with an error of a few steps.  A step is 1 / 255 or 1 / 15 of the range of
# a group; ranges are about six standard deviations.
ALLOWED = {8: 0.1, 4: 0.6}
# A gradient counts relative to its own norm, or to this part of the mean norm of a parameter's gradient: a bias before
# a norm has a gradient of nothing but rounding.
FLOOR = 0.3
# The name of the input's gradient.
INPUT = "the input"
# So many roundings decide about an error that one of them has.
ROUNDINGS = 8
# The part of the squared error that may be bias: less than this over so many roundings, of a normal input.
BIASED, FOR_BIAS = 0.25, 16


def _positions(x: Tensor) -> Tensor:
    """The positions, in rows or points, as (1, 1, *positions) or (1, positions, 1)."""
    shape = (1, 1, *x.shape[2:]) if x.dim() == 4 else (1, x.shape[1], 1)
    return torch.arange(math.prod(shape), dtype=x.dtype).view(shape) / math.prod(shape)


INPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "tiny": lambda x: x * 1e-4,
    "huge": lambda x: x * 300,
    "half dimmed": lambda x: torch.where(_positions(x) < 0.5, x, x * 1e-4),
    # In each group of the grid.
    "columns dimmed": lambda x: torch.where(_positions(x) * 32 % 1 < 0.5, x, x * 1e-4),
    "nearly constant": lambda x: 1 + 1e-3 * x,
    "scaled": lambda x: x * 10 ** (5 * _positions(x) - 4),
    "spikes": lambda x: torch.where(x > 3, 300.0, x),
}


def scaled(network: nn.Module, seed: int = 0) -> nn.Module:
    """The network with parameters of a seed, of the sizes that networks begin with, so that values keep their size."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.dim() > 1:
                values /= max(math.prod(parameter.shape[1:]), 1) ** 0.5
            else:
                values = 0.3 * values + (not name.endswith("bias"))
            parameter.copy_(values)
    return network


class Eager(TorchFunctionMode):
    """Eager mode with right gradients of norms.

    On a CPU PyTorch's backward of a batch or instance norm is wrong for one sample whose gradient lies in rows: by
    140 % in seeds 102044 and 103103, with torch 2.13.0 and 2.14.1.
    """

    NORMS = (F.batch_norm, F.instance_norm, torch.batch_norm, torch.instance_norm)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function in self.NORMS and result.requires_grad:
            result.register_hook(lambda gradient: gradient.contiguous())
        return result


class Rounded(Eager):
    """Packs and unpacks what convolutions and matrix products keep."""

    PRODUCTS = (
        F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d, F.linear,
        torch.matmul, torch.bmm, torch.baddbmm, Tensor.matmul, Tensor.__matmul__,
    )  # fmt: skip

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits, self.keys = bits, 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function not in self.PRODUCTS:
            return super().__torch_function__(function, types, args, kwargs)
        with torch.autograd.graph.saved_tensors_hooks(self.rounded, lambda t: t):
            return function(*args, **(kwargs or {}))

    def rounded(self, t: Tensor) -> Tensor:
        # Parameters and small tensors are never packed.
        if t.grad_fn is None or t.numel() < FEWEST_VALUES or not t.is_floating_point():
            return t
        with torch._C.DisableTorchFunction(), torch.no_grad():
            dense = t.detach().clone()
            flat, place = dense.as_strided((t.numel(),), (1,)), dense.stride().index(1)
            # Images have groups of positions, and other tensors of rows.
            size = math.prod(t.shape[2:]) if t.dim() == 4 and dense.is_contiguous() else t.shape[place]
            lines = ChannelLines(t.numel() // size, size, 1)
            self.keys += 1
            reference.unpack(reference.pack(flat, lines, self.bits, self.keys, None), None, lines, self.bits, flat)
            return dense


Gradients = dict[str, Tensor]
Run = Callable[[Tensor], Tensor]


class Given(NamedTuple):
    """A network and an input, and what eager mode's gradients are."""

    network: nn.Module
    x: Tensor
    expected: Gradients

    def errors(self, run: Run, times: int) -> dict[str, float]:
        """The error of each gradient: the root of the mean square over several roundings."""
        norms = {name: value.norm().item() for name, value in self.expected.items()}
        own = [norm for name, norm in norms.items() if name != INPUT]
        floor = max(FLOOR * sum(own) / max(len(own), 1), 1e-300)
        each = [_step(run, self.network, self.x)[1] for _ in range(times)]
        return {
            name: sum((got[name] - value).norm().item() ** 2 / times for got in each) ** 0.5 / max(norms[name], floor)
            for name, value in self.expected.items()
        }

    def bias(self, run: Run) -> float:
        """Where one number makes most of the error, the share of few roundings may be large by chance."""
        right, share = _joined(self.expected), 0.0
        for times in (FOR_BIAS, 10 * FOR_BIAS):
            each = torch.stack([_joined(_step(run, self.network, self.x)[1]) for _ in range(times)])
            share = share_of_bias(right, each)
            if share < BIASED:
                break
        return share


def _joined(gradients: Gradients) -> Tensor:
    return torch.cat([gradient.flatten() for gradient in gradients.values()])


def _step(run: Run, network: nn.Module, x: Tensor) -> tuple[Tensor, Gradients]:
    """The output and all gradients of a step."""
    network.zero_grad()
    x = x.clone().requires_grad_()
    torch.manual_seed(1)
    with Eager() if run is network else nullcontext():
        out = run(x)
    weights = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(3))
    (out * (weights + 0.1 * out)).mean().backward()
    found = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
    return out.detach(), found | ({} if x.grad is None else {INPUT: x.grad})


def _compiled(network: nn.Module, **options: int) -> Run:
    torch._dynamo.reset()
    # Each network rounds alike, whichever ran before.
    graph._steps.clear()
    return torch.compile(network, backend=backend, dynamic=False, options={"codegen": "aten", **options})


def _reference(network: nn.Module, bits: int) -> Run:
    rounded = Rounded(bits)

    def run(x: Tensor) -> Tensor:
        with rounded:
            return network(x)

    return run


def share_of_bias(right: Tensor, each: Tensor) -> float:
    """The part of the squared error of independent roundings, (times, values), that is bias.

    An error below a millionth, which is that of exact values, counts as 0.
    """
    times, mean = len(each), each.mean(0)
    error = (each - right).square().sum(1).mean()
    if error <= 1e-12 * right.square().sum():
        return 0.0
    # The mean of independent errors has 1 / times of their variance.
    noise = (each - mean).square().sum() / (times - 1)
    return float(((mean - right).square().sum() - noise / times) / error)


class Found(NamedTuple):
    """The gradient with the largest error, this error, and the largest error of the reference; the share of bias."""

    name: str
    error: float
    reference: float
    bias: float = 0.0

    def is_wrong(self, bits: int) -> bool:
        """Also if the error is not a number."""
        return not (self.error <= max(TIMES * self.reference, ALLOWED[bits]) and self.bias < BIASED)


def worst_errors(network: nn.Module, shape: tuple[int, ...], bits: int) -> dict[str, Found]:
    """What is found for each input, but for those for which the norms of eager mode's gradients are not finite."""
    x, found = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2)), {}
    scaled(network)
    # What can be packed is packed, also where the step of so small a network keeps less, or peaks lower, without.
    with mock.patch.object(choose.StepBytes, "is_within", return_value=True):
        run = _compiled(network, bits=bits)
        for name, changed in INPUTS.items():
            out, expected = _step(network, network, changed(x))
            # Gradients of 1e200 are finite, and their norm is not: no error is relative to it.
            if all(value.norm().isfinite() for value in (out, *expected.values())):
                given = Given(network, changed(x), {key: value.clone() for key, value in expected.items()})
                found[name] = _judged(given, run, bits)
                if name == "normal":
                    found[name] = found[name]._replace(bias=given.bias(run))
    return found


def _judged(given: Given, run: Run, bits: int) -> Found:
    for times in (1, ROUNDINGS):
        errors = given.errors(run, times)
        name = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
        least = max(given.errors(_reference(given.network, bits), times).values())
        found = Found(name, errors[name], least)
        if not found.is_wrong(bits):
            return found
    # Eager mode's own rounding of float64 may be magnified as much.  Where all values are constant, as behind a ReLU
    # that leaves none, gradients are nothing else, and the input changes none of them.
    network = copy.deepcopy(given.network)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(1 + 1e-15 * torch.randn_like(parameter))
    moved = given._replace(network=network, x=given.x * (1 + 1e-15 * torch.randn_like(given.x)))
    return found._replace(reference=max(least, *moved.errors(network, 1).values()))


def rounded_error(make: Callable[[], nn.Module], shape: tuple[int, ...], bits: tuple[int, ...]) -> str | None:
    """How the gradients of a network with bits are wrong; None if they are right."""
    wrong = []
    for each in bits:
        try:
            found = worst_errors(make(), shape, each)
        except Exception as error:
            return f"only the compiled network raises: {type(error).__name__}: {error}"
        wrong += [
            f"{each} bits, {name}: {one.name} by {one.error:.2g}, and the reference by {one.reference:.2g}; "
            f"{one.bias:.2f} of the squared error is bias"
            for name, one in found.items()
            if one.is_wrong(each)
        ]
    return "\n".join(["a gradient differs too much", *wrong]) if wrong else None
