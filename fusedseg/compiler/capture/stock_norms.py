"""Norms in the graph that Dynamo captures: norm [+ residual] [+ activation] becomes one op (``ops/norm/graph.py``).

The graph has the functions that the model calls, so a norm is one node here, whatever PyTorch makes of it later.  The
op keeps x and the statistics, and backward computes its output again from them where it reads that.

``replace_norms`` finds the calls on devices that Triton serves, and with rounded inputs on all devices, and puts
``of_stock`` in the place of each.  What it computes is decided when AOTAutograd runs it on tensors without values: the
op, or else the functions that were captured.
"""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from ... import _backend, _torch
from ...activation import IDENTITY, TABLE, Activation
from ...ops.check import ACTIVATION_DTYPES
from ...ops.layout import FORMATS, is_rows, memory_of
from ...ops.norm import stock
from ...ops.norm.call import Norm, Operands
from ...ops.norm.graph import ARGUMENTS, RESULTS, NormCall, norm_op
from .. import op_table
from ..graph import captured_tensors_of, captured_value_of, in_one_grad_mode, is_alike, nodes_from
from ..settings import Settings
from .dead_bias import move_op


class How(NamedTuple):
    """What a backend wants of norms.  These are the last arguments of both ops.

    everywhere: norms become the op on every device.  Otherwise only whole ones do, and only where Triton serves the
        device: elsewhere PyTorch's kernels take less time.
    whole: residuals and activations are in the op too.  Rounded inputs ask for them apart, because a question such as
        y > 0 is answered in forward.
    """

    everywhere: bool
    whole: bool

    def is_for(self, x: Tensor | None) -> bool:
        """Whether a norm of ``x`` may become the op."""
        return x is not None and (self.everywhere or (self.whole and _backend.takes_triton(x.device)))


def wanted_by(settings: Settings, for_gpu: bool) -> How:
    """What the backend wants of norms with these options; ``for_gpu``: an estimate counts the bytes of a GPU.

    Backward rebuilds a norm from packed values and the exact statistics that the op keeps, with either codegen.
    Without bits a compiler fuses PyTorch's norms with what is before and after them.
    """
    whole = settings.bits is None
    return How(not whole or (for_gpu and not settings.by_inductor), whole)


# The sums of two tensors, and those that are written over the first one.
SUMS, SUMS_OVER = {torch.add, operator.add, "add"}, {operator.iadd, "add_"}


# What a graph calls for each activation of the op: functions, and methods by their names.
ACTIVATIONS: dict[Any, op_table.OpRow] = {
    function: row
    for row in op_table.ROWS
    if row.backward and row.name in TABLE and row.name != "selu"
    for pair in row.calls.items()
    for function in pair
    if callable(function)
}
# ``nn.ReLU6`` calls the function of ``nn.Hardtanh``.
ACTIVATIONS |= {F.hardtanh: op_table.OF_NAME["relu6"]} | dict.fromkeys(("relu", "relu_"), op_table.OF_NAME["relu"])


def activation_of(node: fx.Node) -> Activation | None:
    """The activation that a node of a captured graph computes, if the op has it."""
    row = ACTIVATIONS.get(node.target)
    if row is None or not node.args:
        return None
    names = (*row.arguments, op_table.FLAG)
    given = dict(zip(names, node.args[1:], strict=False)) | node.kwargs
    given.pop(op_table.FLAG, None)
    if row.name == "gelu" and given.get("approximate") == "tanh":
        return Activation("gelu_tanh", 0.0) if len(given) == 1 else None
    fixed = dict(row.fixed)
    if node.target is F.hardtanh and any(given.get(key) != value for key, value in fixed.items()):
        return None
    param: Any = 0.0
    if row.parameter:
        parameter = TABLE[row.name].parameter
        assert parameter is not None
        param = given.pop(row.parameter, parameter.default)
    is_number = isinstance(param, (int, float)) and not isinstance(param, bool)
    if not is_number or any(key not in fixed or value != fixed[key] for key, value in given.items()):
        return None
    return Activation(row.name, float(param))


