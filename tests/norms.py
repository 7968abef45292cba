"""Random norms with an activation, and the float64 reference of their outputs, gradients and running statistics."""

import random
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fusedseg.activation import TABLE
from fusedseg.functional import inplace_abn, inplace_group_norm_act, inplace_instance_norm_act, norm_act
from tests import reference
from tests.reference import PARAMS
from tests.tools.tensors import channels_last

# The rows of the table, and two other parameters.
ACTIVATIONS: dict[str, tuple[str, float]] = {name: (name, PARAMS.get(name, 0.0)) for name in TABLE}
ACTIVATIONS |= {"negative slope": ("leaky_relu", -0.2), "shared slope": ("prelu", 0.0)}
INVERTIBLE = [name for name in ACTIVATIONS if name in TABLE and TABLE[name].inverse is not None]
# An output that is rounded to half precision lies on the other side of a kink now and then.
SMOOTH = ("elu", "celu", "selu", "silu", "gelu", "gelu_tanh", "mish", "softplus", "identity")
SLOPES = (0.25, -0.1, 1.5)
# Statistics of the values of a batch, of a sample and of a group; and those that are given.
KINDS = ("batch", "instance", "group", "given")
# The last two have more values in a plane than one of the tests' small tiles; vectors begin anywhere in the last one.
SHAPES = ((2, 7), (3, 2, 5), (2, 3, 2, 3), (1, 3, 4), (2, 1, 9), (3, 8, 8), (2, 11, 13), (1, 17, 19))
# Without positions; samples have no statistics there.
VECTORS = (9,)


class Case(NamedTuple):
    """One norm.

    Attributes:
        keep: what backward gets, "input" or "output".
        kind: one of KINDS; with ``of_samples`` the given statistics are those of an instance norm.
        affine: whether there is a weight, and a bias.
        parameters: the dtype of both, and of running statistics.
        rows: whether x is in channels_last.
    """

    keep: str
    kind: str
    of_samples: bool
    activation: str
    shape: tuple[int, ...]
    groups: int
    rows: bool
    dtype: torch.dtype
    parameters: torch.dtype
    affine: tuple[bool, bool]
    residual: bool

    @property
    def norm(self) -> str:
        return self.kind if self.kind != "given" else "instance" if self.of_samples else "batch"

    @property
    def own(self) -> bool:
        return self.kind != "given"

    @property
    def statistics(self) -> int | None:
        """The groups of a sample with statistics of their own; None for statistics of the batch."""
        return {"batch": None, "instance": self.shape[1], "group": self.groups, "given": None}[self.kind]


class Leaves(NamedTuple):
    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    residual: Tensor | None
    slope: Tensor | None

    @property
    def given(self) -> list[Tensor]:
        return [t for t in self if t is not None]


def drawn(seed: str, keep: str, kind: str, activation: str) -> Case:
    """The case of a seed."""
    pick = random.Random(f"{seed} {keep} {kind} {activation}")
    C = pick.choice((3, 6))
    shape = pick.choice([*SHAPES, *([VECTORS] if kind in ("batch", "given") else [])])
    dtype = pick.choice((torch.float64, torch.float64, torch.float32, torch.float16, torch.bfloat16))
    residual = pick.random() < 0.5
    if dtype.itemsize == 2 and (activation not in SMOOTH or (keep == "output" and residual)):
        # ``test_gradients_for_every_weight`` has outputs of half precision beside a residual, and their bounds.
        dtype = torch.float32
    parameters = pick.choice((torch.float32, dtype)) if dtype.itemsize == 2 else dtype
    affine = pick.choice(((True, True), (True, True), (False, False), (True, False), (False, True)))
    return Case(
        keep, kind, pick.random() < 0.5, activation, (shape[0], C, *shape[1:]), pick.choice((1, 3)),
        pick.random() < 0.5, dtype, parameters, affine, residual,
    )  # fmt: skip


