"""What each op registers in its own file: its family of kernels with a self-test, and its ops of graphs.

Other files walk these tables and name no op: the self-test and ``fusedseg doctor`` walk FAMILIES, the compiler's table
of ops and the tests walk OPS, and generated code looks into DIRECT and REPLAYED.  ``ops/__init__.py`` imports every
file of ``ops``, so that the tables are whole.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .check import ACTIVATION_DTYPES


class Result(NamedTuple):
    """A result of a kernel, the same result in float64, and the largest allowed relative error."""

    what: str
    found: Tensor
    expected: Tensor
    tolerance: float


SelfTest = Callable[[torch.dtype, torch.device], Iterator[Result]]


class Family(NamedTuple):
    """Kernels that run on a device only if all of them pass their self-test there.

    self_test: launches the kernels on small tensors, and yields each result beside its reference.
    dtypes: those that the kernels compute in.
    runs_on: whether the ops use the family on a device.
    instead: what takes the place of a way of making calls that fails; "" for kernels, whose place PyTorch's ops take.
    compiles: whether the kernels are Triton's, and are compiled before their first launch.
    """

    self_test: SelfTest
    dtypes: tuple[torch.dtype, ...] = ACTIVATION_DTYPES
    runs_on: Callable[[torch.device], bool] = lambda device: True
    instead: str = ""
    compiles: bool = True


FAMILIES: dict[str, Family] = {}


def family(name: str, **options: Any) -> Callable[[SelfTest], SelfTest]:
    """Decorates the self-test of a family.  The options are the fields of ``Family``."""

    def register(self_test: SelfTest) -> SelfTest:
        FAMILIES[name] = Family(self_test, **options)
        return self_test

    return register


# For each op of graphs the columns of its row in ``compiler/op_table.py``, which an op without columns does not have.
OPS: dict[str, dict[str, Any]] = {}
# The function that generated code calls in place of an op.
DIRECT: dict[Any, Callable[..., Any]] = {}
# The ops of DIRECT whose launches depend on nothing but sizes, strides and constants, so that they can be replayed.
REPLAYED: set[Any] = set()


def serve(op: Any, function: Callable[..., Any], replayed: bool = True) -> None:
    """Makes generated code call ``function``, which has the arguments and results of ``op``."""
    DIRECT[op] = function
    if replayed:
        REPLAYED.add(op)


def whole(results: Iterable[Tensor | None], x: Tensor) -> tuple[Tensor, ...]:
    """The results of an op of graphs, which cannot return None: an empty tensor stands for it."""
    return tuple(x.new_empty(0) if v is None else v for v in results)


def graph_op(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any] | None = None,
    gradient: tuple[Callable[..., Any], Callable[..., Any]] | None = None,
    row: dict[str, Any] | None = None,
    flexible: bool = False,
    served: bool = False,
) -> Any:
    """Defines an op of this package for graphs.

    Args:
        schema: the name, the arguments and the results, without the namespace.
        run: the op.
        fake: the op on tensors without values; None if ``run`` serves them too.
        gradient: backward, and what sets up its context; None for an op that autograd does not differentiate.
        row: the columns of its row, see ``OPS``.
        flexible: whether a compiler may give its tensors any memory format.  Such an op checks no aliases.
        served: whether generated code calls ``run`` itself (``serve``).
    """
    name, _, rest = schema.partition("(")
    whole, rest = f"fusedseg::{name}", f"({rest}"
    if flexible:
        torch.library.define(whole, rest, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))
        torch.library.impl(whole, "default", run)
    else:
        torch.library.custom_op(whole, run, mutates_args=(), schema=rest)
    torch.library.register_fake(whole, fake or run)
    if gradient is not None:
        torch.library.register_autograd(whole, gradient[0], setup_context=gradient[1])
    op = getattr(torch.ops.fusedseg, name).default
    OPS[whole] = row or {}
    if served:
        serve(op, run)
    return op
