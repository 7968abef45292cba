"""Norms for MONAI's factory, an inferer that returns labels, and networks of ``UpCat`` as one graph."""

import inspect
from collections.abc import Callable, Sequence
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from monai.data.meta_tensor import MetaTensor
from monai.inferers import Inferer
from monai.networks.layers.factories import Norm
from monai.networks.nets.basic_unet import UpCat
from torch import Tensor, nn

from .. import nn as fused
from ..activation import is_invertible, parse_activation
from ..inference import sliding_window_labels

OP = "fusedseg.integrations.monai"


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
    # MONAI says that a factory is a class; its own factories are functions.
    made: dict[str, Any] = {"fused_batch": _batch, "fused_instance": _instance, "fused_group": _group}
    for name, make in made.items():
        if name.upper() not in Norm.components:
            Norm.add_factory_class(name, make)


def in_one_graph() -> None:
    """Lets ``torch.compile`` capture ``BasicUNet``, ``BasicUNetPlusPlus`` and ``FlexibleUNet`` as one graph::

        fusedseg.integrations.monai.in_one_graph()
        net = torch.compile(BasicUNet(3, 1, 2), backend="fusedseg")

    Their decoders ask ``torch.jit.isinstance`` whether there is a skip, and PyTorch's compiler ends a graph at this
    function.  From this call on, they ask Python's ``isinstance``, which gives the same answer for tensors.  It holds
    for all such networks of the process, with any backend.  A second call does nothing.
    """
    block: Any = UpCat
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
    return _like(out, args[0]) if isinstance(args[0], MetaTensor) else None


def _like(tensor: Tensor, source: MetaTensor) -> Any:
    """The tensor with the metadata of ``source``, as a function of MONAI's tensors would return it."""
    made = tensor.as_subclass(MetaTensor)
    made.is_batch = source.is_batch
    made.copy_meta_from(source, copy_attr=not source.is_batch)
    return made


class SlidingWindowLabels(Inferer):
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
        plain = inputs.as_tensor() if isinstance(inputs, MetaTensor) else inputs

        def model(windows: Tensor) -> Tensor:
            return network(windows, *args, **kwargs)

        labels = sliding_window_labels(model, plain, self.roi_size, self.overlap, **self.options)
        if labels.dim() < plain.dim():
            labels = labels.unsqueeze(1)
        return _like(labels, inputs) if isinstance(inputs, MetaTensor) else labels