def _is_in_place(act: fx.Node) -> bool:
    """Whether an activation is written over its argument: its name ends so, or its last argument says so."""
    name = act.target if isinstance(act.target, str) else act.target.__name__
    return name.endswith("_") or act.kwargs.get(op_table.FLAG, act.args[-1]) is True


# What eager mode keeps for the gradient of the activation of a norm, by the name that its node has as a function of the
# model.  The compiler passes the name on to the nodes of the joint graph.
EAGER_SAVES = {"norm": "", "norm_act_of_input": "input", "norm_act_of_result": "result"}


def _name_of(act: Activation, in_place: bool) -> str:
    """The name of ``EAGER_SAVES`` for an activation, which is written over its argument if ``in_place``."""
    row = TABLE[act.name]
    if row.identity:
        return "norm"
    of_result = row.keeps_result == "always" or (in_place and row.keeps_result == "in place")
    return "norm_act_of_result" if of_result else "norm_act_of_input"


def kept_by_eager(node: fx.Node) -> str:
    """What eager mode keeps for the gradient of the activation of a norm of a joint graph, as in ``EAGER_SAVES``."""
    stack = node.meta.get("source_fn_stack")
    name = stack[-1][1] if stack else None
    return EAGER_SAVES.get(name, "result") if isinstance(name, str) else "result"


def of_stock(*given: Any) -> Tensor:
    """act(norm(x) [+ residual]) in place of a norm of PyTorch: the arguments of the op, and ``How``."""
    *arguments, everywhere, whole = given
    asked = NormCall.of_arguments(arguments)
    norm = asked.norm.of_given()
    call = asked._replace(x=_laid_out(asked.x, norm), norm=norm)
    if is_served(call, How(everywhere, whole)):
        return normalised(call)
    tensors = Operands(asked.x, asked.weight, asked.bias, None, None, asked.running_mean, asked.running_var)
    return stock.finished(stock.normalised(tensors, asked.norm), asked.residual, norm.act)


def of_module(*given: Any) -> tuple[Tensor, ...]:
    """The op as modules of this package call it, for which the backend decides what is kept; ``How`` comes last."""
    *arguments, everywhere, whole = given
    call = NormCall.of_arguments(arguments)
    if call.norm.keep == "input" or call.norm.process_group is not None or call.slots is not None or not call.x.numel():
        return norm_op(*arguments)
    call = call._replace(norm=call.norm._replace(keep="input"))
    if not is_served(call, How(everywhere, whole)):
        return _by_stock(call)
    if whole:
        return norm_op(*call.arguments)
    y, *others = norm_op(*call.with_act(IDENTITY)._replace(residual=None).arguments)
    return stock.finished(y, call.residual, call.norm.act), *others


def _by_stock(call: NormCall) -> tuple[Tensor, ...]:
    """The results of the op by stock functions with their own backward; there are no statistics among them."""
    x, running = call.x, [call.running_mean, call.running_var]
    if call.norm.own:
        # They move to those of x, whatever they were.
        running = [None if v is None else torch.zeros_like(v) for v in running]
    z = stock.norm_act(Operands(x, call.weight, call.bias, call.residual, None, *running), call.norm)
    z = z.contiguous(memory_format=_torch.suggest_memory_format(x))
    results = (None, None, *(running if call.norm.own else (None, None)), None, None)
    return z, *(x.new_empty(0) if v is None else v for v in results)


# Ops, because AOTAutograd's cache takes no functions of other packages.  The tracer looks into them.
_MOVING = ARGUMENTS.replace("Tensor? running_mean", "Tensor(a!)? running_mean").replace(
    "Tensor? running_var", "Tensor(b!)? running_var"
)
_HOW = ", ".join(f"bool {name}" for name in How._fields)
of_stock_op = _torch.composite_op(
    "fusedseg::norm_of_stock",
    f"({_MOVING}, {_HOW}) -> Tensor",
    of_stock,
)
of_module_op = _torch.composite_op(
    "fusedseg::norm_of_module",
    f"({ARGUMENTS}, {_HOW}) -> {RESULTS}",
    of_module,
)


