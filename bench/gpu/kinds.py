"""Sorts the kernels of a profile by kind, from their names."""

import re
from collections.abc import Iterable
from typing import NamedTuple


class Launches(NamedTuple):
    """A kernel's name, how often it was launched, and its device time in all launches together."""

    name: str
    count: int
    milliseconds: float


# The first row that matches decides.  Triton kernels of the compiler are named after the ops that they fuse.
COMPILERS_KINDS = (
    ("upsampling", r"_unsafe_index|upsample"),
    ("pool", r"pool"),
    ("concatenation", r"_cat_"),
    ("norm and activation", r"norm|var_mean|relu|threshold"),
    ("sum", r"convolution_backward"),
    ("copy or cast", r"^triton_poi_fused__to_copy_(convolution_)?\d+$|_clone_\d+$"),
)
KINDS = (
    # Transposes and padding around cuDNN's convolutions.
    ("layout of convolutions", r"nchwToNhwc|nhwcToNchw|nhwcAddPadding"),
    ("upsampling", r"upsample"),
    ("pool", r"pool"),
    ("concatenation", r"CatArray|concat_kernel"),
    ("bits", r"low_bit"),
    ("convolution or product", r"[fdw]prop|dgrad|wgrad|convolve|conv_abn|conv3d_|GemmConvolution|gemm|nvjet"),
    ("norm and activation", r"norm|cudnn::bn_|relu|clamp_scalar|threshold|RowwiseMoments|GammaBeta"),
    # In channels_last, PyTorch concatenates with these copies too.
    ("copy or cast", r"copy|Memcpy"),
    # Most of them are the gradients of biases.
    ("sum", r"reduce_kernel"),
    # Biases, shortcuts, and gradients of tensors with two readers.
    ("addition", r"CUDAFunctor_add"),
)
REST = "rest"


def kind_of(name: str) -> str:
    table = COMPILERS_KINDS if name.startswith("triton_") else KINDS
    return next((kind for kind, pattern in table if re.search(pattern, name)), REST)


def by_kind(kernels: Iterable[Launches]) -> dict[str, dict[str, float]]:
    """Milliseconds and launches of each kind, the longest first."""
    found: dict[str, dict[str, float]] = {}
    for kernel in kernels:
        of = found.setdefault(kind_of(kernel.name), {"ms": 0.0, "launches": 0})
        of["ms"] += kernel.milliseconds
        of["launches"] += kernel.count
    return dict(sorted(found.items(), key=lambda item: -item[1]["ms"]))
