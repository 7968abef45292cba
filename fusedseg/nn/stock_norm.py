"""What all norm modules share: the shape that they take, and the way from a stock norm and back to one."""

from typing import Any

from torch import Tensor, nn

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
GROUP_NORMS = (nn.GroupNorm,)


class StockNorm:
    """A base class beside the stock norm whose parameters, buffers and settings a module has."""

    # the stock norms, in the order of their spatial dimensions where there are several
    stock: tuple[type[nn.Module], ...]

    def _check_shape(self, x: Tensor, channels: int) -> None:
        if not isinstance(x, Tensor) or not 2 <= x.dim() <= 5 or x.shape[1] != channels:
            came = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(
                f"fusedseg.{type(self).__name__}: input must have shape (N, {channels}) with up to three spatial "
                f"dimensions after it, got {came}"
            )

    @classmethod
    def _from_stock(cls, norm: nn.Module, **options: Any) -> Any:
        """A module of this class with these options and the very parameters and buffers of ``norm``."""
        if type(norm) not in cls.stock:
            names = ", ".join(f"nn.{c.__name__}" for c in cls.stock)
            raise TypeError(
                f"fusedseg.{cls.__name__}.from_norm: norm must be one of {names}, got {type(norm).__name__}"
            )
        made = cls(*_arguments(norm), **options)
        _adopt(made, norm)
        return made

    def to_norm(self, dims: int = 2) -> nn.Module:
        """The stock norm, for ``dims`` spatial dimensions, with this module's very parameters and buffers; the
        activation comes after it."""
        if dims not in (1, 2, 3):
            raise ValueError(f"fusedseg.{type(self).__name__}.to_norm: dims must be 1, 2 or 3, got {dims!r}")
        norm = self.stock[min(dims, len(self.stock)) - 1](*_arguments(self))
        _adopt(norm, self)
        return norm


def _arguments(norm: Any) -> tuple:
    """Of a norm without parameters or buffers, which it is to adopt."""
    if isinstance(norm, nn.GroupNorm):
        return norm.num_groups, norm.num_channels, norm.eps, False
    return norm.num_features, norm.eps, norm.momentum, False, False


def _adopt(norm: Any, other: Any) -> None:
    for flag in ("affine", "track_running_stats"):
        if hasattr(other, flag):
            setattr(norm, flag, getattr(other, flag))
    norm.weight, norm.bias = other.weight, other.bias
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        if hasattr(other, name):
            # buffers that were registered as None would otherwise stay out of the state dict's order
            delattr(norm, name)
            norm.register_buffer(name, getattr(other, name))
    norm.train(other.training)