def _laid_out(x: Tensor, spec: Norm) -> Tensor:
    """x as PyTorch's norms of samples take it, which copy from channels_last; its group norm on a CPU does not.

    ``rewrite/channels_last.py`` leaves the copy out where the op computes in channels_last.
    """
    copies = spec.over.of_samples and not (spec.over.is_grouped and x.is_cpu)
    return x.contiguous() if copies and is_rows(x) else x


def is_served(call: NormCall, how: How) -> bool:
    """Whether the op computes the norm."""
    x, vectors = call.x, (call.weight, call.bias, call.running_mean, call.running_var)
    if not how.is_for(x):
        return False
    if x.dtype not in ACTIVATION_DTYPES or x.dim() < 2 or _torch.depends_on_data(x) or not is_in_a_dense_format(x):
        return False
    if any(n == 0 for n in x.shape if isinstance(n, int)):
        return False
    return all(v is None or v.device == x.device for v in vectors)


def is_in_a_dense_format(x: Tensor) -> bool:
    """Whether a tensor is contiguous, or in channels_last, without gaps."""
    return x.is_contiguous() or (x.dim() in FORMATS and x.is_contiguous(memory_format=FORMATS[x.dim()]))


def normalised(call: NormCall) -> Tensor:
    """The result of the op; the running statistics move."""
    z, _, _, *moved, _, _ = norm_op(*call.arguments)
    if call.norm.own:
        for buffer, value in zip((call.running_mean, call.running_var), moved, strict=True):
            if buffer is not None:
                # PyTorch's norms move it without a new version, and autograd may have saved it before.
                with torch.no_grad(), _torch.preserve_version_counter(buffer):
                    buffer.copy_(value)
    return z


def replace_norms(graph: fx.Graph, how: How) -> int:
    """Puts the op into a captured graph, and returns how often."""
    for node in graph.nodes:
        if node.target is norm_op:
            node.target, node.args = of_module_op, (*node.args, *how)
    # Of two norms that are added, the later one takes the sum, and the earlier one is its residual.
    norms = [node for node in graph.nodes if NormCall.captured(node) is not None]
    _copy_what_moves(graph, norms)
    # What stays a function of PyTorch can be found in the compiler's caches.
    norms = [node for node in norms if how.is_for(captured_value_of(node))]
    return sum(_write(graph, node, how) for node in reversed(norms))


def _copy_what_moves(graph: fx.Graph, norms: Sequence[fx.Node]) -> None:
    """A norm of running statistics reads copies of those that another norm of the graph moves.

    Its backward reads them again, and would find them moved.
    """
    moving: set[fx.Node] = set()
    reading: list[tuple[fx.Node, fx.Node]] = []
    for node in norms:
        call = NormCall.captured(node)
        assert call is not None
        found = [buffer for buffer in (call.running_mean, call.running_var) if isinstance(buffer, fx.Node)]
        if call.norm.own:
            moving.update(found)
        else:
            reading += [(node, buffer) for buffer in found]
    for node, buffer in reading:
        if buffer in moving:
            with graph.inserting_before(node):
                copy = graph.call_method("clone", (buffer,))
            copy.meta["example_value"] = torch.empty_like(captured_value_of(buffer))
            node.replace_input_with(buffer, copy)


