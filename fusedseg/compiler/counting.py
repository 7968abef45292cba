"""The bytes of a step, counted on the two graphs that run: what forward keeps, by module, and the most at once.

The model is that of ``plan/peak.py``, which decides by it.  With the codegen "aten" these are the graphs as they run;
for Inductor elementwise functions have no memory where other kernels compute them.

Workspaces alone are counted in another way.  A decision counts a copy of each image of a convolution, the most that a
kernel may make; a report, as the estimate of eager mode beside it, counts those that are not in channels_last.
"""

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import fx

from ..memory.meter import Course
from ..memory.step_bytes import StepBytes, copies_of
from ..ops.layout import memory_of
from .graph import flops_of, following, hint_of, hinted, outputs_of, tensors_of
from .plan import peak
from .plan.decision import call_node, is_view
from .plan.liveness import Liveness

Parts = tuple[fx.GraphModule, fx.GraphModule]


class Module(NamedTuple):
    """A module of the model: its name in the model, and its class."""

    name: str
    kind: str


# What the model was given, and code that no module runs, such as a compiled function.
GIVEN, MODEL = Module("(inputs)", ""), Module("(model)", "")


def module_of(node: fx.Node) -> Module:
    """The innermost module that has called a node, as Dynamo has noted it."""
    stack = [*node.meta.get("nn_module_stack", {}).values()]
    if not stack:
        return MODEL
    path, kind = stack[-1]
    # The path begins with the local variable that holds the model: L['self'].encoder.0.conv.
    name = path.partition("].")[2] or MODEL.name
    return Module(name, kind if isinstance(kind, str) else kind.__name__)


# What is alive at the peak, and its bytes.
Peak = Mapping[str, int]
KEPT, GRADIENTS, REST = "kept", "gradients of parameters", "in use there"


def bytes_of(parts: Parts, outputs: int, by_inductor: bool) -> tuple[StepBytes, Course, Peak]:
    """The bytes of forward and backward, their course, and what is alive at the peak.

    Args:
        parts: the graph of forward, whose first ``outputs`` results are those of the model, and that of backward.
        outputs: the number of these results.
        by_inductor: whether Inductor generates the code.
    """
    forward, backward = (peak.liveness_of(part.graph, by_inductor, estimated_workspace) for part in parts)
    needs = StepBytes(
        kept=sum(kept_by_module(parts[0], outputs).values()),
        peak=max(forward.peak[0], backward.peak[0]),
        with_workspaces=max(forward.with_workspaces, backward.with_workspaces),
        repeated=repeated(parts),
    )
    name, top = (GRADIENTS, backward) if backward.peak[0] >= forward.peak[0] else (KEPT, forward)
    given, returned = top.at_the_peak()
    at_peak = Counter({KEPT: given})
    at_peak[name] += returned
    at_peak[REST] = max(0, top.peak[0] - given - returned)
    return needs, (_course(forward), _course(backward)), at_peak


def _course(alive: Liveness) -> list[int]:
    """The bytes at each call."""
    steps = zip(alive.steps, alive.bytes_at, strict=True)
    return [nbytes for step, nbytes in steps if step.node.op == "call_function"]


def estimated_workspace(node: fx.Node, by_inductor: bool) -> int:
    """The estimated bytes beside the arguments and the results of a node while it runs."""
    images = peak.images_of(node)
    tensors = (hinted(t) for image in images for t in tensors_of(image))
    return copies_of(tensors) if images else peak.workspace(node, by_inductor)


def kept_by_module(forward: fx.GraphModule, outputs: int) -> Mapping[Module, int]:
    """The bytes that forward keeps for backward, by the module that has made them."""
    found = Counter[Module]()
    for nbytes, node in _storages(outputs_of(forward.graph)[outputs:]).values():
        found[module_of(node)] += nbytes
    return found


def returned_bytes(module: fx.GraphModule, outputs: int | None = None) -> int:
    """The bytes of the first ``outputs`` results of a graph, or of all."""
    return sum(nbytes for nbytes, _ in _storages(outputs_of(module.graph)[:outputs]).values())


def recomputed_modules(nodes: Iterable[fx.Node]) -> dict[str, int]:
    """For each class of modules the number of those of which backward recomputes something."""
    # One of several results stands for its call.  A node that was erased from the graph has None as its argument.
    calls = (call_node(node) for node in nodes if node.target is not operator.getitem or node.args[0])
    modules = dict.fromkeys(module_of(call) for call in calls if not is_view(call))
    return dict(Counter(module.kind or module.name for module in modules))


def repeated(parts: Parts) -> float:
    """The arithmetic in backward that does not follow from a gradient, as a share of forward's."""
    forward, backward = parts
    recomputed = set(backward.graph.nodes) - following(backward.graph)
    return sum(map(flops_of, recomputed)) / max(1, sum(map(flops_of, forward.graph.nodes)))


def _storages(nodes: Sequence[object]) -> dict[int, tuple[int, fx.Node]]:
    """The bytes of the storages of nodes that are no inputs, and the first node of each."""
    made = [node for node in nodes if isinstance(node, fx.Node) and node.op == "call_function"]
    # A result may be a view of an input.
    inputs = [n for node in made for n in node.all_input_nodes if n.op == "placeholder"]
    given = {memory_of(t) for n in inputs for t in tensors_of(n)}
    found: dict[int, tuple[int, fx.Node]] = {}
    for node in made:
        for t in tensors_of(node):
            if memory_of(t) not in given:
                found.setdefault(memory_of(t), (hint_of(t.untyped_storage().nbytes()), node))
    return found
