"""The gradient errors of 8, 4 and 2 bits of the compiler backend beside those of bf16 autocast, on trained networks.

Errors are relative to the gradient in float64.  One rounding gives the error.  The mean over many roundings tells the
part of it that is a bias.  The backend refuses 2 bits; they are measured here only.  All cases are slow: each trains a
network and rounds hundreds of times.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import fusedseg
from examples.demo import slices, training
from examples.demo.problem import Problem
from fusedseg.compiler import settings
from fusedseg.ops.low_bit import graph
from fusedseg.ops.low_bit.graph import unpack_op
from fusedseg.unet import UNet
from fusedseg.unet.blocks import groups_of
from tests.hunt.rounding import share_of_bias

from .results import markdown

ROUNDINGS = 64
BITS = (8, 4, 2)
STEPS = 40
WIDTHS, BATCH = (8, 16, 32), 8
# Errors of the bits that users may ask for, as a share of that of bf16 autocast without bits.
MOST = {8: 0.2, 4: 2.2}
# The part of the squared error that may be a bias, where activations are linear on each side of 0.  The measurement
# itself has a noise of about .01.
MOST_BIAS = 0.02


class Case(NamedTuple):
    """A network: the module after a convolution, and whether its activation is a smooth function."""

    norm_act: Callable[[int], nn.Module]
    smooth: bool = False


def stock(norm: Callable[[int], nn.Module], act: Callable[[], nn.Module]) -> Callable[[int], nn.Module]:
    return lambda channels: nn.Sequential(norm(channels), act())


def group(channels: int) -> nn.Module:
    return nn.GroupNorm(groups_of(channels), channels)


def in_place_group(channels: int) -> nn.Module:
    return fusedseg.InPlaceGroupNormAct(groups_of(channels), channels)


CASES = {
    "BatchNorm, ReLU": Case(stock(nn.BatchNorm2d, nn.ReLU)),
    "InstanceNorm, LeakyReLU": Case(stock(functools.partial(nn.InstanceNorm2d, affine=True), nn.LeakyReLU)),
    "GroupNorm, ReLU": Case(stock(group, nn.ReLU)),
    "GroupNorm, SiLU": Case(stock(group, nn.SiLU), smooth=True),
    "`InPlaceABN`, LeakyReLU": Case(fusedseg.InPlaceABN),
    "`InPlaceGroupNormAct`, LeakyReLU": Case(in_place_group),
}


class Found(NamedTuple):
    """The error relative to the gradient, and the part of its square that is a bias; nan if it was not measured."""

    error: float
    bias: float = float("nan")


class Signs:
    """The signs that packed tensors have: how many, and how many of them are wrong."""

    count = wrong = 0

    def pack(self, t: Tensor, kink: Tensor | None, bits: int, unit: str, key: int) -> tuple[Tensor, Tensor, Tensor]:
        codes = PACK(t, kink, bits, unit, key)
        unpacked = unpack_op(*codes, kink, bits, unit, t.shape, t.stride())
        # A kink has a number for each channel, or for each channel of each sample.
        border = 0.0 if kink is None else kink.reshape(-1, t.shape[1], *[1] * (t.dim() - 2))
        self.count += t.numel()
        self.wrong += int(((unpacked >= border) != (t >= border)).sum())
        return codes


PACK = graph.pack


@contextmanager
def counted() -> Iterator[Signs]:
    """Counts the signs of all tensors that are packed, also in 2 bits."""
    signs = Signs()
    with mock.patch.object(graph, "pack", signs.pack), mock.patch.object(settings, "BITS", BITS):
        yield signs


def trained(case: Case, device: torch.device) -> tuple[nn.Module, Problem]:
    """A small U-Net after some steps of training on the brain template, in fp32."""
    size = dataclasses.replace(slices.SIZES["cpu"], widths=WIDTHS, batch=BATCH)
    problem = slices.problem(device, size)
    torch.manual_seed(0)
    net = UNet(1, len(problem.classes), widths=WIDTHS, norm_act=case.norm_act, plain=True).to(device)
    training.train(problem, {"net": net}, STEPS, plain={"net": True})
    return net.train(), problem


class Step:
    """Gradients of one batch that the network has not met."""

    def __init__(self, net: nn.Module, problem: Problem) -> None:
        self._net = net
        self._weight: Any = training.loss_of(True, problem).weight
        self._batch = problem.batch(torch.Generator().manual_seed(1))

    def gradients(
        self, times: int = 1, *, bits: int | None = None, dtype: torch.dtype = torch.float32, autocast: bool = False
    ) -> Tensor:
        """All gradients as one vector in float64, for each of ``times`` roundings."""
        net = copy.deepcopy(self._net).to(dtype)
        images = [image.to(dtype) for image in self._batch.images]
        loss_of = training.StockDiceCE(self._weight.to(dtype))
        run: Any = net
        if bits is not None:
            torch.compiler.reset()
            run = torch.compile(net, backend="fusedseg", options={"codegen": "aten", "bits": bits})

        def one() -> Tensor:
            with torch.autocast(images[0].device.type, torch.bfloat16, enabled=autocast):
                out = run(*images)
            loss = loss_of(out.to(dtype), self._batch.labels[:, None])
            return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))]).double()

        return torch.stack([one() for _ in range(times)])


def judged(gradients: Tensor, expected: Tensor) -> Found:
    """The errors of gradients with independent roundings."""
    squared = (gradients - expected).square().sum(1).mean()
    return Found((squared.sqrt() / expected.norm()).item(), share_of_bias(expected, gradients))


def measure(case: Case, device: torch.device) -> tuple[dict[str, Found], Signs]:
    net, problem = trained(case, device)
    step = Step(net, problem)
    (exact,) = step.gradients(dtype=torch.float64)

    def error(gradients: Tensor) -> Found:
        return Found(((gradients[0] - exact).norm() / exact.norm()).item())

    found = {"fp32": error(step.gradients()), "bf16": error(step.gradients(autocast=True))}
    with counted() as signs:
        for bits in BITS:
            found[f"{bits} bits"] = judged(step.gradients(ROUNDINGS, bits=bits), exact)
        found["bf16, 4 bits"] = judged(step.gradients(ROUNDINGS // 8, bits=4, autocast=True), exact)
    return found, signs


def table(results: dict[str, tuple[dict[str, Found], Signs]]) -> list[str]:
    head = ["network", "bf16"]
    for bits in BITS:
        head += [f"{bits} bits", "/ bf16", "bias² / error²"]
    rows = [[*head, "bf16, 4 bits", "signs", "wrong"]]
    for name, (found, signs) in results.items():
        row = [name, f"{found['bf16'].error:.4f}"]
        for bits in BITS:
            of = found[f"{bits} bits"]
            row += [f"{of.error:.4f}", f"{of.error / found['bf16'].error:.2f}", f"{of.bias:+.4f}"]
        rows.append([*row, f"{found['bf16, 4 bits'].error:.4f}", f"{signs.count:,}", str(signs.wrong)])
    return [f"gradient errors relative to float64, {ROUNDINGS} roundings", "", *markdown(rows[0], rows[1:])]


@pytest.fixture(scope="module")
def results(report):
    found: dict[str, tuple[dict[str, Found], Signs]] = {}
    yield found
    report.notes.append("\n".join(table(found)))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_errors(name, results, device):
    case = CASES[name]
    found, signs = results[name] = measure(case, device)
    print(f"\n{name}: {found}, {signs.wrong} of {signs.count} signs wrong")
    assert signs.wrong == 0
    for bits, most in MOST.items():
        of = found[f"{bits} bits"]
        assert of.error <= most * found["bf16"].error
        assert case.smooth or of.bias <= MOST_BIAS
