"""Launches of the 3x3x3 convolution that are compiled for Hopper: those of nnU-Net's 3D network and its neighbours."""

from functools import partial

import torch

from tests.tools.tensors import empty


def launch(C, K, size, dtype, has_bias=False):
    from fusedseg.kernels.conv3d import conv3d, ordered_weight

    x, y = (empty((2, channels, *size), dtype, True) for channels in (C, K))
    weight = torch.empty(K, C, 3, 3, 3, dtype=dtype)
    conv3d(x, ordered_weight(weight, False), torch.empty(K, dtype=dtype) if has_bias else None, y)


CASES = {
    "32-to-32": partial(launch, 32, 32, (128, 128, 128), torch.float16),
    "64-to-32": partial(launch, 64, 32, (128, 128, 128), torch.float16),
    "32-to-64-bf16-bias": partial(launch, 32, 64, (128, 128, 128), torch.bfloat16, True),
    "64-to-64-bias": partial(launch, 64, 64, (64, 64, 64), torch.float16, True),
    "16-to-48": partial(launch, 16, 48, (64, 64, 64), torch.float16),
}
