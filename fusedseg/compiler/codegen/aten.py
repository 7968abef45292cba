"""The codegen "aten": Python code that calls PyTorch's own kernels, one line for each node of a graph.

The function takes its arguments in a list, which it empties, so that each value is let go after its last reader.
Bindings of ops are called where there are some, because a call through ``torch.ops`` takes microseconds longer.
"""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ... import _backend, _torch
from ...ops import registry
from ...ops.ahead import compile_kernels
from ...progress import Progress
from .. import passes
from ..graph import is_gradient, is_op, is_tensor, last_readers, outputs_of, value_of
from ..plan.peak import liveness_of
from ..settings import OP, QUIET_SECONDS, left_out, written
from . import convolution_backward

aten = torch.ops.aten
SAME = (
    "native_batch_norm", "native_group_norm", "native_layer_norm", "relu", "relu_", "mm", "addmm", "bmm",
    "sigmoid", "tanh", "t", "detach",
)  # fmt: skip
ARITHMETIC = ("add", "sub", "mul", "div")
# The functions that do the same as an op, with the same arguments.
DIRECT: dict[Any, Callable[..., Any]] = {
    **{getattr(aten, name).default: getattr(torch, name) for name in SAME},
    **{getattr(aten, name).Tensor: getattr(torch, name) for name in ARITHMETIC},
    **{getattr(aten, f"{name}_").Tensor: getattr(Tensor, f"{name}_") for name in ARITHMETIC},
    _torch.writing_batch_norm: torch.native_batch_norm,
    aten.empty.memory_format: torch.empty,
    aten.zeros.default: torch.zeros,
    # Strides may differ from those of the traced graph: of an image in channels_last a group norm on a CPU makes one in
    # channels_last, and PyTorch's trace says that it is contiguous.
    aten.view.default: Tensor.reshape,
    **registry.DIRECT,
}


# The list with the only reference to an input.
INPUTS = "_of_inputs"


class Code:
    """The lines of a function, and the objects that they name."""

    def __init__(self, direct: Mapping[Any, Callable[..., Any]]) -> None:
        self.lines: list[str] = []
        self._direct = direct
        self.objects: dict[str, object] = {}
        self._names: dict[int, str] = {}

    def name(self, thing: object, hint: str) -> str:
        """The name of an object, which is no name of a node."""
        if id(thing) not in self._names:
            name = f"_of_{hint}_{len(self.objects)}"
            self._names[id(thing)] = name
            self.objects[name] = thing
        return self._names[id(thing)]

    def text(self, value: object) -> str:
        """An argument as code."""
        if isinstance(value, fx.Node):
            return value.name
        if isinstance(value, (list, tuple)):
            inner = ", ".join(map(self.text, value))
            return f"[{inner}]" if isinstance(value, list) else f"({inner},)"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{k!r}: {self.text(v)}" for k, v in value.items()) + "}"
        if value is None or type(value) in (bool, int, str):
            return repr(value)
        if type(value) is float and value == value and abs(value) != float("inf"):
            return repr(value)
        return self.name(value, "value")

    def call(self, node: fx.Node) -> str:
        if node.target is operator.getitem:
            return f"{self.text(node.args[0])}[{self.text(node.args[1])}]"
        given = [self.text(arg) for arg in node.args]
        if node.target is convolution_backward.convolution_backward:
            given[0] = INPUTS
        given += [f"{name}={self.text(arg)}" for name, arg in node.kwargs.items()]
        target: Any = node.target
        if target in self._direct:
            target = self._direct[target]
        elif is_op(node):
            target = _torch.bare_op(target)
        hint = str(node.target).replace(".", "_").replace("::", "_") if is_op(node) else target.__name__
        return f"{self.name(target, hint if hint.isidentifier() else 'function')}({', '.join(given)})"


def source_of(module: fx.GraphModule, direct: Mapping[Any, Callable[..., Any]] = DIRECT) -> Code:
    """The code of a graph.  Its function is ``run(arguments)``, which calls ops directly where it can."""
    graph = module.graph
    # For each node those that it is the last to read.
    ends: dict[fx.Node, list[fx.Node]] = {}
    for node, reader in last_readers(graph).items():
        ends.setdefault(reader, []).append(node)
    out = Code(direct)
    places = [node for node in graph.nodes if node.op == "placeholder"]
    out.lines.append("def run(arguments):")
    if places:
        out.lines.append(f"    {', '.join(node.name for node in places)}, = arguments")
    out.lines.append("    arguments.clear()")
    unread = [node.name for node in places if not node.users]
    if unread:
        out.lines.append(f"    del {', '.join(unread)}")
    for node in graph.nodes:
        if node.op == "output":
            out.lines.append(f"    return {out.text(outputs_of(graph))}")
        elif node.op == "get_attr":
            out.lines.append(f"    {node.name} = {out.name(operator.attrgetter(str(node.target))(module), 'constant')}")
        gone = [one.name for one in ends.get(node, ()) if node.op == "call_function"]
        if node.target is convolution_backward.convolution_backward:
            (x,), *_ = node.args
            out.lines += [f"    {INPUTS} = [{out.text(x)}]", f"    del {out.text(x)}"]
            gone.remove(out.text(x))
        if node.op == "call_function":
            out.lines.append(f"    {node.name} = {out.call(node)}")
        if gone:
            out.lines.append(f"    del {', '.join(gone)}")
    return out


def _function(source: Code) -> Any:
    names = dict(source.objects)
    exec(compile("\n".join(source.lines), "<fusedseg compiler>", "exec"), names)
    return names["run"]


def devices_of(graph: fx.Graph) -> set[torch.device]:
    """The devices of the tensors of a graph."""
    return {value_of(node).device for node in graph.nodes if is_tensor(node)}


def _kernels_first(run: Any, device: torch.device) -> Any:
    """A function whose first call compiles the kernels of ``run`` in threads."""
    started = False

    def first(arguments: list[Any]) -> Any:
        nonlocal started
        if not started:
            with Progress(f"{OP}: Triton's kernels", QUIET_SECONDS):
                compile_kernels(run, arguments, device)
            started = True
        return run(arguments)

    return first


def emit(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
    """The function that runs a graph.

    With the batched tensors of ``torch.autograd.grad(is_grads_batched=True)`` it runs as it was given, because such a
    tensor cannot be written over one without a batch, and the functions of this package know nothing of it.
    """
    _torch.donate_nothing()
    plain = source_of(module, direct={})
    gradients = [node for node in module.graph.nodes if is_gradient(node) and is_tensor(node)]
    launching = next(filter(_backend.takes_triton, devices_of(module.graph)), None)
    # Where nothing is trained, these stages have the passes of a forward.
    on = passes.BACKWARD if gradients else passes.FORWARD
    passes.run(passes.Stage.JOINED, on, module)
    passes.run(passes.Stage.CALLS, on, module, liveness=liveness_of(module.graph))
    source = source_of(module)
    if gradients:
        batched = source.name(_torch.is_legacy_batchedtensor, "batched")
        asked = " or ".join(f"{batched}({node.name})" for node in gradients)
        run_plain = source.name(functools.cache(lambda: _function(plain)), "plain")
        source.lines.insert(2, f"    if {asked}: return {run_plain}()(arguments)")
    run = _function(source)
    if launching is not None and "ahead" not in left_out():
        written["ahead"] += 1
        run = _kernels_first(run, launching)
    run._boxed_call = True
    run.source = "\n".join(source.lines)
    return run
