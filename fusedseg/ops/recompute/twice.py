"""The calls that may run twice in a scope with a budget, and the rule by which they offer a recipe.

A chosen call offers itself as the recipe of its output: the same function with the same input, weight and bias, under
the same autocast state.  The weight is not copied.  Autograd saves it for the call itself, so a change of the weight
before backward raises the error that it raises in eager mode.

The call must give the same bits again.  At the first use of each signature it runs once more at once, and if a bit
differs, its output is kept (``same_bits``).
"""

import functools
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from ... import _torch
from ..._torch import FakeTensor
from ..cast import VERSION
from .calls import replay
from .choice import Call
from .plain import plain
from .saved import Autocast, Data

if TYPE_CHECKING:
    from .budgeted import BudgetRegistry

Function = Callable[..., Any]


def _of_convolution(out: Tensor, tensors: Sequence[Tensor]) -> int:
    return 2 * out.numel() * tensors[1][0].numel()


def _of_transposed(out: Tensor, tensors: Sequence[Tensor]) -> int:
    return 2 * tensors[0].numel() * tensors[1][0].numel()


def _of_product(out: Tensor, tensors: Sequence[Tensor]) -> int:
    return 2 * out.numel() * tensors[0].shape[-1]


def _of_attention(out: Tensor, tensors: Sequence[Tensor]) -> int:
    query, key, value = tensors
    return 2 * query[..., 0].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])


class _Row:
    """A function that may run twice.

    name: its name in a ``Call``.
    tensors: the number of arguments that are matrices or activations; the others are biases.
    flops: counts the operations of a call.
    saves_all: whether autograd saves all of these arguments, whichever of them requires a gradient.
    """

    __slots__ = ("flops", "name", "saves_all", "tensors")

    def __init__(self, name: str, tensors: int, flops: Callable[..., int], saves_all: bool) -> None:
        self.name, self.tensors, self.flops, self.saves_all = name, tensors, flops, saves_all


FUNCTIONS: dict[Function, _Row] = {}
for _dims in (1, 2, 3):
    for _name, _count in ((f"conv{_dims}d", _of_convolution), (f"conv_transpose{_dims}d", _of_transposed)):
        FUNCTIONS[getattr(F, _name)] = FUNCTIONS[getattr(torch, _name)] = _Row(_name, 2, _count, saves_all=True)
FUNCTIONS[F.linear] = _Row("linear", 2, _of_product, saves_all=False)
for _home in (torch, Tensor):
    FUNCTIONS[_home.bmm] = _Row("bmm", 2, _of_product, saves_all=False)
    FUNCTIONS[_home.matmul] = _Row("matmul", 2, _of_product, saves_all=False)
FUNCTIONS[Tensor.__matmul__] = FUNCTIONS[torch.matmul]
FUNCTIONS[F.scaled_dot_product_attention] = _Row("scaled_dot_product_attention", 3, _of_attention, saves_all=False)


def _frozen(value: Any) -> Hashable:
    """A hashable form of an argument, in which a tensor is only a mark."""
    if isinstance(value, Tensor):
        return "tensor"
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(part) for part in value)
    return value if isinstance(value, (int, float, str, bool, type(None))) else repr(value)


def described(name: str, args: Any, kwargs: Any, tensors: Sequence[Tensor], out: Tensor, flops: int) -> Call:
    """The ``Call`` of a function with these arguments and this result."""
    options = _frozen(args), tuple((key, _frozen(kwargs[key])) for key in sorted(kwargs))
    each = tuple((tuple(t.shape), t.dtype, t.stride()) for t in tensors)
    return Call(name, options, each, out.untyped_storage().nbytes(), flops, Autocast.of(out))


def rule(registry: "BudgetRegistry", func: Function, args: Any, kwargs: Any, stock: Any) -> Any:
    """The rule of the functions in ``FUNCTIONS``; ``stock`` is their rule in a scope without a budget, or None."""
    first_node, registry.packed = _torch.get_sequence_nr(), []
    try:
        out = func(*args, **kwargs) if stock is None else stock(registry, func, args, kwargs)
    finally:
        packed, registry.packed = registry.packed, None
    with _torch.DisableTorchFunction():
        if not (isinstance(out, Tensor) and out.requires_grad and out.is_floating_point() and plain(out)):
            return out
        again: Callable[..., Any]
        row, (again, tensors) = FUNCTIONS[func], replay(func, args, kwargs)
        big = tensors[: row.tensors]
        call = described(row.name, args, kwargs, tensors, out, row.flops(out, big) if len(big) == row.tensors else 0)
        repeatable = (
            len(big) == row.tensors and all(map(plain, tensors)) and all(t.is_floating_point() for t in tensors)
        )
        if not row.saves_all:
            # Autograd saves each factor of a product only if the other one requires a gradient.  If it saves one that
            # the scope does not, a later change of it would be an error that eager mode does not raise.
            repeatable = repeatable and all(t.requires_grad for t in big)
        if row.name == "scaled_dot_product_attention":
            repeatable = repeatable and len(tensors) == 3 and not (kwargs.get("dropout_p") or (args[4:5] or (0,))[0])
        repeatable = repeatable and _casts_are_certain(out, tensors, first_node)
        if repeatable and _chooses_by_gradient(row, big):
            again = _with_gradients(again)
        sources = [_saved_cast(t, packed or ()) if i < row.tensors else t for i, t in enumerate(tensors)]
        registry.called(call, out, again if repeatable else None, tensors, sources)
    return out


