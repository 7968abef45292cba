"""Norm, residual and activation as one op of a compiled graph, which keeps its input.

    z, mean, rstd, ... = norm_act(x, weight, bias, residual, running_mean, running_var, mean, rstd, ...)

computes z = phi(weight * (x - mean) * rstd + bias [+ residual]).  The mean and the rstd are found from x; given among
the arguments, they are used as they are, which is how backward computes z again.  In eval mode the running statistics
stand in their place.  The op keeps the memory format of x.

The op changes no argument: it returns moved copies of the running statistics.  Generated code calls ``Forward`` and
``Backward``, which may also write over an argument that nobody reads again, or move the running statistics where they
are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ...activation import TABLE, Activation
from ..layout import dense, like
from . import passes
from .call import Norm, Operands, OutputGradient, Statistics, cast, statistics_count, stats_dtype

# The arguments of ``flat`` in a schema.
_SPEC = "str activation, float activation_param, float eps, float momentum, bool own, str kind, SymInt groups"
# The arguments of ``norm_act``.
ARGUMENTS = (
    "Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, Tensor? running_mean, Tensor? running_var, "
    f"Tensor? mean, Tensor? rstd, {_SPEC}"
)


def flat(norm: Norm) -> tuple[Any, ...]:
    """What the op computes, as its last arguments."""
    return *norm.act, norm.eps, norm.momentum, norm.own, norm.kind, norm.groups


def norm_of(name: str, param: float, eps: float, momentum: float, own: bool, kind: str, groups: int) -> Norm:
    """The norm of the arguments of ``flat``."""
    return Norm("input", Activation(name, param), eps, momentum, own, kind, groups)


class NormCall(NamedTuple):
    """The arguments of ``norm_act`` by their names: tensors, or in a graph the nodes of tensors; None for no tensor."""

    norm: Norm
    x: Any
    weight: Any = None
    bias: Any = None
    residual: Any = None
    running_mean: Any = None
    running_var: Any = None
    mean: Any = None
    rstd: Any = None

    @classmethod
    def of(cls, node: object) -> "NormCall | None":
        """The call of a node of a graph, as the op or prepared (``Forward``); None for other nodes."""
        if not isinstance(node, fx.Node):
            return None
        if isinstance(node.target, Forward):
            return cls(node.target.norm, *node.args)
        return cls.of_arguments(node.args) if node.target is norm_act else None

    @classmethod
    def of_arguments(cls, call: Sequence[Any]) -> "NormCall":
        return cls(norm_of(*call[8:]), *call[:8])

    @property
    def of_samples(self) -> bool:
        """Whether each sample has statistics of its own."""
        return self.norm.kind != "batch"

    @property
    def tensors(self) -> tuple[Any, ...]:
        """What ``Forward`` is called with."""
        return self[1:]

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of the op."""
        return *self.tensors, *flat(self.norm)

    @property
    def reads(self) -> tuple[Any, ...]:
        """What z is computed from where the statistics are known: x, weight, bias, residual, and two vectors."""
        known = (self.mean, self.rstd) if self.norm.own else (self.running_mean, self.running_var)
        return self.x, self.weight, self.bias, self.residual, *known

    def with_act(self, act: Activation) -> "NormCall":
        return self._replace(norm=self.norm._replace(act=act))


