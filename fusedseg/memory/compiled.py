"""What ``torch.compile`` keeps for backward, read from the graphs that its partitioner makes.

The partitioner divides the graph of forward and backward in two, and decides which values forward keeps and which ones
backward computes again.  It works on shapes alone, so a model without values is enough, and no code is generated.
"""

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from .._torch import partitioner
from .buffers import Buffers, results
from .meter import key_of, mean_of

OP = "fusedseg.memory.partitions"


class NotOneGraph(RuntimeError):
    """Raised if a model cannot be compiled as one graph, or needs no gradient."""


class Partition(NamedTuple):
    """What one way to divide the graph keeps.

    Attributes:
        kept: bytes that forward keeps for backward, without parameters and buffers.
        peak: the most bytes at once if elementwise functions are fused (``buffers.py``), without inputs and parameters.
        repeated: the arithmetic of convolutions and matrix products that backward repeats, as a share of forward's.
    """

    kept: int
    peak: int
    repeated: float


# A function that is called with the graph of forward and backward, its inputs and the keywords of the compiler's
# partitioner, and divides the graph.
Way = Callable[[fx.GraphModule, Any, dict[str, Any]], tuple[fx.GraphModule, fx.GraphModule]]


def divided(
    model: nn.Module, inputs: Sequence[Tensor], ways: Sequence[Way], autocast: torch.dtype | None = None
) -> list[Partition]:
    """Compiles a model, and counts what its graph keeps if it is divided in each of several ways.

    The graph is decomposed as for Inductor.  The compiler's caches are emptied before and after, so that functions that
    were compiled before are compiled again when they are called next.

    Args:
        model: any module that ``torch.compile(fullgraph=True)`` can trace; it may be fake, inside its fake mode.
        inputs: its arguments.
        ways: each gets a copy of the graph.
        autocast: the dtype of autocast around forward.

    Raises:
        NotOneGraph: the model cannot be compiled as one graph, or needs no gradient.
    """
    parts = partitioner()
    found: list[Partition] = []
    owned = {tuple(tensor.shape) for tensor in (*model.parameters(), *model.buffers())}

    def divide(joint: fx.GraphModule, joint_inputs: object, **options: Any) -> Any:
        total = _flops(joint)
        for way in ways:
            with warnings.catch_warnings():
                # What a way cannot reach is seen in its bytes.
                warnings.simplefilter("ignore", UserWarning)
                forward, backward = way(joint if way is ways[-1] else twin_of(joint), joint_inputs, options)
            first = _flops(forward)
            found.append(
                Partition(
                    _kept(forward, owned, options["num_fwd_outputs"]),
                    peak_if_fused(forward, backward),
                    (first + _flops(backward) - total) / max(first, 1),
                )
            )
        # The model runs with the last way.
        return forward, backward

    def as_it_is(graph: fx.GraphModule, example: object) -> Any:
        return parts.make_boxed_func(graph.forward)

    backend = parts.aot_autograd(
        fw_compiler=as_it_is, bw_compiler=as_it_is, partition_fn=divide, decompositions=parts.decompositions
    )
    torch.compiler.reset()
    try:
        with warnings.catch_warnings(), torch.autocast("cpu", autocast or torch.bfloat16, autocast is not None):
            # The warning that nothing counts what is kept is wrong here.
            warnings.filterwarnings("ignore", "fusedseg.convert: compiled code runs the calls twice")
            mean_of(torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(*inputs))
    # The compiler may raise any error.
    except Exception as error:
        cause = getattr(error, "inner_exception", error)
        first = next(iter(str(cause).strip().splitlines()), "")
        raise NotOneGraph(f"{OP}: the compiler refuses the model: {type(cause).__name__}: {first}") from error
    finally:
        torch.compiler.reset()
    if not found:
        raise NotOneGraph(f"{OP}: no part of the model needs a gradient")
    return found


def _kept(forward: fx.GraphModule, owned: set[tuple[int, ...]], outputs: int) -> int:
    """The bytes that forward keeps; ``owned`` has the shapes of parameters and buffers, inputs that do not count."""
    (returned,) = next(node for node in forward.graph.nodes if node.op == "output").args
    given = [t for node in forward.graph.nodes if node.op == "placeholder" for t in results(node)]
    # Views of parameters are parameters.
    uncounted = {key_of(t) for t in given if tuple(t.shape) in owned}
    made = [t for node in returned[outputs:] if isinstance(node, fx.Node) for t in results(node)]
    return sum({key_of(t): t.untyped_storage().nbytes() for t in made if key_of(t) not in uncounted}.values())


def twin_of(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph."""
    with warnings.catch_warnings():
        # Copying a graph warns of a class of PyTorch that its own copy uses.
        warnings.simplefilter("ignore", FutureWarning)
        return copy.deepcopy(module)


def peak_if_fused(forward: fx.GraphModule, backward: fx.GraphModule) -> int:
    """The most bytes at once in forward or backward, without parameters, buffers and inputs of the model.

    Elementwise functions are computed inside other kernels.
    """
    is_fusible = partitioner().op_list().is_fusible
    before = {node.name for node in forward.graph.nodes if node.op == "placeholder"}
    given = [node for node in backward.graph.nodes if node.op == "placeholder" and node.name not in before]
    return max(Buffers(forward.graph, is_fusible).peak(), Buffers(backward.graph, is_fusible).peak(given))


def _flops(module: fx.GraphModule) -> int:
    """The arithmetic of the convolutions and matrix products of a graph; a product and a sum count as two."""
    from torch.utils.flop_counter import flop_registry

    def value_of(node: fx.Node) -> Any:
        return node.meta["val"]

    total = 0
    for node in module.graph.nodes:
        count: Callable[..., int] | None = flop_registry.get(getattr(node.target, "overloadpacket", None))
        if node.op == "call_function" and count is not None:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), value_of)
            total += count(*args, **kwargs, out_val=node.meta["val"])
    return total
