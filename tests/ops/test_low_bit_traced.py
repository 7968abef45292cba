"""The storage op as functions that a compiler traces: the values of aten, in another order of bits."""

import pytest
import torch

from fusedseg.ops.low_bit import reference, traced
from fusedseg.ops.low_bit.spec import lines_of

KEY = -123456789
# Whole groups and a shorter one, odd numbers of channels and positions, and planes that are no groups.
SHAPES = [(2, 4, 32, 16), (2, 5, 13, 23), (2, 8, 5, 7), (1, 3, 17, 17, 3), (300, 3)]
FORMATS = {2: torch.contiguous_format, 4: torch.channels_last, 5: torch.channels_last_3d}


def tensors(shape, dtype=torch.float32):
    torch.manual_seed(0)
    x = torch.randn(shape)
    x[:, 1].relu_()
    x[:, 2].abs_().add_(0.5)
    return [x.to(dtype), x.to(dtype, memory_format=FORMATS[x.dim()])]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_values_of_aten(shape, bits, dtype):
    for x in tensors(shape, dtype):
        form, flat = traced.MemoryOrder.of(x.shape, x.stride()), x.as_strided((x.numel(),), (1,))
        ends, *codes = traced.pack(x, torch.tensor(KEY, dtype=torch.int32), bits, form)
        found = traced.unpack(ends, codes, bits, form)
        expected, packed = torch.empty_like(x), reference.pack(flat, lines_of(x, 0), bits, KEY, None)
        reference.unpack(packed, None, lines_of(x, 0), bits, expected.as_strided((x.numel(),), (1,)))
        assert torch.equal(found, expected)
        assert found.stride() == x.stride()
        assert sum(code.nbytes for code in codes) <= packed[0].nbytes + len(packed[1])


def test_values_that_are_not_finite():
    for bad in (float("nan"), float("inf"), float("-inf")):
        x = torch.randn(1, 2, 3, 256)
        x[0, 1, 1, 7] = bad
        form = traced.MemoryOrder.of(x.shape, x.stride())
        ends, *codes = traced.pack(x, torch.tensor(KEY, dtype=torch.int32), 4, form)
        found = traced.unpack(ends, codes, 4, form)
        assert found[0, 1, 1].isnan().all()
        assert found[0, 1, ::2].isfinite().all()


@pytest.mark.parametrize("shape", [*SHAPES, (3, 3)], ids=str)
def test_masks(shape):
    for x in tensors(shape):
        form = traced.MemoryOrder.of(x.shape, x.stride())
        packed = traced.pack_mask(x > 0, form)
        found = traced.unpack_mask(packed, form)
        assert packed.nbytes == -(-x.numel() // 8)
        assert torch.equal(found, x > 0)
        assert found.stride() == x.stride()


def test_keys_differ():
    """Each tensor of a graph, and each step, rounds in its own way."""
    keys = [traced.key_of(torch.tensor(step), place).item() for step in (1, 2, 1 << 31) for place in range(3)]
    assert len(set(keys)) == len(keys)
