"""Convolutions in channels_last, whatever format the caller's tensors have: the option ``memory_format``.

Tensor cores compute convolutions in channels_last.  For an image in another format cuDNN makes copies, before and after
each convolution.  Here the graph itself computes in channels_last where that takes fewer copies: a convolution gives
the format to the ops behind it that pass it on (``layout`` in ``op_table.py``), and reads it from those before it.

Every other op, and every output of the graph, reads its images in exactly the strides that were traced.  So nothing
that depends on how memory lies sees a difference: views, ops that draw random numbers, ops of other packages, and the
caller.  The graph is a functional one, of forward and backward or of inference alone: nothing in it writes to an image.

1. ``_images`` says for each op which images it would read in channels_last.
2. ``cheapest`` picks the ops that do, by a minimum cut: each copy costs the bytes that it reads and writes, and each
   convolution that stays as it was costs the bytes of its images.
3. ``_Writer`` writes the graph: copies stand where they are first read, and all later readers share them.

Weights are copied in each step, in one call with the cast of autocast; their bytes count nothing, because cuDNN copies
them otherwise.  A graph with symbolic sizes stays as it is, because the choice would ask for the sizes.
"""

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx

from ... import _torch
from ...ops import avg_pool
from ...ops.check import HALF
from ...ops.layout import FORMATS, suggests_channels_last
from ...ops.max_pool import pool as pools
from ...ops.norm import graph as norms
from .. import graph as graphs
from ..graph import arguments_of, computed, is_cast, is_op, is_tensor, name_of, nbytes_of, row_of, tensors_of, value_of
from ..op_table import ANY, KEEPS
from ..plan.min_cut import ENDLESS, Flow
from ..settings import AS_IT_IS, Settings
from .simplify import OF_CHECKPOINT

aten = torch.ops.aten
# Ops that stand in for those whose results PyTorch makes contiguous.
INSTEAD: dict[Any, Callable[..., Any]] = {
    aten.avg_pool3d.default: avg_pool.avg_pool3d_op,
    aten.avg_pool3d_backward.default: avg_pool.avg_pool3d_backward_op,
}
# Ops that would copy an image with gaps between its positions to contiguous memory.
NEED_DENSE = (norms.norm_op, pools.max_pool_op, *INSTEAD.values())


def lay_out(graph: fx.Graph, settings: Settings) -> int:
    """Lays a graph out as the settings say, and returns the number of ops that compute in channels_last."""
    if settings.memory_format == AS_IT_IS:
        return 0
    dims = [dims for dims, fmt in FORMATS.items() if settings.memory_format in (None, fmt)]
    asked = settings.memory_format is not None
    seeds = [node for node in graph.nodes if _is_convolution(node, dims) and (asked or is_faster(value_of_x(node)))]
    if not seeds or any(graphs.has_symbols(*tensors_of(node)) for node in graph.nodes):
        return 0
    images = {node: found for node in graph.nodes if (found := _images(node, dims))}
    prices = {node: ENDLESS if asked else _price(node) for node in seeds if node in images}
    laid_out = cheapest(graph, images, prices)
    if laid_out:
        _Writer(graph, images, laid_out, settings.by_inductor).write()
    return len(laid_out)


def is_faster(x: Tensor) -> bool:
    """Whether a convolution of ``x`` is faster in channels_last: where cuDNN computes it on tensor cores.

    AMD's library is left out; Inductor's own layout optimization is off there, and nothing was measured.
    """
    return x.is_cuda and x.dtype in HALF and torch.backends.cudnn.enabled and torch.version.hip is None


def _is_convolution(node: fx.Node, dims: Iterable[int]) -> bool:
    if name_of(node) not in ("convolution", "convolution_backward") or value_of_x(node).dim() not in dims:
        return False
    # Grouped convolutions were not measured; those of one channel a group pass the format on.
    return bool(arguments_of(node)["groups"] == 1)


def value_of_x(node: fx.Node) -> Any:
    """The input of a convolution, or of the convolution whose gradients a node computes."""
    return value_of(graphs.node_at(node, row_of(node).images[-1]))


def weight_of(node: fx.Node) -> fx.Node | None:
    """The weight that a convolution, or its gradient, reads; None for other nodes."""
    places = row_of(node).images
    return graphs.node_at(node, places[-1] + 1) if places else None


