"""Norms for the factories of MONAI, and conversion and an inferer for a bundle's configuration."""

import inspect
import logging
from collections.abc import Callable, Sequence
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from .. import nn as fused
from .._torch import tree_leaves, tree_map_only
from ..activation import is_invertible, parse_activation
from ..convert import conversion, convert
from ..inference import sliding_window_labels
from .common import needed

OP = "fusedseg.integrations.monai"
_factories = needed("monai", "monai", "monai.networks.layers.factories")
_MetaTensor = needed("monai", "monai", "monai.data.meta_tensor").MetaTensor
_Inferer: Any = needed("monai", "monai", "monai.inferers").Inferer
logger = logging.getLogger(__name__)

# The attribute of a plain tensor that has the MetaTensor it was made of.
SOURCE = "_fusedseg_meta_tensor"


def register() -> None:
    """Adds "fused_batch", "fused_instance" and "fused_group" to the factory ``monai.networks.layers.Norm``.

    They are a norm and an activation in one module, for one to three spatial dimensions, so the network gets no
    activation of its own::

        UNet(spatial_dims=3, ..., norm=("fused_instance", {"affine": True}), act="")

    equals the network with ``norm=("instance", {"affine": True})`` and ``act=("leakyrelu", {"negative_slope": 0.01})``,
    and has its ``state_dict``.  The arguments in the dictionary are those of the stock norm, and:

    * ``activation`` and ``activation_param``, as in ``fusedseg.BatchNormAct``; leaky_relu with slope 0.01 by default;
    * ``inplace``, False by default, which keeps the input.  With True the module writes over its input and keeps the
      output only, where the activation has an inverse.  Use it only in networks in which a norm is alone in reading
      what is before it, such as ``UNet``; in ``SegResNet``, whose blocks add the input of their first norm to their
      output, the result would be wrong without an error.

    A second call does nothing.
    """
    for name, make in {"fused_batch": _batch, "fused_instance": _instance, "fused_group": _group}.items():
        if name.upper() not in _factories.Norm.components:
            _factories.Norm.add_factory_class(name, make)


def in_one_graph() -> None:
    """Lets ``torch.compile`` capture ``BasicUNet``, ``BasicUNetPlusPlus`` and ``FlexibleUNet`` as one graph::

        fusedseg.integrations.monai.in_one_graph()
        net = torch.compile(BasicUNet(3, 1, 2), backend="fusedseg")

    Their decoders ask ``torch.jit.isinstance`` whether there is a skip, and PyTorch's compiler ends a graph at this
    function.  From this call on, they ask Python's ``isinstance``, which gives the same answer for tensors.  It holds
    for all such networks of the process, with any backend.  A second call does nothing.
    """
    block = needed("monai", "monai", "monai.networks.nets.basic_unet").UpCat
    stock = block.forward
    if isinstance(stock.__globals__["torch"], SimpleNamespace):
        return
    jit = SimpleNamespace(**{**vars(torch.jit), "isinstance": isinstance})
    names = {**stock.__globals__, "torch": SimpleNamespace(**{**vars(torch), "jit": jit})}
    block.forward = FunctionType(stock.__code__, names, stock.__name__, stock.__defaults__, stock.__closure__)


# MONAI passes the number of channels by the name that the signature has, as in the stock norms.
def _batch(num_features: int, **options: Any) -> nn.Module:
    return _made("fused_batch", fused.BatchNormAct, fused.InPlaceABN, num_features=num_features, **options)


def _instance(num_features: int, **options: Any) -> nn.Module:
    classes = fused.InstanceNormAct, fused.InPlaceInstanceNormAct
    return _made("fused_instance", *classes, num_features=num_features, **options)


def _group(num_groups: int, num_channels: int, **options: Any) -> nn.Module:
    classes = fused.GroupNormAct, fused.InPlaceGroupNormAct
    return _made("fused_group", *classes, num_groups=num_groups, num_channels=num_channels, **options)


def _made(
    name: str,
    exact: type[nn.Module],
    in_place: type[nn.Module],
    *,
    activation: str = "leaky_relu",
    activation_param: float | str | None = None,
    inplace: bool = False,
    **options: object,
) -> nn.Module:
    if not isinstance(inplace, bool):
        raise TypeError(f"{OP}, {name}: inplace must be True or False, got {inplace!r}")
    act = parse_activation(f"{OP}, {name}", activation, activation_param)
    if inplace and not is_invertible(act.name, act.param):
        raise ValueError(f"{OP}, {name}: activation must have an inverse if inplace is True, got {act}")
    if inplace:
        return in_place(activation=activation, activation_param=act.param, **options)
    norm = exact(activation=activation, activation_param=activation_param, **options)
    norm.register_forward_hook(_with_meta)
    return norm


