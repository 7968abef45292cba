"""An estimate of the bytes that a convolution takes beside its arguments and its result.

No tensor shows them, and no CPU knows which of cuDNN's kernels a GPU will run.  The rule is that a convolution computes
in channels_last: it copies each image that it reads or writes and that lies in another memory format.  On an H100 the
measured peaks of two 3D U-Nets of nnU-Net (float16, contiguous, the backend with codegen "aten") are 794 and 795 MiB
above the bytes of their tensors, of which this rule explains 768; in channels_last, where it says 0, 32 MiB were
measured.  Workspaces of another kind are not in it.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def copies_of(images: Iterable[Tensor]) -> int:
    """The bytes of copies of those images that are in another format than channels_last."""
    return sum(
        image.numel() * image.dtype.itemsize
        for image in images
        if image.dim() in FORMATS and not image.is_contiguous(memory_format=FORMATS[image.dim()])
    )