def _price(node: fx.Node) -> int:
    """What a convolution costs that is not in channels_last: the bytes of the images that it reads and writes.

    In a step of the PlainConvUNet on an H100, cuDNN's copies took more than three times the time of these bytes.
    Convolutions of other shapes may gain less, and their copies must not make a step slower.
    """
    made = value_of(node)
    # The gradient of the input, or None if nobody asks for it; the result of a convolution.
    first = made[0] if isinstance(made, (tuple, list)) else made
    read = sum(nbytes_of(graphs.node_at(node, place)) for place in row_of(node).images)
    return read + (0 if first is None else int(first.nbytes))


def in_channels_last(t: Tensor) -> bool:
    """Whether the memory of an image is in channels_last; of one channel or one position it is so in any format."""
    return t.is_contiguous(memory_format=FORMATS[t.dim()])


def format_of(t: Tensor) -> torch.memory_format | None:
    """The memory format whose strides a tensor has, those of dimensions of one element too; None for other strides."""
    formats = [torch.contiguous_format, *([FORMATS[t.dim()]] if t.dim() in FORMATS else [])]
    return next((fmt for fmt in formats if torch.empty_like(t, memory_format=fmt).stride() == t.stride()), None)


def _images(node: fx.Node, dims: Iterable[int]) -> list[fx.Node]:
    """The images that an op may read in channels_last, if its result is in channels_last then; [] for other ops."""
    if not _may_pass_on(node):
        return []
    found = [source for source in node.all_input_nodes if is_tensor(source) and value_of(source).dim() in dims]
    results = [t for t in tensors_of(node) if t.dim() in dims and t.numel()]
    row = row_of(node)
    if row.images:
        found = [source for source in found if source in map(node.args.__getitem__, row.images)]
    elif row.layout != KEEPS and graphs.op_of(node) not in (*SLICES, *INSTEAD):
        # Of an elementwise op, an image that is repeated along a dimension is read as it is.
        shapes = {t.shape for t in results}
        found = [x for x in found if value_of(x).shape in shapes and not _is_repeated(value_of(x))]
    return found if found and results and _is_passed_on(node, found) else []


def _is_repeated(t: Tensor) -> bool:
    return any(step == 0 and n > 1 for n, step in zip(t.shape, t.stride(), strict=True))


# Parts of an image in channels_last are so too, with gaps.
SLICES = (aten.slice.Tensor,)


def _may_pass_on(node: fx.Node) -> bool:
    """Whether the table says of an op that it passes channels_last on, or it is elementwise."""
    if not is_op(node) or graphs.writes(node) or graphs.is_random(node) or node.kwargs.get("out") is not None:
        return False
    row, op = row_of(node), graphs.op_of(node)
    if row.images:
        groups = arguments_of(node)["groups"]
        weight = weight_of(node)
        # With several channels a group, kernels for channels_last are many times slower.
        return groups == 1 or (weight is not None and value_of(weight).shape[1] == 1)
    if op in INSTEAD:
        given = arguments_of(node)
        window = ("kernel_size", "stride", "padding", "ceil_mode", "divisor_override")
        return avg_pool.is_simple(*map(given.__getitem__, window))
    # Copies are written in the format that they are to have.
    if op in SLICES or row.copies or row.returns_input:
        return True
    return row.layout == KEEPS or (op.namespace in ("aten", "prims") and torch.Tag.pointwise in op.tags)


def _is_passed_on(node: fx.Node, images: list[fx.Node]) -> bool:
    """Whether the results are in channels_last if the images are, as the op says of tensors without values."""
    weight = weight_of(node)

    def laid_out(source: fx.Node) -> Any:
        value = value_of(source)
        if source in images or source is weight:
            return torch.empty_like(value, memory_format=FORMATS[value.dim()])
        return value

    made = computed(*_call(node), laid_out)
    # The second gradient of a convolution is that of the weight.
    results = made if isinstance(made, (tuple, list)) else [made]
    results = results if weight is None else results[:1]
    rank = value_of(images[0]).dim()
    return all(suggests_channels_last(t) for t in results if isinstance(t, Tensor) and t.dim() == rank and t.numel())


