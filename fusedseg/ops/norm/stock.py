"""PyTorch's norms: the functions and the modules of each kind, and the norm op as these functions.

``norm_act`` is for programs that run without this package, and for a compiler to trace and fuse: the op of exported
programs, and in compiled code the op that keeps its input.  It stands for the functional op too where a compiler
decides by itself what is kept (``compiler/capture/stock_norms.py``).
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from ...activation import TABLE, Activation
from .call import Norm, Operands
from .statistic import BATCH, INSTANCE, Statistic

KindName = Literal["batch", "instance", "group"]


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of norm, by the values that share a statistic.

    name: its name in ``functional.norm_act``.
    function: PyTorch's function.
    own: the argument of the function that says whether the statistics are those of the input.  It is "" if they always
        are, and then there are no running statistics.
    base: the class of PyTorch's modules.
    modules: the modules in the order of their spatial dimensions, each with the fewest and the most dimensions of its
        input.
    dims: the fewest and the most dimensions of the input of a module of this package.
    spatial: the words for them in errors.
    channels: the attribute of a module with the number of its channels.
    settings: the arguments of the constructor of a module before ``affine``.
    statistic: the values that share a statistic; None if they are groups, whose number each call gives.
    autocast: whether the modules return the dtype of their input under autocast.
    """

    name: KindName
    function: Callable[..., Tensor]
    own: str
    base: type[nn.Module]
    modules: dict[type[nn.Module], tuple[int, int]]
    dims: tuple[int, int]
    spatial: str
    channels: str = "num_features"
    settings: Callable[[Any], tuple[Any, ...]] = lambda norm: (norm.num_features, norm.eps, norm.momentum)
    statistic: Statistic | None = BATCH
    autocast: bool = True

    def module(self, dims: int) -> Any:
        """The module of PyTorch for ``dims`` spatial dimensions."""
        return [*self.modules][min(dims, len(self.modules)) - 1]

    def over(self, num_groups: int | None = None) -> Statistic:
        """The values that share a statistic; ``num_groups`` counts for groups only."""
        return self.statistic or Statistic(True, num_groups)

    def call(
        self,
        module: Any,
        x: Tensor,
        act: Activation,
        keep: str,
        residual: Tensor | None = None,
        slope: Tensor | None = None,
        moves: bool = True,
        process_group: str | None = None,
    ) -> tuple[Operands, Norm]:
        """The op's tensors and its description for a call of a module.

        The statistics are chosen as a module of PyTorch chooses them.  It moves running statistics, unless ``moves`` is
        False.
        """
        over = self.statistic or Statistic(True, module.num_groups)
        mean = var = batches = None
        own, momentum = True, 0.0
        if self.own:
            own, tracked, momentum = module.training, module.track_running_stats, module.momentum
            if not own or (moves and (tracked or over.of_samples)):
                mean, var = module.running_mean, module.running_var
            if own and moves and tracked and not over.of_samples:
                batches = module.num_batches_tracked
            if momentum is None:
                momentum = 0.0 if batches is None else 1.0 / (float(batches) + 1.0)
            own = own or (not tracked if over.of_samples else mean is None)
        norm = Norm(keep, act, module.eps, momentum, own, over, process_group)
        return Operands(x, module.weight, module.bias, residual, slope, mean, var, batches), norm


BATCH_NORM = Kind(
    "batch", F.batch_norm, "training", _BatchNorm,
    {nn.BatchNorm1d: (2, 3), nn.BatchNorm2d: (4, 4), nn.BatchNorm3d: (5, 5)},
    (2, 5), "with up to three spatial dimensions after it",
)  # fmt: skip
INSTANCE_NORM = Kind(
    "instance", F.instance_norm, "use_input_stats", _InstanceNorm,
    {nn.InstanceNorm1d: (3, 3), nn.InstanceNorm2d: (4, 4), nn.InstanceNorm3d: (5, 5)},
    (3, 5), "with one to three spatial dimensions after it", statistic=INSTANCE,
)  # fmt: skip
GROUP_NORM = Kind(
    "group", F.group_norm, "", nn.GroupNorm, {nn.GroupNorm: (2, sys.maxsize)},
    (2, sys.maxsize), "with any spatial dimensions after it", "num_channels",
    settings=lambda norm: (norm.num_groups, norm.num_channels, norm.eps), statistic=None, autocast=False,
)  # fmt: skip
KINDS = {kind.name: kind for kind in (BATCH_NORM, INSTANCE_NORM, GROUP_NORM)}
OF_FUNCTION: dict[Any, Kind] = {kind.function: kind for kind in KINDS.values()}
OF_MODULE: dict[type, Kind] = {module: kind for kind in KINDS.values() for module in kind.modules}


def finished(y: Tensor, residual: Tensor | None, act: Activation, slope: Tensor | None = None) -> Tensor:
    """phi(y [+ residual])."""
    return TABLE[act.name].function(y if residual is None else y + residual, act.param if slope is None else slope)


def normalised(given: Operands, norm: Norm) -> Tensor:
    """The norm alone, by PyTorch's function."""
    x, weight, bias, _, _, running_mean, running_var, _ = given
    if norm.over.is_grouped:
        return F.group_norm(x, norm.over.groups_of(x.shape[1]), weight, bias, norm.eps)
    function = F.instance_norm if norm.over.of_samples else F.batch_norm
    return function(x, running_mean, running_var, weight, bias, norm.own, norm.momentum, norm.eps)


def norm_act(given: Operands, norm: Norm) -> Tensor:
    """The norm op of these arguments, as stock functions."""
    x, weight, bias, residual, slope, running_mean, running_var, _ = given
    if weight is None and bias is not None:
        # A bias alone has no gradient on CUDA.
        weight = torch.ones_like(bias)
    # Not all devices take parameters of another dtype than x in a group norm; autocast returns fp32.
    wide = x.to(weight.dtype) if norm.over.is_grouped and weight is not None else x
    y = normalised(Operands(wide, weight, bias, None, None, running_mean, running_var), norm.of_given())
    return finished(y.to(x.dtype) if norm.over.is_grouped else y, residual, norm.act, slope)