def _with_meta(norm: nn.Module, args: tuple[Any, ...], out: Tensor) -> Any:
    """Gives the output of a norm the metadata of its input; an op that writes over its input does that by itself."""
    return _like(out, args[0]) if isinstance(args[0], _MetaTensor) else None


def converted(model: nn.Module) -> nn.Module:
    """``fusedseg.convert`` for the networks of MONAI, for ``_target_`` in the configuration of a bundle.

    The model computes with plain tensors, and returns a ``MetaTensor`` if its first one among the inputs is one, as
    the stock model does.  This matters: blocks run their stock modules for a tensor of a subclass, so a model that is
    only converted keeps all of its bytes when MONAI's data loaders call it.

    Args:
        model: a network; it is changed in place.  A model that is converted already stays as it is.

    What is served and what stays stock (``fusedseg.conversion``) is logged with level INFO, under the name of this
    module.
    """
    convert(model)
    logger.info("%s: %s", type(model).__name__, conversion(model))
    if _to_plain not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_to_plain, with_kwargs=True)
        model.register_forward_hook(_to_meta, with_kwargs=True)
    return model


def _to_plain(model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
    if not any(isinstance(value, _MetaTensor) for value in (*args, *kwargs.values())):
        return None
    return tree_map_only(_MetaTensor, _plain, (args, kwargs))


def _plain(tensor: Any) -> Tensor:
    plain = tensor.as_tensor()
    setattr(plain, SOURCE, tensor)
    return plain


def _to_meta(model: nn.Module, args: object, kwargs: object, out: object) -> Any:
    if torch.compiler.is_compiling():
        return out
    sources = [leaf.__dict__[SOURCE] for leaf in tree_leaves((args, kwargs)) if SOURCE in getattr(leaf, "__dict__", ())]
    return tree_map_only(Tensor, lambda tensor: _like(tensor, sources[0]), out) if sources else out


def _like(tensor: Tensor, source: Any) -> Any:
    """The tensor with the metadata of ``source``, as a function of MONAI's tensors would return it."""
    made = tensor.as_subclass(_MetaTensor)
    made.is_batch = source.is_batch
    made.copy_meta_from(source, copy_attr=not source.is_batch)
    return made


class SlidingWindowLabels(_Inferer):
    """The labels of ``SlidingWindowInferer`` and an argmax, without the scores of all classes for the whole image.

    It stands in the place of ``SlidingWindowInferer`` in an evaluator or a bundle, whose post-processing then needs no
    ``Activationsd`` and no ``AsDiscreted(argmax=True)``.  See ``fusedseg.sliding_window_labels``.

    Args:
        roi_size, sw_batch_size, overlap, mode: as in ``SlidingWindowInferer``.
        options: more arguments of ``fusedseg.sliding_window_labels``.  ``sigma_scale``, ``padding_mode``, ``cval``,
            ``sw_device``, ``device`` and ``progress`` mean what they mean in MONAI; ``regions`` and ``mirror`` are new.

    A call with images (N, C, *spatial) and a network returns labels (N, 1, *spatial) in the smallest integer dtype that
    holds them, or truth values (N, K, *spatial) for ``regions=True``.  For a ``MetaTensor`` it is one, with the
    metadata of the image.  More arguments of the call go to the network.

    Raises:
        TypeError: an argument is not one of these, such as MONAI's ``buffer_steps``.
        ValueError: as in ``fusedseg.sliding_window_labels``, when an image is there.
    """

    def __init__(
        self,
        roi_size: int | Sequence[int],
        sw_batch_size: int = 1,
        overlap: float | Sequence[float] = 0.25,
        mode: str = "constant",
        **options: Any,
    ) -> None:
        super().__init__()
        self.options = {"sw_batch_size": sw_batch_size, "mode": mode, **options}
        self.roi_size, self.overlap = roi_size, overlap
        try:
            inspect.signature(sliding_window_labels).bind(None, None, roi_size, overlap, **self.options)
        except TypeError as error:
            raise TypeError(f"{OP}.SlidingWindowLabels: {error}") from None

    def __call__(self, inputs: Any, network: Callable[..., Tensor], *args: object, **kwargs: object) -> Any:
        plain = inputs.as_tensor() if isinstance(inputs, _MetaTensor) else inputs

        def model(windows: Tensor) -> Tensor:
            return network(windows, *args, **kwargs)

        labels = sliding_window_labels(model, plain, self.roi_size, self.overlap, **self.options)
        if labels.dim() < plain.dim():
            labels = labels.unsqueeze(1)
        return _like(labels, inputs) if isinstance(inputs, _MetaTensor) else labels
