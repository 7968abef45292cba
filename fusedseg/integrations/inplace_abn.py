"""The names of the package ``inplace_abn``, which many networks import, on the ops of fusedseg.

``install()`` puts this module in the place of the package.  Code such as segmentation_models_pytorch with
``decoder_use_norm="inplace"``, and timm's ``layers/inplace_abn.py``, then uses it.

Two things differ from the package.  The package scales by ``|weight| + eps``; this module scales by ``weight``, as
``nn.BatchNorm2d`` does.  So a checkpoint of this module is one of ``nn.BatchNorm2d``, and ``equal_weights`` translates
a checkpoint of the package.  And the package trains an activation that has no inverse, such as a leaky_relu of slope 0,
with wrong gradients; here the module keeps its input for it, like ``fusedseg.BatchNormAct``, and is exact.
"""

import copy
import functools
import sys
import types
import warnings
from collections.abc import MutableMapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..activation import TABLE, Activation, is_invertible, parse_activation
from ..functional.norms import normalised
from ..nn import InPlaceABN as _InPlaceABN
from ..nn.sync import SYNCHRONISED, Synchronised, group_name
from ..ops.norm.call import Norm, Operands
from ..ops.norm.kept import Kept

OP = "fusedseg.integrations.inplace_abn"
# The modules of the package.
NAMES = "inplace_abn", "inplace_abn.abn", "inplace_abn.functions"
# Modules that look for the package when they are imported, and the name that says whether they found it.
READERS = {"segmentation_models_pytorch.base.modules": "InPlaceABN", "timm.layers.inplace_abn": "has_iabn"}
Weights = TypeVar("Weights", bound=MutableMapping[str, Any])
__all__ = ["ABN", "InPlaceABN", "InPlaceABNSync", "equal_weights", "inplace_abn", "inplace_abn_sync", "install"]


def _keep(activation: str, param: float) -> tuple[str, Activation]:
    """What a module or function in place keeps, "output" or "input", and its activation."""
    # A leaky_relu of slope 0 is a ReLU.
    name = "relu" if activation == "leaky_relu" and param == 0 else activation
    act = parse_activation(OP, name, param if name in ("leaky_relu", "elu") else None)
    if TABLE[act.name].learned:
        raise ValueError(f"{OP}: activation must have no learned slope, got {activation!r}; use fusedseg.BatchNormAct")
    return "output" if is_invertible(act.name, act.param) else "input", act


@functools.cache
def _warn_of_negative_weights() -> None:
    warnings.warn(
        f"{OP}: a checkpoint with negative weights was loaded.  If the package inplace_abn trained it, its weights "
        f"mean |weight| + eps: load {OP}.equal_weights(state_dict, model) instead.  This warning comes once",
        stacklevel=2,
    )


class ABN(_InPlaceABN):
    """BatchNorm and activation, which keeps its input and leaves it unchanged.

    Equals ``nn.Sequential(nn.BatchNorm2d(...), activation)``, for one to three spatial dimensions or none.  The
    ``state_dict`` is that of ``nn.BatchNorm2d``.

    Args:
        num_features, eps, momentum, affine, track_running_stats: as in ``nn.BatchNorm2d``.
        activation: "relu", "leaky_relu", "elu", "identity", or another name of ``fusedseg.activation.NAMES`` but prelu.
        activation_param: the slope of leaky_relu or the alpha of elu; other activations ignore it.

    Kept for backward: x, the statistics and the parameters, as in ``fusedseg.BatchNormAct``.

    Raises:
        ValueError, TypeError: as in ``fusedseg.BatchNormAct``.
    """

    OP = f"{OP}.ABN"
    # This number tells a state dict of this module; the package, nn.BatchNorm2d and fusedseg.InPlaceABN write 2.
    _version = 3
    _in_place = False

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        activation: str = "leaky_relu",
        activation_param: float = 0.01,
    ) -> None:
        keep, act = _keep(activation, activation_param)
        super().__init__(num_features, eps, momentum, affine, track_running_stats, "identity")
        self.KEEP = keep if self._in_place else "input"
        self.activation, self.activation_param, self._act = activation, activation_param, act

    def _kept_now(self, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype, residual: bool) -> Kept | None:
        return super()._kept_now(weight, bias, dtype, residual) if self.KEEP == "output" else None

    def refresh_kept(self) -> None:
        if self.KEEP == "output":
            super().refresh_kept()

    def _load_from_state_dict(
        self, state_dict: dict[str, object], prefix: str, local_metadata: dict[str, object], *rest: object
    ) -> None:
        weight = state_dict.get(f"{prefix}weight")
        if local_metadata.get("version") != self._version and isinstance(weight, Tensor) and bool((weight < 0).any()):
            _warn_of_negative_weights()
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