def _chooses_by_gradient(row: _Row, tensors: Sequence[Tensor]) -> bool:
    """Whether PyTorch's algorithm depends on who requires a gradient.

    A product of a matrix and a tensor of more dimensions, in an order that cannot be viewed as a matrix, is one product
    if the matrix requires a gradient, and otherwise one product for each sample, with other last bits.
    """
    if row.name not in ("linear", "matmul"):
        return False
    large, small = sorted(tensors, key=Tensor.dim, reverse=True)
    return large.dim() > 2 >= small.dim() and not large.is_contiguous()


def _with_gradients(again: Function) -> Function:
    """The call with tensors that require gradients, as in forward."""

    def call(*tensors: Tensor) -> Tensor:
        # The hooks save nothing, and those of the caller see nothing.
        with torch.enable_grad(), saved_tensors_hooks(lambda t: None, lambda t: t):
            return again(*(t.detach().requires_grad_() for t in tensors)).detach()

    return call


def _saved_cast(t: Tensor, packed: Sequence[Any]) -> "Tensor | Data":
    """What autograd has saved in place of an argument: the argument itself, or its cast under autocast."""
    if t.is_leaf and t.requires_grad:
        # The scope saves the parameter in place of its cast.
        return t
    casts = [kept for kept in packed if type(kept) is Data and kept.at.size == t.size() and kept.at.dtype != t.dtype]
    return casts[0] if len(casts) == 1 else t


def _casts_are_certain(out: Tensor, tensors: Sequence[Tensor], first_node: int) -> bool:
    """Whether autocast, if it is on, has cast the present values of the parameters in this call.

    Its cache may hold a cast of older values.  ``cast.is_cast`` has the same rule for one tensor.
    """
    if not Autocast.of(out).enabled:
        return True
    given = {t.grad_fn for t in tensors}
    stack, seen = [out.grad_fn], set()
    while stack:
        node: Any = stack.pop()
        if node is None or node in seen or node in given:
            continue
        seen.add(node)
        new = node._sequence_nr() >= first_node
        if node.name() == "ToCopyBackward0":
            parameter = getattr(node.next_functions[0][0], "variable", None)
            if parameter is not None:
                if not new and VERSION not in node.metadata:
                    return False
                if node.metadata.setdefault(VERSION, parameter._version) != parameter._version:
                    return False
        if new and not node.name().endswith("AccumulateGrad"):
            stack += [parent for parent, _ in node.next_functions]
    return True


# For each signature and device: whether the call gave the same bits twice.
_verdicts: dict[Hashable, bool] = {}
MOST_VERDICTS = 4096


def same_bits(call: Call, out: Tensor, again: Callable[..., Tensor], tensors: Sequence[Tensor]) -> bool:
    """Whether ``again(*tensors)`` gives ``out`` to the last bit; it is tried once for each signature of a process.

    Tensors without values have the verdict True.
    """
    if isinstance(out, FakeTensor) or out.is_meta:
        return True
    state = torch.get_num_threads(), torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled()
    key = call.signature, out.device, state
    verdict = _verdicts.get(key)
    if verdict is None:
        with torch.no_grad():
            repeated = again(*(t.detach() for t in tensors))
        verdict = repeated.stride() == out.stride() and torch.equal(_bits(repeated), _bits(out.detach()))
        if len(_verdicts) >= MOST_VERDICTS:
            _verdicts.clear()
        _verdicts[key] = verdict
        if not verdict:
            _warn_once(call.function, tuple(tuple(shape) for shape, *_ in call.tensors), str(out.device))
    return verdict


def _bits(t: Tensor) -> Tensor:
    """The bits as integers, because NaN differs from itself."""
    return t.contiguous().view(-1).view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.itemsize])


@functools.cache
def _warn_once(function: str, shapes: tuple, device: str) -> None:
    warnings.warn(
        f"fusedseg.recompute: {function} of {', '.join(map(str, shapes))} on {device} did not give the same bits "
        "twice, so that its output is kept; torch.use_deterministic_algorithms(True) or "
        "torch.backends.cudnn.benchmark = False may choose an algorithm that does",
        stacklevel=2,
    )
