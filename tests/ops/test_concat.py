"""Concatenation and dense copies on both backends: PyTorch's values and strides."""

import pytest
import torch

import fusedseg
from fusedseg.ops import concat as op
from tests.tools.spy import spied
from tests.tools.tensors import channels_last

ROWS = {
    "two": ((2, 8, 5, 7), (2, 16, 5, 7)),
    "odd channels": ((2, 3, 5, 7), (2, 64, 5, 7), (2, 1, 5, 7)),
    "one source": ((2, 8, 5, 7),),
    "one position": ((2, 8, 1, 1), (2, 4, 1, 1)),
    "one sample": ((1, 8, 3, 4), (1, 4, 3, 4)),
    "3d": ((2, 8, 3, 2, 5), (2, 4, 3, 2, 5)),
    "more than a launch": ((1, 2, 3, 4),) * 6,
}


def images(shapes, device, dtype=torch.float32):
    return [channels_last(torch.randn(shape, device=device).to(dtype)) for shape in shapes]


def check(tensors, dim=1):
    found, wanted = op.concat(tensors, dim), torch.cat(tensors, dim)
    assert torch.equal(found, wanted)
    assert found.stride() == wanted.stride()
    assert found.dtype == wanted.dtype


@pytest.fixture
def launched(monkeypatch):
    """How often the kernel has been launched."""
    return spied(monkeypatch, op, "_launch")


@pytest.mark.gpu
@pytest.mark.parametrize("shapes", ROWS.values(), ids=ROWS)
def test_values_and_strides(shapes, backend, device):
    check(images(shapes, device))
    check(images(shapes, device), 1 - len(shapes[0]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dtypes(dtype, backend, device):
    check(images(ROWS["two"], device, dtype))


@pytest.mark.gpu
def test_slices(backend, device, launched):
    """Sources that are slices of wider images; copies of slices have no gaps, and are no views."""
    (wide,) = images([(2, 24, 5, 7)], device)
    check([wide[:, 4:12], wide[:, :7]])
    for x in (wide[:, 4:12], wide):
        y = op.dense(x)
        assert torch.equal(y, x)
        assert y.is_contiguous(memory_format=torch.channels_last)
        assert y.data_ptr() != x.data_ptr()
    assert len(launched) == (3 if backend == "triton" else 0)


def other_cases(device):
    a, b = images(ROWS["two"], device)
    planes = a.contiguous()
    return {
        "planes": [planes, planes],
        "rows and planes": [a, planes],
        "another dimension": ([a, a], 2),
        "samples": ([a, a], 0),
        "matrices": [torch.randn(3, 4, device=device), torch.randn(3, 2, device=device)],
        "integers": [a.int(), a.int()],
        "promoted": [a, b.half()],
        "expanded": [a[:1].expand(2, -1, -1, -1), b],
        "empty": [a[:, :0], b],
        "no samples": [a[:0], b[:0]],
        "every second row": [a[:, :, ::2], a[:, :, ::2]],
        "one channel": [a[:, :1].contiguous(), a[:, :1].contiguous()],
    }


@pytest.mark.gpu
@pytest.mark.parametrize("name", other_cases("cpu"))
def test_all_else_is_pytorch(name, backend, device, launched):
    case = other_cases(device)[name]
    check(*case) if isinstance(case, tuple) else check(case)
    assert not launched


@pytest.mark.gpu
def test_dense_copies_of_all_else(backend, device):
    a = torch.randn(2, 8, 5, 7, device=device)
    for x in (a[:, 2:5], a[:, :, ::2], a.transpose(2, 3), torch.randn(3, 4, device=device)[:, 1:]):
        y = op.dense(x)
        assert torch.equal(y, x)
        assert y.data_ptr() != x.data_ptr()


@pytest.mark.usefixtures("needs_interpreter")
def test_errors_are_those_of_torch_cat(monkeypatch):
    monkeypatch.setattr(fusedseg, "backend", "triton")
    a, b = images([(2, 8, 5, 7), (2, 8, 5, 6)], "cpu")
    with pytest.raises(RuntimeError, match="Sizes of tensors must match except in dimension 1"):
        op.concat([a, b], 1)


def test_biases(backend, device):
    x, y = images(ROWS["two"], device)
    bias = torch.randn(16, device=device)
    found, wanted = op.concat_biased_op([x, y], [None, bias]), torch.cat([x, y + bias.view(-1, 1, 1)], 1)
    assert torch.equal(found, wanted)
    assert found.stride() == wanted.stride()
