"""Biases of convolutions that a norm removes again, left out of a captured graph.

A norm of the statistics of each channel subtracts the mean, and a constant that is added to a channel is in its mean:

    norm(conv(x) + b) = norm(conv(x))    mean(conv(x) + b) = mean(conv(x)) + b    db = sum over a channel of dx = 0

So the addition, and the sum of the gradient of b, are passes over memory for nothing.  Without them the gradient of b
is exact zeros, in place of rounding errors around zero, and the running mean gets its part of b by itself.

This holds for batch norm that uses the statistics of the batch, for instance norm that uses those of a sample, and for
group norm with one channel a group.  With running statistics the bias has an effect.  A bias that somebody else reads
stays, and so does the bias of a convolution whose output somebody else reads.

Where last bits of outputs must not change, the addition stays.  With the option "bits" the gradient is exact zeros then
too: the errors of rounded values would be all that it has.

The pass runs on the graph that Dynamo captures, where a norm and a convolution are one call each.
"""

from collections.abc import Iterator
from inspect import getcallargs
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ... import _torch
from ...ops.norm.graph import RUNNING_MEAN, NormCall, norm_op
from ...ops.norm.statistic import Statistic
from ...ops.norm.stock import OF_FUNCTION
from ..graph import captured_arguments_of, captured_value_of, in_one_grad_mode, items_of
from ..op_table import OF_NAME
from ..settings import Settings

# The convolutions, whose second and third arguments are the weight and the bias.
CONVOLUTIONS = {*OF_NAME["convolution"].calls, torch.convolution}


def _given(node: fx.Node) -> tuple[object, object, object] | None:
    """What a norm is given, if it removes a constant that is added to a channel; None for all other calls.

    Its input, and the running mean with its momentum if the norm moves one.
    """
    if node.target is norm_op:
        call = NormCall.of_arguments(node.args)
        removes = call.norm.own and call.norm.process_group is None and _removes(call.norm.over, call.x)
        # The graph moves the running mean towards the one that this op returns.
        return (call.x, None, None) if removes else None
    function: Any = node.target
    kind = OF_FUNCTION.get(function)
    if kind is None:
        return None
    given = getcallargs(function, *node.args, **node.kwargs)
    own, over = not kind.own or given[kind.own] is True, kind.over(given.get("num_groups"))
    if not own or not _removes(over, given["input"]):
        return None
    return given["input"], given.get("running_mean"), given.get("momentum")


def _removes(over: Statistic, x: object) -> bool:
    """Whether norms of these statistics remove a constant of a channel of a node, which alone has a mean."""
    value = captured_value_of(x)
    return value is not None and _torch.known(over.groups_of(value.shape[1]) == value.shape[1])


class _NoEffect(torch.autograd.Function):
    """``x``, and zeros as the gradient of a bias that has no effect on the results."""

    @staticmethod
    def forward(ctx, x: Tensor, bias: Tensor) -> Tensor:
        ctx.like = bias.shape, bias.dtype, bias.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx: Tensor) -> tuple[Tensor, Tensor]:
        shape, dtype, device = ctx.like
        # Not None: an optimizer would leave out its weight decay and its momentum.
        return dx, torch.zeros(shape, dtype=dtype, device=device)


def without_effect(x: Tensor, bias: Tensor) -> Tensor:
    """The convolution ``x`` without its bias."""
    return _NoEffect.apply(x, bias) if torch.is_grad_enabled() and bias.requires_grad else x


def move_mean(running_mean: Tensor, bias: Tensor, momentum: float) -> None:
    """Moves a running mean by the part of the bias in the mean of the batch."""
    # Autograd keeps the running mean for the backward of the norm, which does not read it in training.
    with torch.no_grad(), _torch.preserve_version_counter(running_mean):
        running_mean.add_(bias.detach().to(running_mean.dtype), alpha=momentum)


def with_bias(mean: Tensor, bias: Tensor) -> Tensor:
    """The mean that a norm of this package returns, as if its input had the bias."""
    return mean + bias.detach().to(mean.dtype)


