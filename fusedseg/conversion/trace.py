"""Finds the flow of a model by ``torch.fx``, which needs no example."""

import inspect
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn

from .._torch import tree_leaves
from .flow import Call, Flow, is_leaf
from .observe import METADATA, set_training
from .unchanged import unchanged

ATTRIBUTES = {"shape", "dtype", "device", "ndim", "requires_grad", "layout", "is_cuda", "itemsize", "names"}
# Functions and methods whose result may lie in the memory of their first argument.
VIEWS = {
    "getitem", "view", "view_as", "reshape", "flatten", "unflatten", "narrow", "select", "unbind", "chunk", "split",
    "tensor_split", "transpose", "permute", "movedim", "swapaxes", "squeeze", "unsqueeze", "expand", "expand_as",
    "contiguous", "detach", "t", "diagonal", "unfold", "to", "type_as", "ravel", "swapdims", "moveaxis", "adjoint",
    "hsplit", "vsplit", "dsplit", "split_with_sizes", "unsafe_chunk", "unsafe_split", "as_strided", "broadcast_to",
    "atleast_1d", "atleast_2d", "atleast_3d", "data", "T", "mT", "H", "mH", "real", "imag", "view_as_real",
    "view_as_complex", "Flatten", "Unflatten",
}  # fmt: skip
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
DROPOUT_FUNCTIONS = {"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"}


class _Tracer(fx.Tracer):
    def __init__(self) -> None:
        super().__init__()
        # Each module that was called, with each value that it got or returned.
        self.seen: list[tuple[nn.Module, fx.Node]] = []

    def call_module(
        self, m: nn.Module, forward: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> Any:
        out = super().call_module(m, forward, args, kwargs)
        self.seen += [(m, leaf.node) for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, fx.Proxy)]
        return out

    def is_leaf_module(self, module: nn.Module, qualified_name: str) -> bool:
        return is_leaf(module) or isinstance(module, torch.jit.ScriptModule)


def trace(model: nn.Module, training: bool) -> Flow:
    """The flow of one forward in training or eval mode; the model stays as it was.

    Optional arguments of the forward get their defaults.  Errors of ``torch.fx`` pass through.
    """
    with unchanged(model):
        set_training(model, training)
        _copy_tensors(model)
        parameters = inspect.signature(model.forward).parameters.values()
        left_out = {p.name: p.default for p in parameters if p.default is not p.empty}
        tracer = _Tracer()
        graph = tracer.trace(model, left_out or None)
        return _flow(model, graph, tracer.seen, f"traced by torch.fx in {'training' if training else 'eval'} mode")


def _copy_tensors(model: nn.Module) -> None:
    """Gives a model copies of its buffers, and of tensors that are plain attributes.

    ``torch.fx`` traces parameters, but calls the functions of these tensors, such as ``self.steps.add_(1)``.
    """
    copies: dict[int, Tensor] = {}
    for module in model.modules():
        for held in (module._buffers, module.__dict__):
            for name, value in list(held.items()):
                if isinstance(value, Tensor):
                    held[name] = copies.setdefault(id(value), value.detach().clone())


def _flow(model: nn.Module, graph: fx.Graph, seen: list[tuple[nn.Module, fx.Node]], how: str) -> Flow:
    flow = Flow(how)
    values: dict[fx.Node, int] = {}
    for node in graph.nodes:
        read = tuple(values[n] for n in node.all_input_nodes)
        if node.op == "output":
            flow.returned.update(read)
            continue
        module = model.get_submodule(node.target) if node.op == "call_module" else None
        name = type(module).__name__ if module is not None else _name(node)
        values[node] = len(values)
        if node.op in ("placeholder", "get_attr") or _is_metadata(node, name):
            continue
        if _changes_nothing(node, name, module):
            values[node] = read[0]
            flow.passed.add(read[0])
            continue
        where = list((node.meta.get("nn_module_stack") or {"": None}).keys())
        path = where[-2] if module is not None and len(where) > 1 else where[-1] if module is None else ""
        flow.add(Call(name, module, path, read, (values[node],)))
        flow.overwritten.update(values[of] for of in _same_memory(_written(node, module), model))
    for seer, node in seen:
        flow.sees(seer, values[node])
    return flow


def _written(node: fx.Node, module: object) -> list[fx.Node]:
    """The arguments over which a call may write.  ``torch.fx`` records ``y += x`` as ``y + x``."""
    name = _name(node)
    out = [leaf for leaf in tree_leaves(node.kwargs.get("out")) if isinstance(leaf, fx.Node)]
    if module is not None:
        writes = bool(getattr(module, "inplace", False))
    else:
        # PyTorch hands the arguments of its Python functions on by name.
        writes = (
            (name.endswith("_") and not name.endswith("__"))
            or node.kwargs.get("inplace") is True
            or (node.target is getattr(operator, name, None) and f"i{name.strip('_')}" in vars(operator))
        )
    first = [leaf for leaf in tree_leaves(node.args[:1]) if isinstance(leaf, fx.Node)] or node.all_input_nodes[:1]
    return [*out, *first] if writes else out


def _same_memory(nodes: list[fx.Node], model: nn.Module) -> Iterator[fx.Node]:
    """The nodes, and the nodes whose results they may be views of."""
    for node in nodes:
        yield node
        if node.op == "call_module":
            name = type(model.get_submodule(str(node.target))).__name__
        else:
            name = str(node.args[1]) if node.target is getattr else _name(node)
        if name in VIEWS:
            yield from _same_memory(node.all_input_nodes[:1], model)


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def _is_metadata(node: fx.Node, name: str) -> bool:
    if node.op == "call_function" and node.target is getattr:
        return node.args[1] in ATTRIBUTES
    return node.op == "call_method" and name in METADATA


def _changes_nothing(node: fx.Node, name: str, module: object) -> bool:
    if type(module) is nn.Identity:
        return True
    if isinstance(module, DROPOUTS) and type(module) in DROPOUTS:
        return bool(module.p == 0 or not module.training)
    if node.op == "call_function" and name in DROPOUT_FUNCTIONS:
        return bool(node.kwargs.get("p", 0.5) == 0 or node.kwargs.get("training", True) is False)
    return False
