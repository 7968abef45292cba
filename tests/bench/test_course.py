"""The bytes over a step, as PyTorch's allocators hand them out: ``bench/gpu/course.py``."""

import pytest
import torch
from torch import nn

from bench.gpu.course import allocator_course, course_of_trace
from fusedseg.memory import allocator_peak


def test_allocator_course_of_a_chain():
    x = torch.randn(512, 512)
    course = allocator_course(lambda: x.add(1).add(1))
    # The scalars that are added have small events of their own.
    sizes = [round(nbytes / x.nbytes) for nbytes in course]
    assert [size for size, before in zip(sizes, [0, *sizes], strict=False) if size != before] == [1, 2, 1, 0]


@pytest.mark.gpu
def test_the_largest_value_of_a_course_is_the_peak(device):
    conv = nn.Conv2d(8, 8, 3, padding=1, bias=False)
    net = nn.Sequential(conv, nn.BatchNorm2d(8), nn.LeakyReLU(0.01, inplace=True), conv).to(device)
    x = torch.randn(2, 8, 16, 16, device=device)

    def step() -> None:
        net(x).square().mean().backward()

    step()
    assert max(allocator_course(step, device)) == pytest.approx(allocator_peak(step, device), rel=0.02, abs=4096)


def test_a_release_counts_when_it_is_completed():
    events = ("segment_alloc", 9), ("alloc", 4), ("alloc", 2), ("free_requested", 4), ("free_completed", 4)
    assert course_of_trace({"action": action, "size": size} for action, size in events) == [4, 6, 2]