# Ops, because AOTAutograd's cache takes no functions of other packages.  The tracer looks into them.
without_effect_op = _torch.composite_op(
    "fusedseg::without_effect", "(Tensor(a) x, Tensor bias) -> Tensor(a)", without_effect
)
# The bias of a convolution whose gradient is zeros.
without_gradient_op = _torch.composite_op(
    "fusedseg::without_gradient", "(Tensor(a) bias) -> Tensor(a)", lambda bias: without_effect(bias.detach(), bias)
)
move_op = _torch.composite_op(
    "fusedseg::move_mean", "(Tensor(a!) running_mean, Tensor bias, float momentum) -> ()", move_mean
)
with_bias_op = _torch.composite_op("fusedseg::with_bias", "(Tensor mean, Tensor bias) -> Tensor", with_bias)


class _Dead(NamedTuple):
    """A norm with what it is given, the convolution before it, and the bias that has no effect.

    may_round: whether last bits of outputs may change.
    """

    norm: fx.Node
    conv: fx.Node
    bias: fx.Node
    x: Any
    running_mean: Any
    momentum: Any
    may_round: bool


def remove_dead_biases(module: fx.GraphModule, settings: Settings) -> int:
    """Leaves these biases out, or their gradients, and returns their number."""
    found = list(_found(module.graph, settings))
    convolutions = {dead.conv for dead in found}
    alone = [dead for dead in found if set(dead.bias.users) <= convolutions]
    for dead in alone:
        (_leave_out if dead.may_round else _stop_gradient)(module.graph, dead)
    if alone:
        module.recompile()
    return len(alone)


def _found(graph: fx.Graph, settings: Settings) -> Iterator[_Dead]:
    for norm in graph.nodes:
        given = _given(norm) if norm.op == "call_function" else None
        conv = None if given is None else _convolution_of(given[0], norm)
        if given is None or conv is None or not in_one_grad_mode(conv, norm):
            continue
        x, running_mean, momentum = given
        arguments = captured_arguments_of(conv, ("input", "weight", "bias"))
        bias, y = arguments.get("bias"), captured_value_of(conv)
        # A convolution without a batch has its channels where the norm has positions.
        is_batch = y.dim() == captured_value_of(arguments["weight"]).dim()
        may_round = settings.may_round(y.device)
        if not isinstance(bias, fx.Node) or not is_batch or not (may_round or settings.bits):
            continue
        if 0 in [n for n in y.shape if isinstance(n, int)]:
            # PyTorch's norm of an empty batch does not move the running mean.
            continue
        if isinstance(running_mean, fx.Node) and not isinstance(momentum, (int, float)):
            continue
        yield _Dead(norm, conv, bias, x, running_mean, momentum, may_round)


def _convolution_of(x: object, reader: fx.Node) -> fx.Node | None:
    """The convolution whose output ``reader`` alone reads as ``x``, perhaps in another memory format.

    None if ``reader`` has it for another argument too, such as its residual.
    """
    if not isinstance(x, fx.Node) or set(x.users) != {reader}:
        return None
    if [*reader.args, *reader.kwargs.values()].count(x) > 1:
        return None
    if x.op == "call_method" and x.target == "contiguous":
        return _convolution_of(x.args[0], x)
    return x if x.op == "call_function" and x.target in CONVOLUTIONS else None


def _stop_gradient(graph: fx.Graph, dead: _Dead) -> None:
    with graph.inserting_before(dead.conv):
        stopped = graph.call_function(without_gradient_op, (dead.bias,))
    stopped.meta.update(dead.bias.meta)
    dead.conv.replace_input_with(dead.bias, stopped)


def _leave_out(graph: fx.Graph, dead: _Dead) -> None:
    norm, conv, bias, x, running_mean, momentum, _ = dead
    if len(conv.args) > 2:
        conv.update_arg(2, None)
    else:
        conv.update_kwarg("bias", None)
    with graph.inserting_before(norm):
        norm.replace_input_with(x, graph.call_function(without_effect_op, (x, bias)))
    if isinstance(running_mean, fx.Node):
        with graph.inserting_after(norm):
            graph.call_function(move_op, (running_mean, bias, float(momentum)))
    if norm.target is norm_op and RUNNING_MEAN in items_of(norm):
        mean = items_of(norm)[RUNNING_MEAN]
        with graph.inserting_after(mean):
            whole = graph.call_function(with_bias_op, (mean, bias))
        mean.replace_all_uses_with(whole, delete_user_cb=lambda user: user is not whole)