class InPlaceABN(ABN):
    """BatchNorm and activation, written over the input; ``fusedseg.InPlaceABN`` with the arguments of the package.

    If the activation has no inverse, such as relu or a leaky_relu of slope 0, the module is exact like
    ``fusedseg.BatchNormAct``: it keeps its input and leaves it unchanged.

    Arguments, shapes and errors are those of ``ABN``.

    Kept for backward: the output, as in ``fusedseg.InPlaceABN``, or the input if the activation has no inverse.
    """

    OP = f"{OP}.InPlaceABN"
    _in_place = True


class InPlaceABNSync(Synchronised, ABN):
    """``InPlaceABN`` with the statistics of all processes of a group; see ``fusedseg.InPlaceABNSync``.

    Args:
        group: a group of ``torch.distributed``; None means all processes.

    All other arguments are those of ``InPlaceABN``.
    """

    OP = f"{OP}.InPlaceABNSync"
    _in_place = True

    def __init__(self, *args: Any, group: object = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.process_group = group


# A module that keeps its input goes on doing so.
SYNCHRONISED |= {ABN: InPlaceABNSync, InPlaceABN: InPlaceABNSync}


def inplace_abn(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    activation: str = "leaky_relu",
    activation_param: float = 0.01,
    *,
    process_group: str | None = None,
) -> Tensor:
    """The function of ``InPlaceABN``, with the arguments of the package; see ``fusedseg.functional.inplace_abn``.

    It writes over ``x``, unless the activation has no inverse.  ``process_group`` is the name of a group of processes
    whose statistics count.
    """
    given = Operands(x, weight=weight, bias=bias, running_mean=running_mean, running_var=running_var)
    keep, act = _keep(activation, activation_param)
    group = process_group if training else None
    norm = Norm(keep, act, eps=eps, momentum=momentum, own=training, process_group=group)
    return normalised(norm.name, given, norm)


def inplace_abn_sync(*args: Any, group: object = None, **options: Any) -> Tensor:
    """The function of ``InPlaceABNSync``: ``inplace_abn`` with the statistics of all processes of ``group``."""
    return inplace_abn(*args, process_group=group_name(group), **options)


def equal_weights(state_dict: Weights, model: nn.Module, *classes: type) -> Weights:
    """Translates a checkpoint that the package ``inplace_abn`` trained: ``|weight| + eps`` becomes the weight.

    Args:
        state_dict: the checkpoint; it is not changed.
        model: a model with the names of the checkpoint, whose modules of the ``classes`` say which weights to
            translate, and with which ``eps``.
        classes: the classes of these modules; by default ``InPlaceABN`` and ``InPlaceABNSync``.  The ``ABN`` of the
            package scales by ``weight``, so it is not among them.  For a model of ``nn.BatchNorm2d`` name that class.

    Returns:
        A new state dict, which loads into ``model``, into its twin with ``nn.BatchNorm2d``, and into fused modules.

    Raises:
        ValueError: the model has no module of the classes, or the checkpoint lacks the weight of one.
    """
    # A copy of a state dict has its `_metadata`, which a new dictionary lacks.
    state, found = copy.copy(state_dict), False
    wanted: Any = classes or (InPlaceABN, InPlaceABNSync)
    # A state dict has the weight of a shared module under each of its names.
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, wanted) and getattr(module, "weight", None) is not None:
            key, found = f"{name}.weight" if name else "weight", True
            if key not in state:
                raise ValueError(f"{OP}.equal_weights: state_dict must have the key {key!r}, which the model has")
            state[key] = state[key].abs() + module.eps
    if not found:
        raise ValueError(
            f"{OP}.equal_weights: model must have a module of the classes whose weights are translated; name the "
            "classes, as in equal_weights(state_dict, model, nn.BatchNorm2d)"
        )
    return state


def install() -> types.ModuleType:
    """Makes ``import inplace_abn`` import this module, and returns it.  Call it before the networks are imported.

    A second call does nothing.

    Raises:
        RuntimeError: the package ``inplace_abn`` itself is imported already, or a library that looks for it when it is
            imported has not found it.
    """
    ours = sys.modules[__name__]
    if sys.modules.get(NAMES[0], ours) is not ours:
        raise RuntimeError(
            f"{OP}.install: the package inplace_abn is imported already; call install() before anything imports it"
        )
    for module, name in READERS.items():
        if module in sys.modules and not getattr(sys.modules[module], name, None):
            raise RuntimeError(
                f"{OP}.install: {module} is imported already and has not found inplace_abn; call install() before it "
                "is imported"
            )
    for name in NAMES:
        sys.modules[name] = ours
    return ours
