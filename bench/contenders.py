"""The contenders: the layer or network of each, and how the module is treated before it runs."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

import fusedseg
from fusedseg.unet import UNet

from .harness import Missing
from .jobs import as_it_is

CONV = {2: nn.Conv2d, 3: nn.Conv3d}
CONV_ABN = {2: fusedseg.ConvABN2d, 3: fusedseg.ConvABN3d}
BATCH_NORM = {2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
INSTANCE_NORM = {2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}
SLOPE = 0.01


def inductor(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(graph, inputs)


class Compiled(nn.Module):
    """``torch.compile`` of a module; ``config`` has settings of the partitioner that differ from the defaults.

    Each instance has its own backend function, because dynamo caches by code object and backend.  An error of Inductor,
    for example without a C++ compiler, becomes ``Missing``.
    """

    def __init__(self, module: nn.Module, backend: Callable[..., Any] = inductor, **config: Any) -> None:
        super().__init__()
        self.module = module

        def own(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
            with torch._functorch.config.patch(**config):
                return backend(graph, inputs)

        # The shapes of a bench do not change.
        self.compiled = torch.compile(module, backend=own, dynamic=False)
        self.works = False

    def forward(self, x: Tensor) -> Tensor:
        if self.works:
            return self.compiled(x)
        try:
            out = self.compiled(x)
        except Exception as error:
            # Dynamo's own error only says that the backend failed.
            cause = getattr(error, "inner_exception", error)
            first = next(iter(str(cause).strip().splitlines()), "")
            raise Missing(f"torch.compile failed: {type(cause).__name__}: {first}") from error
        self.works = True
        return out


def leaky(dims: int) -> Callable[[int], nn.Module]:
    return lambda channels: nn.Sequential(BATCH_NORM[dims](channels), nn.LeakyReLU(SLOPE, inplace=True))


def relu(dims: int) -> Callable[[int], nn.Module]:
    return lambda channels: nn.Sequential(BATCH_NORM[dims](channels), nn.ReLU(inplace=True))


def published(dims: int) -> Callable[[int], nn.Module]:
    try:
        from inplace_abn import InPlaceABN  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise Missing("the inplace_abn package is not installed") from error
    return InPlaceABN


def ours(dims: int) -> Callable[[int], nn.Module]:
    return fusedseg.InPlaceABN


def conv_then(norm_act: Callable[[int], Callable[[int], nn.Module]]) -> Callable[..., nn.Module]:
    """A stock convolution in front of a norm and activation, all three children of one ``Sequential``."""

    def build(dims: int, in_channels: int, out_channels: int, *args: Any, **options: Any) -> nn.Module:
        conv = CONV[dims](in_channels, out_channels, *args, **options)
        return nn.Sequential(conv, *norm_act(dims)(out_channels).children())

    return build


def conv_abn(conv_backend: str) -> Callable[..., nn.Module]:
    return lambda dims, *args, **options: CONV_ABN[dims](*args, conv_backend=conv_backend, **options)


def folded(module: nn.Module) -> nn.Module:
    """BatchNorm folded into the convolution's weight and bias, as deployments do."""
    conv, norm, act = module.children()
    return nn.Sequential(fuse_conv_bn_eval(conv, norm), act)  # type: ignore[arg-type, type-var]


def compiled(module: nn.Module) -> nn.Module:
    return Compiled(module)


def aggressive(module: nn.Module) -> nn.Module:
    return Compiled(module, aggressive_recomputation=True)


# name: (norm and activation for a number of dimensions, how the module is treated)
CONTENDERS = {
    "eager": (leaky, as_it_is),
    "compiled": (leaky, compiled),
    "aggressive": (leaky, aggressive),
    "inplace_abn": (published, as_it_is),
    "ours": (ours, as_it_is),
}

# name: (a function of dimensions and a convolution's arguments that builds the layer, how it is treated)
CONV_CONTENDERS: dict[str, tuple[Callable[..., nn.Module], Callable[[nn.Module], nn.Module]]] = {
    "eager": (conv_then(leaky), as_it_is),
    "compiled": (conv_then(leaky), compiled),
    "aggressive": (conv_then(leaky), aggressive),
    "folded": (conv_then(leaky), folded),
    "ours": (conv_abn("auto"), as_it_is),
    "ours-triton": (conv_abn("triton"), as_it_is),
    "ours-aten": (conv_abn("aten"), as_it_is),
}
# Without a GPU, "auto" is "aten" and Triton cannot run.
CUDA_ONLY = ("ours-triton", "ours-aten")
# It has no backward.
INFERENCE_ONLY = ("folded",)
# A C++ compiler takes seconds for each of them, so on a CPU they compete in a few cases only.
COMPILERS = ("compiled", "aggressive")
# It differs from "compiled" in backward only.
TRAINING_ONLY = ("aggressive",)


def uncompiled(names: Iterable[str]) -> list[str]:
    return [name for name in names if name not in COMPILERS]


def conv_contenders(kind: str, inference: bool) -> list[str]:
    """Who competes on "cpu" or "cuda"."""
    # For one convolution and its norm the aggressive compiler has little to recompute.
    elsewhere = ("aggressive",) if kind == "cuda" else CUDA_ONLY
    absent = (*(TRAINING_ONLY if inference else INFERENCE_ONLY), *elsewhere)
    return [name for name in CONV_CONTENDERS if name not in absent]


def leaky_instance(dims: int) -> Callable[[int], nn.Module]:
    return lambda channels: nn.Sequential(INSTANCE_NORM[dims](channels, affine=True), nn.LeakyReLU(SLOPE, inplace=True))


def unet(
    name: str,
    in_channels: Any,
    classes: int,
    norm: str = "batch",
    make: Callable[..., nn.Module] = UNet,
    dims: int = 2,
    **options: Any,
) -> nn.Module:
    """The U-Net of a contender before its treatment.

    Ours has the default modules, or in-place instance norms.  The others have stock modules and the contender's norm.
    All have the same parameters in the same order.  ``make`` is the class or preset, of ``dims`` dimensions; ``norm``
    is "batch" or "instance".
    """
    if name != "ours":
        stock = leaky_instance(dims) if norm == "instance" else CONTENDERS[name][0](dims)
        options |= {"norm_act": stock, "plain": True}
    elif norm == "instance":
        options |= {"norm_act": "instance"}
    return make(in_channels, classes, **options)
