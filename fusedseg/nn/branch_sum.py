"""``BranchSum``: the sum of modules of one input, never stacked."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from .leaf import as_leaf
from .unscriptable import Unscriptable


def running_sum(op: str, terms: Iterable[Tensor]) -> Tensor:
    """The sum of tensors of one shape, each let go as soon as it is added; an only term is returned as it is.

    A term is never written: autograd or others may hold it.  The first sum is a new tensor that nobody else sees, and
    addition keeps nothing for backward, so from the third term on the sum is written over itself, unless the term's
    dtype widens it.
    """
    total, ours = None, False
    for i, y in enumerate(terms):
        if not isinstance(y, Tensor):
            raise TypeError(f"{op}: branch {i} must return a tensor, got {type(y).__name__}")
        if total is None:
            total = y
        elif y.shape != total.shape:
            raise ValueError(
                f"{op}: branch {i} must return shape {tuple(total.shape)}, as the branches before it, "
                f"got {tuple(y.shape)}"
            )
        elif ours and torch.promote_types(total.dtype, y.dtype) == total.dtype:
            total.add_(y)
        else:
            total, ours = total + y, True
        # or it would live while the next branch runs
        del y
    assert total is not None
    return total


class BranchSum(Unscriptable, nn.Module):
    """The sum of what modules make of one input.

    Equals::

        torch.stack([branch(x) for branch in branches]).sum(0)

    but neither forms the stack nor holds more than one branch's output beside the sum.  For branches that are
    convolutions of equal geometry ``ConvBank2d`` does with one convolution what this does with one each.

    Shapes: x to whatever the branches return, all of one shape.  Dtypes that differ are promoted, as by
    ``torch.stack``.  In half precision every addition rounds to it, where the stack's sum rounds once.

    Args:
        branches: modules, at least one.  A branch may return its input, a view, or a tensor that autograd keeps: what
            branches return is not written to.

    Kept for backward: what the branches keep; the sum keeps nothing.

    Falls back: nothing.  Branches run in their order, each on the same x: one that writes over its input changes what
    those after it see, as it would in the stack.

    Raises:
        ValueError: no branches; branches that return different shapes.
        TypeError: a branch that is no module or returns no tensor.
    """

    def __init__(self, branches: Iterable[nn.Module]) -> None:
        super().__init__()
        branches = list(branches)
        if not branches:
            raise ValueError("fusedseg.BranchSum: branches must hold at least one module, got none")
        for branch in branches:
            _check_module("fusedseg.BranchSum", "branches must be modules", branch)
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(x, Proxy):
            return as_leaf(self, x)
        return running_sum("fusedseg.BranchSum", (branch(x) for branch in self.branches))

    def grow(self, module: nn.Module) -> list[nn.Parameter]:
        """Adds a branch and returns its parameters, for ``optimizer.add_param_group({"params": ...})``.

        Those that the other branches hold already are left out, since the optimizer has them.  The function changes by
        what ``module`` returns: nothing, where its last layer is zero.
        """
        _check_module("fusedseg.BranchSum.grow", "module must be a module", module)
        known = {id(p) for p in self.parameters()}
        self.branches.append(module.train(self.training))
        return [p for p in module.parameters() if id(p) not in known]

    def __len__(self) -> int:
        return len(self.branches)


def _check_module(op: str, expected: str, module: object) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"{op}: {expected}, got {type(module).__name__}")
