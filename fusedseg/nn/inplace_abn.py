"""``InPlaceABN``: BatchNorm and activation in one module that keeps one tensor."""

from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from ..ops.check import check_dtype
from ..ops.norm.checks import check
from ..ops.norm.op import normalise
from ..ops.norm.spec import Passed, Spec
from ..ops.recompute.recipes import unwatched
from .batch_statistics import BatchStatistics
from .invertible import Invertible
from .leaf import as_leaf

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class InPlaceABN(Invertible, BatchStatistics, _BatchNorm):
    """Batch normalisation and an invertible activation over (N, C) or (N, C, *spatial), written over the input.

    Equals, for one to three spatial dimensions, or none::

        nn.Sequential(nn.BatchNorm2d(C, eps, momentum, affine, track_running_stats), nn.LeakyReLU(0.01))

    whose two tensors kept for backward become one: the output.  ``state_dict`` is that of ``nn.BatchNorm2d``, so its
    checkpoints load, strictly, and give the same function for any weight, also negative, tiny or zero.

    Use it on a tensor that nobody else reads, such as a convolution's output, and use what it returns.

    ``forward(x, residual)`` adds the residual, of the shape of x, before the activation, as residual blocks do.

    Args:
        num_features: C.
        eps, momentum, affine, track_running_stats: as in ``nn.BatchNorm2d``; ``momentum=None`` averages cumulatively.
        activation: the name of an activation that has an inverse, one of ``fusedseg.activation.INVERTIBLE``.
        activation_param: the negative slope of leaky_relu or the alpha of elu, > 0; unused where there is none.
        device, dtype: of parameters and buffers.

    Kept for backward: the output, 1 / sqrt(var + eps), the parameters and the residual; and the normalised input of
    those channels whose weight is too small beside their bias, or beside the residual, to rebuild it (see
    ``functional.inplace_abn``).  On a GPU that list of channels follows an optimizer's step without making the host
    wait, and may lag behind it by a step; loading a state dict or changing the parameters in place refreshes it at once
    (changes through ``.data`` are not seen).  A captured CUDA graph keeps the list of the time of its capture.

    Under ``torch.utils.checkpoint`` running statistics move once; those of ``nn.BatchNorm2d`` move twice.

    Falls back: an input that is neither contiguous nor channels_last is copied once; ``momentum=None`` breaks the graph
    under ``torch.compile``, as in ``nn.BatchNorm2d``.

    It is a ``torch.nn.modules.batchnorm._BatchNorm``, as which ``torch.optim.swa_utils.update_bn`` and FSDP find it.

    Raises:
        RuntimeError: from ``nn.SyncBatchNorm.convert_sync_batchnorm``, which would replace it by a norm without an
            activation: call ``fusedseg.convert_sync`` instead.
        ValueError: an activation that cannot be inverted, naming the module that is exact for it; an input of another
            number of channels or dimensions, or otherwise unfit (see ``functional.inplace_abn``).
        TypeError: an integer or complex input or dtype.

    Source: Rota Bulo et al., "In-Place Activated BatchNorm for Memory-Optimized Training of DNNs", CVPR 2018.
    """

    OP = "fusedseg.InPlaceABN"
    EXACT = "BatchNormAct"

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        activation: str = "leaky_relu",
        activation_param: float = 0.01,
        *,
        device=None,
        dtype=None,
    ) -> None:
        act = self._parse(activation, activation_param)
        if dtype is not None:
            check_dtype(self.OP, "dtype", dtype)
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self._invert(act)

    def _check_shape(self, x: Tensor) -> None:
        if not isinstance(x, Tensor) or not 2 <= x.dim() <= 5 or x.shape[1] != self.num_features:
            came = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(
                f"{self.OP}: input must have shape (N, {self.num_features}) with up to three spatial dimensions after "
                f"it, got {came}"
            )

    @unwatched
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if isinstance(x, Proxy) or isinstance(residual, Proxy):
            return as_leaf(self, x, residual)
        self._check_shape(x)
        own, mean, var, momentum = self._statistics()
        passed = Passed(x, self.weight, self.bias, residual, None, mean, var)
        spec = Spec("output", self._act, self.eps, momentum, own)
        check(self.OP, passed, spec)
        z = normalise(passed, spec, self._kept_now(x.dtype, residual is not None))
        self._count_batch()
        return z

    @classmethod
    def from_batchnorm(
        cls, bn: _NormBase, activation: str = "leaky_relu", activation_param: float = 0.01
    ) -> "InPlaceABN":
        """An InPlaceABN with the very parameters and buffers of ``bn``, an ``nn.BatchNorm1d``, ``2d`` or ``3d``.

        ``Sequential(bn, activation)`` and the result are the same function.  Optimizers of ``bn`` keep working.
        """
        if type(bn) not in BATCH_NORMS:
            names = ", ".join(f"nn.{c.__name__}" for c in BATCH_NORMS)
            raise TypeError(f"fusedseg.InPlaceABN.from_batchnorm: bn must be one of {names}, got {type(bn).__name__}")
        made = cls(bn.num_features, bn.eps, bn.momentum, False, False, activation, activation_param)
        made._adopt(bn)
        return made

    def to_batchnorm(self, dims: int = 2) -> nn.Module:
        """The ``nn.BatchNorm{dims}d`` with this module's very parameters and buffers; the activation comes after."""
        if dims not in (1, 2, 3):
            raise ValueError(f"fusedseg.InPlaceABN.to_batchnorm: dims must be 1, 2 or 3, got {dims!r}")
        bn = BATCH_NORMS[dims - 1](self.num_features, self.eps, self.momentum, False, False)
        InPlaceABN._adopt(bn, self)
        return bn

    def _adopt(self: _NormBase, other: _NormBase) -> None:
        self.affine, self.track_running_stats = other.affine, other.track_running_stats
        self.weight, self.bias = other.weight, other.bias
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            # buffers that were registered as None would otherwise stay out of the state dict's order
            delattr(self, name)
            self.register_buffer(name, getattr(other, name))
        self.train(other.training)
