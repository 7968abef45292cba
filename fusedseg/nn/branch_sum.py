"""``BranchSum`` adds up the outputs of several modules without stacking them."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from .leaf import Unscriptable, as_leaf


def running_sum(op: str, terms: Iterable[Tensor]) -> Tensor:
    """The sum of tensors of one shape.  Each term is freed as soon as it is added; a single term is returned as it is.

    It never writes to a term, because autograd or other code may hold it.  The first sum is a new tensor that no other
    code holds, and addition keeps nothing for backward.  So from the third term on the sum is written over itself,
    unless the dtype of the term widens it.
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
        # Without this, the term would stay alive while the next branch runs.
        del y
    assert total is not None
    return total


class BranchSum(Unscriptable, nn.Module):
    """The sum of the outputs of several modules on one input.

    Equals::

        torch.stack([branch(x) for branch in branches]).sum(0)

    It neither forms the stack nor holds more than one output beside the sum.  If the branches are convolutions of equal
    geometry, ``ConvBank2d`` computes the same sum with a single convolution.

    Shapes: x may have any shape; all branches must return one shape.  Different dtypes are promoted, as by
    ``torch.stack``.  In half precision every addition rounds, while the sum of the stack rounds once.

    Args:
        branches: modules, at least one.  A branch may return its input, a view, or a tensor that autograd keeps,
            because ``BranchSum`` writes to no output of a branch.

    Kept for backward: the tensors that the branches keep.  The sum itself keeps nothing.

    The branches run in their order on the same x.  A branch that writes over its input changes the input of the
    branches after it, as it would in the stack.

    Raises:
        ValueError: there are no branches, or they return different shapes.
        TypeError: a branch is no module, or returns no tensor.
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

        Parameters that an earlier branch shares are left out, because the optimizer has them already.  The output of
        ``module`` is added to the sum from now on; to leave the function unchanged, set its last layer to zero.

        Raises:
            TypeError: ``module`` is no module.
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
