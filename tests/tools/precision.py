"""Sets for a while whether cuDNN may round to TF32."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def cudnn_set(setting: str, value: Any) -> Iterator[None]:
    """Sets "allow_tf32", the old switch, or "fp32_precision", the new switch of convolutions.

    torch refuses to read one switch while the other contradicts it, so both are restored at the end.
    """
    cudnn = torch.backends.cudnn
    if not hasattr(cudnn, "conv"):
        # PyTorch before 2.9 has the old switch alone.
        setting, value = "allow_tf32", value in (True, "tf32")
    allowed, parts = cudnn.allow_tf32, (cudnn, cudnn.conv, cudnn.rnn) if hasattr(cudnn, "conv") else ()
    before = [part.fp32_precision for part in parts]
    setattr(cudnn if setting == "allow_tf32" else cudnn.conv, setting, value)
    try:
        yield
    finally:
        cudnn.allow_tf32 = allowed
        for part, precision in zip(parts, before, strict=True):
            part.fp32_precision = precision
        assert cudnn.allow_tf32 is allowed
