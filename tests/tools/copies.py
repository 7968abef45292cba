"""A count of the copies that change how images and volumes lie in memory."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fusedseg.ops.layout import FORMATS, suggests_channels_last

ROWS = torch.channels_last_3d


class Copies(TorchDispatchMode):
    """Counts changes of the order in which images and volumes lie in memory.

    Attributes:
        found: copies, those inside of convolutions too: names and shapes.
        planes: new images of other ops that lie otherwise although an argument is in channels_last.
    """

    def __init__(self):
        super().__init__()
        self.found = []
        self.planes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if name in ("clone", "_to_copy", "contiguous", "copy_"):
            source = args[1] if name == "copy_" else args[0]
            self.found += [(name, *out.shape)] * (is_image(out) and order(source) != order(out))
            return out
        # Kernels of convolutions run in the format of the weight, and copy what has another.
        read = {"convolution": 2, "convolution_backward": 3}.get(name, 0)
        self.found += [(name, *t.shape) for t in args[:read] if is_image(t) and not in_rows(t)]
        if name == "convolution_backward" and is_image(args[0]) and in_rows(args[0]) and in_rows(args[1]):
            # On a GPU the gradient is copied to what the strides of the image say, which count for one channel too.
            self.found += [(name, *args[0].shape)] * (not suggests_channels_last(args[1]))
        given = [t for t in args if is_image(t)]
        known = {t.untyped_storage()._cdata for t in given}
        if any(map(in_rows, given)):
            made = [t for t in (out if isinstance(out, tuple) else (out,)) if is_image(t) and not in_rows(t)]
            self.planes += [(name, *t.shape) for t in made if t.untyped_storage()._cdata not in known]
        return out


def is_image(t):
    return isinstance(t, torch.Tensor) and t.dim() in FORMATS and t.numel() > 4096


def in_rows(t):
    return order(t) == order(torch.empty_like(t, memory_format=FORMATS[t.dim()]))


def order(t):
    """The dimensions from the largest stride to the smallest."""
    return sorted((d for d in range(t.dim()) if t.shape[d] > 1), key=lambda d: -t.stride(d))
