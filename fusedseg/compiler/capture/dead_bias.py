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

import torch
from torch import Tensor, fx

from ... import _torch
from ...ops.norm.graph import RUNNING_MEAN, NormCall, norm_op
from ..graph import captured_arguments_of, captured_value_of, in_one_grad_mode, items_of
from ..op_table import OF_NAME
from ..settings import Settings

# The convolutions, whose second and third arguments are the weight and the bias.
CONVOLUTIONS = {*OF_NAME["convolution"].calls, torch.convolution}


def _removing(node: fx.Node) -> NormCall | None:
    """The call of a norm that removes a constant which is added to a channel; None for all other nodes."""
    call = NormCall.captured(node)
    if call is None or call.norm.own is not True or call.norm.process_group is not None:
        return None
    value = captured_value_of(call.x)
    return call if value is not None and _torch.known(call.norm.over.removes_constants(value.shape[1])) else None


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


def remove_dead_biases(module: fx.GraphModule, settings: Settings) -> int:
    """Leaves these biases out, or their gradients where last bits may not change, and returns their number."""
    graph = module.graph
    found = list(_found(graph, settings))
    convolutions = {conv for _, _, conv, _ in found}
    alone = [dead for dead in found if set(dead[-1].users) <= convolutions]
    for norm, call, conv, bias in alone:
        if settings.may_round(captured_value_of(conv).device):
            _leave_out(graph, norm, call, conv, bias)
        else:
            _stop_gradient(graph, conv, bias)
    if alone:
        module.recompile()
    return len(alone)


def _found(graph: fx.Graph, settings: Settings) -> Iterator[tuple[fx.Node, NormCall, fx.Node, fx.Node]]:
    """Norms with their calls, the convolutions before them, and the biases of these, which have no effect."""
    for norm in graph.nodes:
        call = _removing(norm)
        conv = None if call is None else _convolution_of(call.x, norm)
        if call is None or conv is None or not in_one_grad_mode(conv, norm):
            continue
        arguments = captured_arguments_of(conv, ("input", "weight", "bias"))
        bias, y = arguments.get("bias"), captured_value_of(conv)
        # A convolution without a batch has its channels where the norm has positions.
        is_batch = y.dim() == captured_value_of(arguments["weight"]).dim()
        if not isinstance(bias, fx.Node) or not is_batch or not (settings.may_round(y.device) or settings.bits):
            continue
        if 0 in [n for n in y.shape if isinstance(n, int)]:
            # PyTorch's norm of an empty batch does not move the running mean.
            continue
        if isinstance(call.running_mean, fx.Node) and not isinstance(call.norm.momentum, (int, float)):
            continue
        yield norm, call, conv, bias


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


def _stop_gradient(graph: fx.Graph, conv: fx.Node, bias: fx.Node) -> None:
    with graph.inserting_before(conv):
        stopped = graph.call_function(without_gradient_op, (bias,))
    stopped.meta.update(bias.meta)
    conv.replace_input_with(bias, stopped)


def _leave_out(graph: fx.Graph, norm: fx.Node, call: NormCall, conv: fx.Node, bias: fx.Node) -> None:
    if len(conv.args) > 2:
        conv.update_arg(2, None)
    else:
        conv.update_kwarg("bias", None)
    with graph.inserting_before(norm):
        alone = graph.call_function(without_effect_op, (call.x, bias))
    alone.meta["example_value"] = captured_value_of(call.x)
    norm.replace_input_with(call.x, alone)
    if norm.target is not norm_op:
        if isinstance(call.running_mean, fx.Node):
            with graph.inserting_after(norm):
                graph.call_function(move_op, (call.running_mean, bias, float(call.norm.momentum)))
    elif RUNNING_MEAN in items_of(norm):
        # The graph moves the running mean towards the one that this op returns.
        mean = items_of(norm)[RUNNING_MEAN]
        with graph.inserting_after(mean):
            whole = graph.call_function(with_bias_op, (mean, bias))
        mean.replace_all_uses_with(whole, delete_user_cb=lambda user: user is not whole)
