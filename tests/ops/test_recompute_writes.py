"""Tensors that are overwritten, inside the recompute scope and after it: copied first, noticed, or an error."""

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

import fusedseg
from fusedseg import recompute
from tests.ops.scope_cases import assert_equal, assert_same_gradients


@pytest.fixture
def x():
    return torch.randn(2, 3, 16, 16)


def test_an_in_place_call_that_raises(x):
    conv = nn.Conv2d(3, 3, 3, padding=1)
    with recompute():
        z = F.batch_norm(conv(x), None, None, training=True)
        with pytest.raises(RuntimeError):
            z.add_(torch.ones(5))
        # This change gives z the version that the failed sum would have given it.
        z.mul_(2)
        out = conv(z)
    got = torch.autograd.grad(out.square().mean(), conv.weight)
    expected = torch.autograd.grad(
        conv(F.batch_norm(conv(x), None, None, training=True) * 2).square().mean(), conv.weight
    )
    assert_equal(got, expected)


def test_memory_changed_by_data_is_not_mistaken(x):
    """PyTorch's version counter does not count a change through ``.data``."""
    conv, norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)

    def fn():
        # silu saves its input, so no op has saved z yet.
        z = F.silu(norm(conv(x)))
        z.data.mul_(2)
        return conv(z)

    assert_same_gradients(fn, conv)


def _set_data(z):
    z.data = torch.ones(z.shape)


SHAPED = {
    "transposed": lambda z: z.transpose_(2, 3),
    "other memory": _set_data,
    "strided": lambda z: z.as_strided_(z.shape, z.stride(), 0),
}


@pytest.mark.parametrize("change", SHAPED.values(), ids=SHAPED)
def test_a_result_that_gets_another_shape_or_memory(x, change):
    """The scope looks at the result of a call once, so it must notice functions that change more than its values."""
    conv, norm = nn.Conv2d(3, 3, (3, 1)), nn.BatchNorm2d(3)

    def fn():
        # silu saves its input, so no op has saved z yet.
        z = F.silu(norm(conv(x)))
        # A view keeps the memory alive.
        first = z[:1]
        change(z)
        return conv(z).sum() + first.sum()

    assert_same_gradients(fn, conv, norm)


def test_a_view_changed_in_place_does_not_stand_for_its_base(x):
    conv, norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
    last = nn.Conv2d(4, 2, 1)

    def fn():
        t = norm(conv(x))
        t[:, :2].sigmoid_()
        return last(t)

    assert_same_gradients(fn, conv, norm, last)


def test_a_source_that_is_overwritten_inside_is_copied_first(x):
    """cat keeps nothing, so a program may overwrite its inputs afterwards."""
    up, first, last = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(8, 2, 1)

    def fn():
        raw = up(x)
        out = last(torch.cat([F.relu(F.batch_norm(first(x), None, None, training=True)), raw], dim=1))
        return out + raw.mul_(2)[:, :2]

    assert_same_gradients(fn, up, first, last)


@pytest.mark.parametrize(
    "make",
    [fusedseg.InPlaceABN, fusedseg.InPlaceInstanceNormAct, lambda channels: fusedseg.InPlaceGroupNormAct(2, channels)],
    ids=["batch", "instance", "group"],
)
def test_a_source_that_a_module_of_ours_overwrites_is_copied_first(make, x):
    """The scope cannot see the kernel that overwrites the source, so the module announces the change."""
    up, last, norm = nn.Conv2d(3, 4, 1), nn.Conv2d(8, 2, 1), make(4)

    def fn():
        raw = up(x)
        out = last(torch.cat([raw, F.relu(raw)], dim=1))
        return out.sum() + norm(raw).square().sum()

    assert_same_gradients(fn, up, last)


def test_a_source_without_values_that_is_overwritten_is_copied_to_its_device():
    """Network 807 of the hunt: the memory of a tensor without values calls itself "meta", and so did the copy."""
    with FakeTensorMode():
        conv, x = nn.Conv2d(3, 4, 1), torch.empty(2, 3, 8, 8)
        with recompute():
            raw = conv(x)
            out = conv.weight.sum() * F.relu(F.batch_norm(raw, None, None, training=True))
            F.dropout(raw, 0.5, inplace=True)
        out.sum().backward()
        assert conv.weight.grad.device == x.device


def test_a_source_that_is_overwritten_outside_raises(x):
    up, first, last = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(8, 2, 1)
    with recompute():
        raw = up(x)
        out = last(torch.cat([F.relu(F.batch_norm(first(x), None, None, training=True)), raw], dim=1))
    raw.mul_(2)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*fusedseg.recompute"):
        out.sum().backward()


@pytest.mark.parametrize("write", [torch.Tensor.sigmoid_, torch.tanh_], ids=["method", "function"])
def test_a_source_that_is_overwritten_without_gradients_is_copied_first(write, x):
    """An activation in place, whose rule the scope follows only while gradients are wanted."""
    up, first, last = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(8, 2, 1)

    def fn():
        raw = up(x)
        out = last(torch.cat([F.relu(F.batch_norm(first(x), None, None, training=True)), raw], dim=1))
        with torch.no_grad():
            write(raw)
        return out

    assert_same_gradients(fn, up, first, last)