def _write(graph: fx.Graph, node: fx.Node, how: How) -> bool:
    call = NormCall.captured(node)
    assert call is not None
    value, x, norm = captured_value_of(node), captured_value_of(call.x), call.norm
    numbers = norm.eps, norm.momentum, norm.own, norm.over.groups or 1
    if value is None or x is None or not all(isinstance(number, (int, float)) for number in numbers):
        return False
    total, residual, act_node = _after(node, call) if how.whole else (None, None, None)
    act = IDENTITY if act_node is None else activation_of(act_node)
    assert act is not None
    # The op reads what it needs in the place of the sum.
    with graph.inserting_before(total or node):
        if value.dtype != x.dtype:
            # Autocast runs this norm in another dtype.
            call = call._replace(x=graph.call_method("to", (call.x, value.dtype)))
        call = call._replace(residual=residual).with_act(act)
        made = graph.call_function(of_stock_op, (*call.arguments, *how))
    # Reports speak of the module of the norm.
    made.meta = dict(node.meta)
    if total is not None and node.next in _moves(call.running_mean):
        # The norm moves its mean first.
        made.append(node.next)
    name = _name_of(act, act_node is not None and _is_in_place(act_node))
    made.meta["source_fn_stack"] = [*made.meta.get("source_fn_stack", ())[:-1], (made.name, name)]
    (act_node or total or node).replace_all_uses_with(made)
    for old in (act_node, total, node):
        if old is not None:
            graph.erase_node(old)
    return True


def _after(node: fx.Node, norm: NormCall) -> tuple[fx.Node | None, fx.Node | None, fx.Node | None]:
    """What follows a norm in one op: the sum with a residual, the residual, and the activation; None for no such node.

    Nobody else reads the results between.
    """
    y, residual = _only_reader(node), None
    if y is not None and _is_undisturbed(node, y, norm):
        residual = _residual_of(y, node)
    total = None if residual is None else y
    last = total or node
    act = _only_reader(last)
    is_act = act is not None and act.args[:1] == (last,) and activation_of(act) is not None
    if not is_act or not is_alike(captured_value_of(node), captured_value_of(act)):
        act = None
    # A norm without gradients, of a frozen part, must not take what follows with gradients, nor the reverse.
    return (total, residual, act) if in_one_grad_mode(node, act or last) else (None, None, None)


def _moves(running_mean: object) -> list[fx.Node]:
    """The calls that move a running mean by the part of a bias (``dead_bias.py``), each right behind its norm."""
    readers = running_mean.users if isinstance(running_mean, fx.Node) else ()
    return [node for node in readers if node.target is move_op]


def _only_reader(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _residual_of(y: fx.Node, node: fx.Node) -> fx.Node | None:
    """What a node adds to the output of a norm, if it is such a sum and writes over nothing else."""
    is_sum = y.target in SUMS or (y.target in SUMS_OVER and y.args[0] is node)
    if not is_sum or len(y.args) != 2 or y.kwargs or y.args.count(node) != 1:
        return None
    (other,) = [term for term in y.args if term is not node]
    if isinstance(other, fx.Node) and is_alike(captured_value_of(node), captured_value_of(other)):
        return other
    return None


def _is_undisturbed(start: fx.Node, end: fx.Node, norm: NormCall) -> bool:
    """Whether a norm gives the same where ``end`` stands as at ``start``.

    Nothing between may write to a tensor that the norm reads; a function of PyTorch that writes over a tensor returns
    it, or nothing.
    And nothing else may read the running statistics, which the norm moves.
    """
    running = _memory(captured_value_of(norm.running_mean), captured_value_of(norm.running_var))
    memory = _memory(*map(captured_value_of, norm.tensors))
    node = start.next
    if node in _moves(norm.running_mean):
        # It goes where the norm goes.
        node = node.next
    for between in nodes_from(node, end):
        read = _memory(*map(captured_value_of, between.all_input_nodes))
        written = set() if _may_write_unseen(between) else _memory(*captured_tensors_of(between))
        if not memory.isdisjoint(written or read) or not running.isdisjoint(read):
            return False
    return True


def _may_write_unseen(node: fx.Node) -> bool:
    """Whether a call may write to an argument and return another tensor.

    That is an op of another package that says so, or a call of a graph.
    """
    target = node.target
    if isinstance(target, _torch.OpOverload):
        return target.namespace != "fusedseg" and bool(target._schema.is_mutable)
    return isinstance(target, (_torch.OpOverloadPacket, _torch.HigherOrderOperator))


def _memory(*values: object) -> set[int]:
    """The addresses of the memories of these tensors; None stands for no tensor."""
    return {memory_of(value) for value in values if isinstance(value, Tensor)}