class GradientCall(NamedTuple):
    """The arguments of ``norm_act_backward`` by their names, as ``NormCall`` has those of ``norm_act``.

    second: the rstd; in eval mode the running variance, and ``mean`` is the running mean.
    also: a second gradient of z, which only a prepared call (``Backward``) has.
    """

    norm: Norm
    affine: bool
    of_residual: bool
    dz: Any
    x: Any
    weight: Any
    bias: Any
    residual: Any
    mean: Any
    second: Any
    also: Any = None

    @classmethod
    def of(cls, node: object) -> "GradientCall | None":
        """The call of a node of a graph, as the op or prepared; None for other nodes."""
        if not isinstance(node, fx.Node):
            return None
        if isinstance(node.target, Backward):
            of = node.target
            return cls(of.norm, of.affine, of.of_residual, *node.args)
        return cls.of_arguments(node.args) if node.target is norm_act_backward else None

    @classmethod
    def of_arguments(cls, call: Sequence[Any]) -> "GradientCall":
        *spec, affine, of_residual = call[7:]
        return cls(norm_of(*spec), affine, of_residual, *call[:7])

    @property
    def tensors(self) -> tuple[Any, ...]:
        """What ``Backward`` is called with."""
        return self[3:] if self.also is not None else self[3:-1]

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of the op."""
        return *self[3:-1], *flat(self.norm), self.affine, self.of_residual

    def with_act(self, act: Activation) -> "GradientCall":
        return self._replace(norm=self.norm._replace(act=act))

    @property
    def reads(self) -> tuple[Any, ...]:
        """What z was computed from."""
        return self.x, self.weight, self.bias, self.residual, self.mean, self.second


@dataclass(frozen=True)
class Forward:
    """``norm_act`` with all that does not change between its calls, which generated code makes once.

    It is called with the tensors of the op, and returns the results of the op; None stands for what is not computed.

    over: z is written over x.
    moving: the running statistics move where they are, and are not returned.
    """

    norm: Norm
    over: bool = False
    moving: bool = False

    @property
    def __name__(self) -> str:
        """The name in the text of generated code."""
        return f"norm_act{'_moving' * self.moving}{'_over' * self.over}"

    def __call__(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        mean: Tensor | None,
        rstd: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        norm, (x, _) = self.norm, dense(x)
        if residual is not None:
            residual = like(residual, x)
        out = x if self.over else None
        if mean is not None and rstd is not None:
            operands = Operands(x, weight, bias, residual)
            return passes.recompute(operands, _found(x, mean, rstd), norm, out), None, None, None, None
        if norm.own and not self.moving and running_mean is not None and running_var is not None:
            running_mean, running_var = running_mean.clone(), running_var.clone()
        operands = Operands(x, weight, bias, residual, None, running_mean, running_var)
        if not norm.own:
            # An op that keeps its input would copy the running mean for autograd, and nobody reads the copy here.
            norm = norm._replace(keep="output")
        z, stats = passes.forward(operands, norm, None, out)
        if out is None and z._is_view():
            # A program may change what a graph returns in place, and PyTorch refuses that for a view.
            z = z.data
        if not norm.own:
            return z, None, None, None, None
        if self.moving:
            return z, stats.mean, stats.rstd, None, None
        return z, stats.mean, stats.rstd, running_mean, running_var


@dataclass(frozen=True)
class Backward:
    """``norm_act_backward`` with all that does not change between its calls, as ``Forward`` is for ``norm_act``.

    affine, of_residual: whether the gradients of weight and bias, and that of the residual, are wanted.
    over: the gradient of x is written over dz.
    spare: the gradient of the residual may be written over ``also``.
    """

    norm: Norm
    affine: bool
    of_residual: bool
    over: bool = False
    spare: bool = False

    @property
    def __name__(self) -> str:
        """The name in the text of generated code."""
        return f"norm_act_backward{'_over' * self.over}"

    def __call__(
        self,
        dz: Tensor,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        mean: Tensor,
        second: Tensor,
        also: Tensor | None = None,
    ) -> tuple[Tensor | None, ...]:
        """The gradient of z is dz, or dz + ``also``."""
        norm, affine, (x, _) = self.norm, self.affine, dense(x)
        if not norm.own:
            second = (second.to(stats_dtype(x)) + norm.eps).rsqrt()
        into = dz if self.over and dz.dtype == x.dtype and dz.stride() == x.stride() else None
        dx, dweight, dbias, dresidual, _ = passes.backward(
            OutputGradient(dz, into, also, self.spare),
            Operands(x, weight, bias, residual),
            _found(x, mean, second),
            norm,
            None,
            (True, affine, affine, self.of_residual, False),
        )
        return (
            dx,
            dweight if affine and weight is not None else None,
            dbias if affine and bias is not None else None,
            dresidual if self.of_residual else None,
        )


def _found(x: Tensor, mean: Tensor, rstd: Tensor) -> Statistics:
    wide = stats_dtype(x)
    return Statistics(cast(mean, wide), cast(rstd, wide))


def statistics(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, *flat_norm: Any, moving: bool = False
) -> tuple[Tensor | None, ...]:
    """The results of ``Forward`` of a batch norm but z, in whose place there is None."""
    source, _ = dense(x)
    running = [v if v is None or moving else v.clone() for v in (running_mean, running_var)]
    mean, rstd = passes.statistics(source, norm_of(*flat_norm), *running)
    return None, mean, rstd, *(None if moving else v for v in running)


def statistics_moving(*call: Any) -> tuple[Tensor | None, ...]:
    """``statistics``, which moves the running statistics where they are."""
    return statistics(*call, moving=True)


def _whole(results: Sequence[Tensor | None], x: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The results of an op, which cannot return None: an empty tensor stands for it."""
    return tuple(x.new_empty(0, dtype=dtype) if v is None else v for v in results)


