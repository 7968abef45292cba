"""Tensors of the benches, by the names that cases give their dtype and memory format."""

import torch
from torch import Tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def memory_format_of(dim: int, channels_last: bool) -> torch.memory_format:
    return FORMATS[dim] if channels_last else torch.contiguous_format


def describe(shape: tuple[int, ...], dtype: str, channels_last: bool) -> str:
    return f"{'x'.join(map(str, shape))} {dtype} {'nhwc' if channels_last else 'nchw'}"


class Source:
    """Makes random tensors on one device, always from the same seed."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.generator = device, torch.Generator(device).manual_seed(0)

    def normal(self, shape: tuple[int, ...], dtype: str, channels_last: bool, mean: float = 0.0, std: float = 1.0):
        values = torch.randn(shape, generator=self.generator, device=self.device) * std + mean
        return values.to(DTYPES[dtype]).to(memory_format=memory_format_of(len(shape), channels_last))

    def uniform(self, channels: int, low: float, high: float) -> Tensor:
        return torch.empty(channels, device=self.device).uniform_(low, high, generator=self.generator)
