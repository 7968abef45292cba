"""What the backend would keep of a model that has not run.

The partitioner divides the graph of forward and backward in two, and decides which values forward keeps and which ones
backward computes again.  It works on shapes alone, so a model without values is enough, and no code is generated.
"""

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from .._torch import compiler_parts
from ..memory.buffers import peak_if_fused, results
from ..memory.meter import key_of, mean_of
from ..memory.strategy import NotOneGraph, Ways
from ..memory.strategy import Partition as Found
from . import settings
from .joint import flops_of, outputs_of
from .report import Bytes, Captured, Graph, Report, counted_in_eager_mode, kept_of, note_after, noting, peak_of

OP = "fusedseg.compiler.partitions"
INDUCTOR = settings.Settings("inductor")


def _compile(
    model: nn.Module, inputs: Sequence[Tensor], divide: Callable[..., Any], noted: Callable[..., Any], **options: Any
) -> None:
    """Compiles a model whose graphs ``divide`` divides, and runs its forward; no code is generated.

    ``noted`` is called with what compiles a graph, the graph and its inputs.  The compiler's caches are emptied before
    and after.
    """
    parts = compiler_parts()

    def as_it_is(graph: fx.GraphModule, example: object) -> Any:
        return parts.make_boxed_func(graph.forward)

    compiler = parts.aot_autograd(
        fw_compiler=as_it_is, bw_compiler=as_it_is, partition_fn=divide, decompositions=parts.decompositions
    )
    torch.compiler.reset()
    try:
        mean_of(torch.compile(model, backend=partial(noted, compiler), dynamic=False, **options)(*inputs))
    finally:
        torch.compiler.reset()


def partitions(
    model: nn.Module, inputs: Sequence[Tensor], ways: Ways, autocast: torch.dtype | None = None
) -> list[Found]:
    """Compiles a model, and counts what its graph keeps with Inductor if it is divided in each of several ways.

    Nothing runs, and no code is generated.  The compiler's caches are emptied before and after, so that functions that
    were compiled before are compiled again when they are called next.

    Args:
        model: any module that ``torch.compile(fullgraph=True)`` can trace; it may be fake, inside its fake mode.
        inputs: its arguments.
        ways: options of the backend ``fusedseg``; or a number, which is the compiler's own
            ``activation_memory_budget``, where 1 is its default.  Each way gets a copy of the graph.
        autocast: the dtype of autocast around forward.

    Raises:
        NotOneGraph: the model cannot be compiled as one graph, or needs no gradient.
    """
    from .partition import Partition

    parts = compiler_parts()
    found: list[Found] = []
    owned = {tuple(tensor.shape) for tensor in (*model.parameters(), *model.buffers())}

    def by_budget(budget: float, joint: fx.GraphModule, joint_inputs: object, **options: Any) -> Any:
        """Divides a graph as the compiler itself does."""
        with parts.config.patch(activation_memory_budget=budget):
            return parts.min_cut(joint, joint_inputs, **options)

    divisions = [
        Partition(settings.parse({"codegen": "inductor", **way}))
        if isinstance(way, Mapping)
        else partial(by_budget, way)
        for way in ways
    ]

    def divide(joint: fx.GraphModule, joint_inputs: Sequence[object], **options: Any) -> Any:
        options["compiler"] = "inductor"
        total = _flops(joint)
        for way in divisions:
            with warnings.catch_warnings():
                # What a way cannot reach is seen in its bytes.
                warnings.simplefilter("ignore", UserWarning)
                forward, backward = way(joint if way is divisions[-1] else twin_of(joint), joint_inputs, **options)
            first = _flops(forward)
            found.append(
                Found(
                    _kept(forward, owned, options["num_fwd_outputs"]),
                    peak_if_fused(forward, backward),
                    (first + _flops(backward) - total) / max(first, 1),
                )
            )
        # The model runs with the last way.
        return forward, backward

    try:
        with torch.autocast("cpu", autocast or torch.bfloat16, autocast is not None):
            _compile(model, inputs, divide, lambda compiler, *graph: compiler(*graph), fullgraph=True)
    # The compiler may raise any error.
    except Exception as error:
        cause = getattr(error, "inner_exception", error)
        first = next(iter(str(cause).strip().splitlines()), "")
        raise NotOneGraph(f"{OP}: the compiler refuses the model: {type(cause).__name__}: {first}") from error
    if not found:
        raise NotOneGraph(f"{OP}: no part of the model needs a gradient")
    return found


def counted(model: nn.Module, inputs: Sequence[Tensor], asked: settings.Settings = INDUCTOR) -> Report:
    """A report on a model that is compiled and not run, with the bytes of the compiler's own partitioner.

    The compiler's caches are emptied before and after.

    Args:
        model: a module; it may be fake, inside its fake mode.
        inputs: its arguments.
        asked: the options of the backend.
    """
    from .partition import prepare

    parts = compiler_parts()
    found: list[tuple[Graph, Captured]] = []

    def divide(joint: fx.GraphModule, joint_inputs: Sequence[object], **options: Any) -> Any:
        outputs = options["num_fwd_outputs"]
        graph, _ = found[-1]
        with parts.config.patch(activation_memory_budget=1.0):
            stock = parts.min_cut(twin_of(joint), joint_inputs, compiler="inductor", **options)
            graph.stock = Bytes(kept_of(stock[0], outputs), peak_of(stock, fused=True))
            decision = prepare(joint, outputs, asked)
            made = parts.min_cut(joint, joint_inputs, compiler="inductor", **options)
        note_after(decision, made, outputs, fused=True)
        return made

    def noted(compiler: Callable[..., Any], module: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        with noting(module, example_inputs) as row:
            found.append(row)
            return compiler(module, example_inputs)

    _compile(model, inputs, divide, noted)
    if not found:
        raise RuntimeError(f"{settings.OP}: the compiler finds no graph in {type(model).__name__}")
    return counted_in_eager_mode(type(model).__name__, found)


def _kept(forward: fx.GraphModule, owned: set[tuple[int, ...]], outputs: int) -> int:
    """The bytes that forward keeps; ``owned`` has the shapes of parameters and buffers, inputs that do not count."""
    given = [t for node in forward.graph.nodes if node.op == "placeholder" for t in results(node)]
    # Views of parameters are parameters.
    uncounted = {key_of(t) for t in given if tuple(t.shape) in owned}
    made = [t for node in outputs_of(forward.graph)[outputs:] if isinstance(node, fx.Node) for t in results(node)]
    return sum({key_of(t): t.untyped_storage().nbytes() for t in made if key_of(t) not in uncounted}.values())


def twin_of(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph, which has the same constants."""
    parts = (*vars(module).values(), *module.buffers(), *module.parameters())
    constants = {id(part): part for part in parts if isinstance(part, Tensor)}
    with warnings.catch_warnings():
        # Copying a graph warns of a class of PyTorch that its own copy uses.
        warnings.simplefilter("ignore", FutureWarning)
        return copy.deepcopy(module, constants)


def _flops(module: fx.GraphModule) -> int:
    return sum(map(flops_of, module.graph.nodes))