def _norm_act(*call: Any) -> tuple[Tensor, ...]:
    given = NormCall.of_arguments(call)
    z, mean, rstd, *moved = Forward(given.norm)(*given.tensors)
    # Results of an op must not share memory.
    rstd = None if rstd is None else rstd.clone()
    return _whole((z, mean, rstd, *moved), given.x, stats_dtype(given.x))


def _norm_act_backward(*call: Any) -> tuple[Tensor, ...]:
    given = GradientCall.of_arguments(call)
    grads = Backward(given.norm, given.affine, given.of_residual)(*given.tensors)
    return _whole(grads, given.dz, given.dz.dtype)


def _define(name: str, schema: str, run: Callable[..., Any]) -> None:
    # The op takes tensors in any memory format, so a compiler need not copy them to that of the trace.
    torch.library.define(name, schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))
    torch.library.impl(name, "default", run)


_define(
    "fusedseg::norm_act",
    f"({ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _norm_act,
)
_define(
    "fusedseg::norm_act_backward",
    "(Tensor dz, Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, Tensor mean, Tensor second, "
    f"{_SPEC}, bool affine, bool of_residual) -> (Tensor, Tensor, Tensor, Tensor)",
    _norm_act_backward,
)
norm_act = torch.ops.fusedseg.norm_act.default
norm_act_backward = torch.ops.fusedseg.norm_act_backward.default


def prepared(op: Any, call: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]] | None:
    """What generated code calls for a call of one of the two ops, and with which arguments; None for other ops."""
    if op is norm_act:
        forward = NormCall.of_arguments(call)
        return Forward(forward.norm), forward.tensors
    if op is norm_act_backward:
        backward = GradientCall.of_arguments(call)
        return Backward(backward.norm, backward.affine, backward.of_residual), backward.tensors
    return None


@torch.library.register_fake("fusedseg::norm_act")
def _(*call):
    given = NormCall.of_arguments(call)
    norm, (x, _) = given.norm, dense(given.x)
    finds = norm.own and given.mean is None
    count = statistics_count(x, norm) if finds else 0
    running = (given.running_mean, given.running_var) if finds else (None, None)
    statistics = (x.new_empty(count, dtype=stats_dtype(x)) for _ in range(2))
    moved = (x.new_empty(0, dtype=stats_dtype(x)) if v is None else torch.empty_like(v) for v in running)
    return torch.empty_like(x), *statistics, *moved


@torch.library.register_fake("fusedseg::norm_act_backward")
def _(*call):
    given = GradientCall.of_arguments(call)
    x, _ = dense(given.x)
    asked = (given.weight, given.affine), (given.bias, given.affine), (x, given.of_residual)
    rest = (torch.empty_like(v) if ask and v is not None else given.dz.new_empty(0) for v, ask in asked)
    return torch.empty_like(x), *rest


def _setup_context(ctx, inputs, output) -> None:
    given, (_, *found) = NormCall.of_arguments(inputs), output
    ctx.norm = given.norm
    ctx.mark_non_differentiable(*found)
    ctx.passed_on = given.residual is not None and TABLE[ctx.norm.act.name].identity
    residual = None if ctx.passed_on else given.residual
    statistics = found[:2] if ctx.norm.own else (given.running_mean, given.running_var)
    ctx.save_for_backward(given.x, given.weight, given.bias, residual, *statistics)


def _gradient(ctx, dz: Tensor, *unused: object) -> tuple[Tensor | None, ...]:
    need_x, need_weight, need_bias, need_residual, *_ = ctx.needs_input_grad
    affine, of_residual = need_weight or need_bias, need_residual and not ctx.passed_on
    dx, dweight, dbias, dresidual = norm_act_backward(dz, *ctx.saved_tensors, *flat(ctx.norm), affine, of_residual)
    dresidual = dz if ctx.passed_on else dresidual
    grads = (dx, need_x), (dweight, need_weight), (dbias, need_bias), (dresidual, need_residual)
    return *(grad if need else None for grad, need in grads), *(None,) * 11


torch.library.register_autograd("fusedseg::norm_act", _gradient, setup_context=_setup_context)
