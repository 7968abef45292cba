"""What the backend would keep of a model that has not run.

The partitioner divides the graph of forward and backward in two, and decides which values forward keeps and which ones
backward recomputes.  It works on shapes alone, so a model without values is enough, and no code is generated.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from .._torch import compiler_parts, is_call_of_numpy, unset_fake_temporarily
from ..memory.fake import Model, autocast_without_values, fake_inputs, fake_mode, fake_model
from ..memory.meter import mean_of
from . import counting, settings
from .eager_step import Captured
from .graph import copy_of
from .notes import current, note_bytes, note_of, noting_on
from .report import Graph, Report, counted_in_eager_mode

OP = "fusedseg.compiler.estimate"
# Options of the backend; or the ``activation_memory_budget`` of the compiler itself, whose default is 1.
Division = Mapping[str, Any] | float


class NotCompiled(RuntimeError):
    """Raised if the compiler refuses a model, or finds no graph in it that is trained."""


def estimate(
    model: Model,
    *inputs: Any,
    options: Mapping[str, Any] | None = None,
    autocast: torch.dtype | None = None,
    dtype: torch.dtype = torch.float32,
) -> Report:
    """What ``torch.compile(model, backend="fusedseg")`` would keep, without running the model.

    The report also has what eager mode and the compiler's own partitioner keep.  All bytes are those of tensors without
    values, so neither a GPU nor the memory is needed, and no code is generated.  The loss is not part of it.  The
    compiler's caches are emptied before and after, so that functions that were compiled before are compiled again when
    they are called next.

    Args:
        model: a module, which is copied without its values, or a function that builds one.
        inputs: the arguments: a shape for each, or a tensor, of which only shape, dtype and memory format matter.
        options: the options of the backend.
        autocast: the dtype of ``torch.autocast`` around forward; None for none.
        dtype: the dtype of parameters, buffers and inputs that are given as shapes.

    Raises:
        NotCompiled: a RuntimeError; the compiler refuses the model, or no part of it needs a gradient.
        TypeError, ValueError: the model is no module and builds none; an option does not exist.
    """
    with fake_mode():
        net = fake_model(model, dtype)
        (found,) = estimate_ways(net, fake_inputs(inputs, dtype), [options or {}], autocast, stock=True)
    return found


def estimate_ways(
    model: nn.Module,
    inputs: Sequence[Tensor],
    ways: Sequence[Division],
    autocast: torch.dtype | None = None,
    *,
    stock: bool = False,
) -> list[Report]:
    """A report for each of several ways to divide the graphs of a model, which are captured once.

    All ways have the codegen of the first one that has options.

    Args:
        model: a module; it may be fake, inside its fake mode.
        inputs: its arguments.
        ways: options of the backend; or a number, which is the compiler's own ``activation_memory_budget``.
        autocast: the dtype of autocast around forward.
        stock: whether the reports also have what the compiler's own partitioner keeps, which takes another division.

    Raises as ``estimate``.
    """
    from .backend import with_codegen

    parsed = [settings.parse(way) if isinstance(way, Mapping) else way for way in ways]
    first = with_codegen(next((way for way in parsed if isinstance(way, settings.Settings)), settings.Settings()))
    divisions = _Divisions(parsed, stock)
    try:
        with autocast_without_values(autocast):
            # Norms that one way needs in pieces are in pieces in all.
            bits = next((way.bits for way in parsed if isinstance(way, settings.Settings) and way.bits), None)
            _compile(model, inputs, replace(first, bits=bits), divisions)
    # The compiler may raise any error.
    except Exception as error:
        cause = getattr(error, "inner_exception", error)
        line = next(iter(str(cause).strip().splitlines()), "")
        raise NotCompiled(f"{OP}: the compiler refuses the model: {type(cause).__name__}: {line}") from error
    found = divisions.found
    if not found[0]:
        raise NotCompiled(f"{OP}: the compiler finds no graph in the model")
    if not any(graph.trained for graph, _ in found[0]):
        raise NotCompiled(f"{OP}: no part of the model needs a gradient")
    return [counted_in_eager_mode(type(model).__name__, of) for of in found]


def _compile(model: nn.Module, inputs: Sequence[Tensor], asked: settings.Settings, divisions: "_Divisions") -> None:
    """Compiles a model as ``_aten`` and ``_inductor`` of ``backend.py`` do, and runs its forward.

    What differs: no code is generated, and the graphs run as they are traced; norms are those of a GPU on every device;
    sizes are numbers.  Of Inductor there are its decompositions, and none of its passes.  Streams, subclasses of
    tensors, CUDA graphs and the options of a vendor make no difference to the bytes that are counted.
    """
    from .backend import with_least_traffic
    from .capture.prepare import prepare
    from .rewrite.branches import whole_activations

    parts = compiler_parts()

    def as_it_is(graph: fx.GraphModule, example: object) -> Any:
        return parts.make_boxed_func(graph.forward)

    def compile_graph(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        def compiled(module: fx.GraphModule, asked: settings.Settings) -> Any:
            options: dict[str, Any] = {}
            if asked.by_inductor:
                options["decompositions"] = parts.decompositions() if asked.bits is None else whole_activations()
            compiler = parts.aot_autograd(
                fw_compiler=as_it_is, bw_compiler=as_it_is, partition_fn=partial(divisions.divide, asked.codegen),
                keep_inference_input_mutations=True, **options,
            )  # fmt: skip
            return compiler(prepare(module, asked, for_gpu=True), example_inputs)

        with noting_on(divisions.begin(module, example_inputs)):
            arrays = _arrays_of_numbers(module.graph)
            run = with_least_traffic(module, asked, compiled)
        if not arrays:
            return run
        return lambda *inputs: [arrays.get(place, result) for place, result in enumerate(run(*inputs))]

    torch.compiler.reset()
    try:
        mean_of(torch.compile(model, backend=compile_graph, dynamic=False)(*inputs))
    finally:
        torch.compiler.reset()


def _arrays_of_numbers(graph: fx.Graph) -> dict[int, Any]:
    """The results of a graph that NumPy computes of numbers alone, such as the sizes of an image, by their places.

    A model may ask for their values, as MONAI's SwinUNETR does when it checks the size of an image.
    """
    arrays: dict[fx.Node, Any] = {}
    with unset_fake_temporarily():
        for node in graph.nodes:
            if is_call_of_numpy(node) and all(given in arrays for given in node.all_input_nodes):
                args, kwargs = fx.map_arg((node.args, node.kwargs), arrays.__getitem__)
                arrays[node] = node.target(*args, **kwargs)
        results: Any = graph.output_node().args[0]
        return {place: arrays[node].numpy() for place, node in enumerate(results) if node in arrays}


class _Divisions:
    """Divides each captured graph in each way, and with ``stock`` as PyTorch does, and notes what it keeps."""

    def __init__(self, ways: Sequence[settings.Settings | float], stock: bool) -> None:
        self._ways, self._stock = ways, stock
        # For each way the graphs of the model.
        self.found: list[list[tuple[Graph, Captured]]] = [[] for _ in ways]

    def begin(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Graph:
        """Notes a captured graph, and returns the note of the first way."""
        graph, captured = note_of(module, example_inputs)
        for of in self.found:
            of.append((replace(graph), captured))
        return self.found[0][-1][0]

    def divide(self, codegen: str | None, joint: fx.GraphModule, joint_inputs: Sequence[object], **options: Any) -> Any:
        """Divides a joint graph in each way; the model runs with the parts that the last way makes."""
        from .partition import Partition
        from .plan.choose import Known

        options["compiler"] = "inductor"
        by_inductor = codegen == "inductor"
        if by_inductor and self._stock:
            # Without Inductor's decompositions the graph is not the one that ``torch.compile`` divides.
            stock, *_ = counting.bytes_of(
                _by_budget(1.0, copy_of(joint), joint_inputs, **options), options["num_fwd_outputs"], by_inductor
            )
            for of in self.found:
                of[-1][0].stock = stock
        parts, known = None, Known()
        for place, (way, of) in enumerate(zip(self._ways, self.found, strict=True), 1):
            graph, _ = of[-1]
            given = joint if place == len(self._ways) else copy_of(joint)
            with noting_on(graph), warnings.catch_warnings():
                # What a way cannot reach is seen in its bytes.
                warnings.simplefilter("ignore", UserWarning)
                if isinstance(way, settings.Settings):
                    current().codegen = codegen or "aten"
                    parts = Partition(replace(way, codegen=codegen), known)(given, joint_inputs, **options)
                    # The first way that has options has chosen.
                    codegen = codegen or "aten"
                else:
                    parts = _by_budget(way, given, joint_inputs, **options)
                    note_bytes(None, parts, options["num_fwd_outputs"], by_inductor)
        return parts


def _by_budget(budget: float, joint: fx.GraphModule, joint_inputs: object, **options: Any) -> Any:
    """Divides a graph as the compiler itself does with an ``activation_memory_budget``."""
    parts = compiler_parts()
    with parts.config.patch(activation_memory_budget=budget):
        return parts.stock_partition(joint, joint_inputs, **options)
