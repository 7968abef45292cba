"""Cases, data, references and report for the benches of a norm and its activation as a single layer."""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.reference import FORWARD_TOLERANCE, GRADIENT_TOLERANCE, gradients, norm_act

from .contenders import BATCH_NORM, INSTANCE_NORM, aggressive, compiled, uncompiled
from .data import DTYPES, Source, describe, parametrize_pairs
from .harness import Copy, Result, Timing, compete
from .jobs import LayerJob, Treat, as_it_is
from .replay import report_step
from .results import COPY, Report, Section

GROUPS = 8
# Wider than the errors that fp32 statistics cause in y.
KINK = 1e-4


class NormCase(NamedTuple):
    """norm: "batch", "instance" or "group"."""

    norm: str
    shape: tuple[int, ...]
    dtype: str
    channels_last: bool = False

    def __str__(self) -> str:
        return f"{self.norm} {describe(*self[1:])}"

    @property
    def groups(self) -> int | None:
        return {"batch": None, "instance": self.shape[1], "group": GROUPS}[self.norm]

    @property
    def dims(self) -> int:
        return len(self.shape) - 2


def stock_norm(case: NormCase) -> nn.Module:
    C = case.shape[1]
    if case.norm == "group":
        return nn.GroupNorm(GROUPS, C)
    return BATCH_NORM[case.dims](C) if case.norm == "batch" else INSTANCE_NORM[case.dims](C, affine=True)


def layer_of(build: Callable[[int], Callable[[int], nn.Module]]) -> Callable[[NormCase], nn.Module]:
    """The layer of a case, from a function of dimensions that returns a function of channels."""
    return lambda case: build(case.dims)(case.shape[1])


def beside_stock(
    activation: Callable[[], nn.Module], ours: Callable[[NormCase], nn.Module]
) -> dict[str, tuple[Callable[[NormCase], nn.Module], Treat]]:
    """Contenders: the stock norm and activation in eager mode and compiled both ways, and our layer."""

    def stock(case: NormCase) -> nn.Module:
        return nn.Sequential(stock_norm(case), activation())

    return {
        "eager": (stock, as_it_is),
        "compiled": (stock, compiled),
        "aggressive": (stock, aggressive),
        "ours": (ours, as_it_is),
    }


def make_data(case: NormCase, device: torch.device) -> dict[str, Tensor]:
    source, channels = Source(device), case.shape[1]
    # The weight is positive, because inplace_abn takes its absolute value.
    weight, bias = source.uniform(channels, 0.5, 1.5), source.uniform(channels, -0.5, 0.5)
    x, dz = source.normal(*case[1:]), source.normal(*case[1:])
    # Rounding may move a y near the kink to the other slope, which would count as an error; its dz is 0.
    y = norm_act(x, weight, bias, activation="identity", groups=case.groups).out
    dz.masked_fill_(y.abs() < KINK, 0)
    return {"x": x.requires_grad_(), "dz": dz, "weight": weight, "bias": bias}


def expected(case: NormCase, data: dict[str, Tensor], slope: float) -> dict[str, Tensor]:
    """The float64 results of the norm and leaky_relu with that slope; with a slope of 0 it is relu."""
    x, weight, bias, dz = (data[name].detach() for name in ("x", "weight", "bias", "dz"))
    grads = gradients(dz, x, weight, bias, param=slope, groups=case.groups)
    assert grads.dweight is not None
    assert grads.dbias is not None
    out = norm_act(x, weight, bias, param=slope, groups=case.groups).out
    return {"z": out, "dx": grads.dx, "dweight": grads.dweight, "dbias": grads.dbias}


def contenders_of(case: NormCase, names: Iterable[str], compiled: Container[NormCase], kind: str) -> list[str]:
    """Those of ``names`` that compete in a case on "cpu" or "cuda".  Compilers do in the cases of ``compiled`` only.

    A norm and an activation alone have little that the aggressive compiler could recompute.  On a CPU it is left out,
    because a C++ compiler takes seconds for it.
    """
    if case not in compiled:
        return uncompiled(names)
    return [name for name in names if kind == "cuda" or name != "aggressive"]


def parametrize_norms(
    metafunc: pytest.Metafunc,
    names: Iterable[str],
    cases: Mapping[str, Sequence[NormCase]],
    more: Mapping[str, Sequence[NormCase]],
    compiled: Container[NormCase],
) -> None:
    """Parametrizes the cases of the device with their contenders.  Those in ``more`` are marked slow."""
    kind = torch.device(metafunc.config.getoption("--device")).type
    both = [(case, slow) for group, slow in ((cases, False), (more, True)) for case in group.get(kind, ())]
    parametrize_pairs(metafunc, [(case, contenders_of(case, names, compiled, kind), slow) for case, slow in both])


def compete_norms(
    case: NormCase,
    device: torch.device,
    contenders: Mapping[str, tuple[Callable[[NormCase], nn.Module], Treat]],
    slope: float,
    seconds: float,
    host_calls: int = 0,
) -> dict[str, Result]:
    """Lets layers of a case compete.

    ``contenders`` has, by name, the function that builds the layer of a case, and how it is treated.  ``slope`` is that
    of the activation.  ``host_calls``: see ``Timing``.
    """
    data, dtype = make_data(case, device), DTYPES[case.dtype]

    def build(name: str) -> LayerJob:
        layer, treat = contenders[name]
        return LayerJob(layer(case).to(device), data, treat)

    return compete(
        {name: partial(build, name) for name in contenders},
        {"": partial(expected, case, data, slope)},
        {"z": FORWARD_TOLERANCE[dtype], **dict.fromkeys(("dx", "dweight", "dbias"), GRADIENT_TOLERANCE[dtype])},
        # `bench/test_launch.py` measures the host's time of a launch, the other benches leave it out.
        Timing(device, seconds, ahead=device.type == "cuda", host_calls=host_calls),
        probes=None if host_calls else {COPY: Copy(data["x"])},
    )


def report_norm(
    report: Report, benchmark: Any, op: str, title: str, case: NormCase, results: dict[str, Result], contender: str
) -> None:
    section = report.section(op, Section(title))
    section.cases[str(case)] = results
    section.tensor_bytes[str(case)] = torch.Size(case.shape).numel() * DTYPES[case.dtype].itemsize
    report_step(benchmark, f"step of {case}", contender, results[contender])