def leaves(case: Case, device: torch.device | str = "cpu") -> tuple[Leaves, list[Tensor] | None]:
    """What a norm gets, and its running statistics.  One weight is 0, where no input can be found from the output."""
    C = case.shape[1]
    x, residual = (torch.randn(case.shape, dtype=torch.float64) * 2 + 0.5 for _ in range(2))
    if case.rows:
        x, residual = channels_last(x), channels_last(residual)
    weight = torch.tensor([1.0, -0.7, 0.0, 1.3, -1.1, 0.6], dtype=torch.float64)[:C]
    bias = torch.tensor([0.3, -0.2, 0.4, 0.0, -0.5, 0.1], dtype=torch.float64)[:C]
    slope = None
    if ACTIVATIONS[case.activation][0] == "prelu":
        slope = torch.tensor(SLOPES[:1] if case.activation == "shared slope" else SLOPES * (C // 3))
    made = Leaves(
        x.to(device, case.dtype),
        weight.to(device, case.parameters) if case.affine[0] else None,
        bias.to(device, case.parameters) if case.affine[1] else None,
        residual.to(device, case.dtype) if case.residual else None,
        None if slope is None else slope.to(device, case.parameters),
    )
    for t in made.given:
        t.requires_grad_()
    running = [torch.linspace(*ends, C).to(device, case.parameters) for ends in ((-0.5, 1.2), (0.5, 1.6))]
    return made, None if case.kind == "group" else running


def functional(case: Case, given: Leaves, running: list[Tensor] | None) -> Tensor:
    """The call of a norm; one that keeps its output writes over a copy of x."""
    name, param = ACTIVATIONS[case.activation]
    options: dict[str, Any] = {"weight": given.weight, "bias": given.bias, "residual": given.residual}
    chosen = TABLE[name].selected_by or (name, param if name in PARAMS else None)
    options["activation"], options["activation_param"] = chosen
    mean, var = running or (None, None)
    if case.keep == "input":
        groups = case.groups if case.norm == "group" else None
        options |= {"norm": case.norm, "num_groups": groups, "slope": given.slope, "momentum": 0.3}
        return norm_act(given.x, mean, var, training=case.own, **options)
    x = given.x * 1
    if case.norm == "group":
        return inplace_group_norm_act(x, case.groups, **options)
    if case.norm == "instance":
        return inplace_instance_norm_act(x, mean, var, use_input_stats=case.own, momentum=0.3, **options)
    return inplace_abn(x, mean, var, training=case.own, momentum=0.3, **options)


def stock(case: Case, given: Leaves, running: list[Tensor] | None) -> Tensor:
    """The functions of PyTorch that a norm stands for."""
    mean, var = running or (None, None)
    if case.norm == "group":
        y = F.group_norm(given.x, case.groups, given.weight, given.bias)
    elif case.norm == "instance":
        y = F.instance_norm(given.x, mean, var, given.weight, given.bias, case.own, 0.3)
    else:
        y = F.batch_norm(given.x, mean, var, given.weight, given.bias, case.own, 0.3)
    y = y if given.residual is None else y + given.residual
    name, param = ACTIVATIONS[case.activation]
    return reference.stock_activation(name, param if given.slope is None else given.slope)(y)


def exact(case: Case, given: Leaves, running: list[Tensor] | None, dz: Tensor) -> tuple[reference.Result, list[Tensor]]:
    """The output, the running statistics and the gradients of ``given.given``, in float64."""
    wide = Leaves(*(None if t is None else t.detach().cpu().double().requires_grad_() for t in given))
    name, param = ACTIVATIONS[case.activation]
    mean, var = running or (None, None)
    found = reference.norm_act(
        wide.x, wide.weight, wide.bias, mean, var, case.own, 0.3, activation=name,
        param=param if wide.slope is None else wide.slope, groups=case.statistics, residual=wide.residual,
    )  # fmt: skip
    return found, list(torch.autograd.grad(found.out, wide.given, dz.cpu().double()))