def _call(node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """What an op becomes in channels_last: the target and its arguments."""
    target, args, kwargs = graphs.op_of(node), node.args, dict(node.kwargs)
    if target in INSTEAD:
        given = arguments_of(node)
        kwargs, args = {}, tuple(given[arg.name] for arg in target._schema.arguments)
        target = INSTEAD[target]
    elif row_of(node).returns_input:
        target, args = aten.alias.default, args[:1]
    elif target is pools.max_pool_backward_op:
        # The op is told in which format its result is.
        args = (*args[:3], True, *args[4:])
    elif "memory_format" in kwargs or name_of(node) in ("clone", "_to_copy"):
        kwargs["memory_format"] = FORMATS[value_of(node).dim()]
    return target, args, kwargs


def cheapest(graph: fx.Graph, images: dict[fx.Node, list[fx.Node]], prices: dict[fx.Node, int]) -> set[fx.Node]:
    """The ops that are to compute in channels_last, of those that can: the choice that costs least.

    Vertex 0 of the network is channels_last, and vertex 1 is the format of the trace.
    """
    flow = Flow()
    vertices = {node: flow.vertex() for node in images}
    for node, price in prices.items():
        flow.edge(0, vertices[node], price)
    weights = {weight_of(node) for node in images}
    for value in graph.nodes:
        source = value.all_input_nodes[0] if value.target is operator.getitem else value
        if not is_tensor(value) or value in weights or _is_gradient_of_weight(value):
            continue
        if value_of(value).dim() not in FORMATS or in_channels_last(value_of(value)):
            continue
        made, cost = vertices.get(source, 1), 2 * nbytes_of(value)
        readers = [user for user in value.users if not _reads_any(user)]
        laid_out = [vertices[user] for user in readers if value in images.get(user, ())]
        back, into = flow.vertex(), flow.vertex()
        if made != 1:
            flow.edge(made, back, cost)
            for reader in {vertices.get(user, 1) for user in readers}:
                flow.edge(back, reader, ENDLESS)
        flow.edge(into, made, cost)
        for reader in laid_out:
            flow.edge(reader, into, ENDLESS)
    flow.augment()
    laid_out_by = flow.after_the_start()
    return {node for node, vertex in vertices.items() if laid_out_by[vertex]}


def _is_gradient_of_weight(node: fx.Node) -> bool:
    if node.target is not operator.getitem or name_of(node.args[0]) != "convolution_backward":
        return False
    return bool(node.args[1] == 1)


def _reads_any(node: fx.Node) -> bool:
    """Whether a node reads images as they lie, without a copy."""
    return graphs.reads_size_alone(node) or row_of(node).layout == ANY or is_cast(node)


class _Writer:
    """Writes a graph in which these ops compute in channels_last.

    traced: the values as they were traced.
    """

    def __init__(
        self, graph: fx.Graph, images: dict[fx.Node, list[fx.Node]], laid_out: set[fx.Node], by_inductor: bool
    ) -> None:
        self.graph = graph
        self.images = images
        self.laid_out = laid_out
        self.by_inductor = by_inductor
        self.traced: dict[fx.Node, Any] = {node: value_of(node) for node in graph.nodes}
        self.backward = graphs.following(graph)
        end = graph.output_node()
        # What forward returns lives until backward anyway.
        self.returned = {node for node in end.all_input_nodes if node not in self.backward}
        self._as_traced: dict[fx.Node, fx.Node] = {}
        self._in_rows: dict[tuple[fx.Node, bool], fx.Node] = {}

    def write(self) -> None:
        for node in list(self.graph.nodes):
            if node in self.laid_out:
                self._lay_out(node)
            elif node.target is operator.getitem:
                node.meta["val"] = value_of(node.all_input_nodes[0])[node.args[1]]
            elif _reads_any(node):
                self._read_any(node)
            else:
                self._read_as_traced(node)
        self.graph.eliminate_dead_code()

    def _lay_out(self, node: fx.Node) -> None:
        images, weight = self.images[node], weight_of(node)
        target, args, kwargs = _call(node)
        needs_dense = target in NEED_DENSE
        # A cast reads what lies otherwise too.
        swapped = {} if is_cast(node) else {x: self._rows_of(x, node, needs_dense) for x in images}
        if weight is not None:
            # PyTorch asks the strides of the input and of the weight for the format of a convolution.
            tells = suggests_channels_last(value_of(swapped[images[-1]]))
            swapped[weight] = self._weight_of(weight, node, strict=not tells)
        node.target = target
        node.args, node.kwargs = fx.map_arg((args, kwargs), lambda source: swapped.get(source, source))
        self._compute(node)

    def _compute(self, node: fx.Node) -> None:
        target: Any = node.target
        node.meta["val"] = computed(target, node.args, node.kwargs)
        # These say how the arguments were traced.
        for name in ("tensor_meta", "eager_input_vals"):
            node.meta.pop(name, None)

    def _is_changed(self, node: fx.Node) -> bool:
        value = value_of(node)
        return isinstance(value, Tensor) and not graphs.has_same_form(value, self.traced[node])

    def _read_any(self, node: fx.Node) -> None:
        """A node that reads images as they lie; its own result is as it was traced, but for a mean or a sum."""
        if not any(map(self._is_changed, (n for n in node.all_input_nodes if n in self.traced))):
            return
        value, given = self.traced[node], dict(node.kwargs)
        if row_of(node).layout != ANY and "memory_format" in {arg.name for arg in graphs.op_of(node)._schema.arguments}:
            node.kwargs = {**given, "memory_format": format_of(value) or torch.preserve_format}
        self._compute(node)
        if row_of(node).layout != ANY and self._is_changed(node):
            node.kwargs = given
            self._read_as_traced(node)
            self._compute(node)

    def _read_as_traced(self, node: fx.Node) -> None:
        if node.op in ("call_function", "output"):
            node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), lambda source: self._traced_of(source, node))

    def _traced_of(self, source: fx.Node, before: fx.Node) -> fx.Node:
        """A value in exactly the strides that were traced."""
        if source not in self.traced or not self._is_changed(source):
            return source
        if source not in self._as_traced:
            value = self.traced[source]
            if graphs.calls_view(source):
                # The same part of the same image.
                (origin,) = self.images[source]
                swapped = {graphs.node_at(source, 0): self._traced_of(origin, before)}
                made = graphs.copied(self.graph, source, swapped, before)
                made.meta["val"] = value
            else:
                made = self._copy(source, value, before)
            self._as_traced[source] = made
        return self._as_traced[source]

    def _rows_of(self, source: fx.Node, reader: fx.Node, needs_dense: bool) -> fx.Node:
        """An image in channels_last."""
        late = reader in self.backward and source in self.returned and self._is_changed(source)
        if late:
            # Backward reads what the caller has, and forward keeps nothing beside it.
            source = self._traced_of(source, reader)
        value = value_of(source)
        if in_channels_last(value) or (suggests_channels_last(value) and not needs_dense):
            return source
        return self._made_in_rows(source, reader, strict=False)

    def _weight_of(self, source: fx.Node, reader: fx.Node, strict: bool) -> fx.Node:
        """A weight in channels_last; ``strict`` asks for strides that say so, although the memory is the same."""
        tells = suggests_channels_last(value_of(source)) if strict else in_channels_last(value_of(source))
        return source if tells else self._made_in_rows(source, reader, strict)

    def _made_in_rows(self, source: fx.Node, reader: fx.Node, strict: bool) -> fx.Node:
        key = source, strict
        if key not in self._in_rows:
            form = torch.empty_like(value_of(source), memory_format=FORMATS[value_of(source).dim()])
            if not self.by_inductor and is_cast(source):
                # One call casts and lays out.
                made = graphs.copied(self.graph, source, {}, before=reader)
                made.kwargs = {**source.kwargs, "memory_format": FORMATS[form.dim()]}
                self._compute(made)
            else:
                made = self._copy(source, form, reader)
            self._in_rows[key] = made
        return self._in_rows[key]

    def _copy(self, source: fx.Node, form: Tensor, before: fx.Node) -> fx.Node:
        """A copy with the strides of ``form``."""
        fmt = format_of(form)
        if self.by_inductor:
            # Inductor chooses the strides of a clone by itself.
            force = _torch.compiler_parts().force_stride_order
            made = graphs.call(self.graph, force, source, list(form.stride()), before=before)
        elif fmt is not None:
            # An argument whose only reader is a clone is one that the program may write to (``graph.py``).
            made = graphs.call(self.graph, aten._to_copy.default, source, before=before, memory_format=fmt)
        else:
            given = list(form.shape), list(form.stride())
            memory = graphs.call(self.graph, aten.new_empty_strided.default, source, *given, before=before)
            made = graphs.call(self.graph, aten.copy.default, memory, source, before=before)
        # What a checkpoint in the model says about the value.
        made.meta |= {name: source.meta[name] for name in OF_CHECKPOINT if name in source.meta}
        return made
