"""Keys of fake tensors that are built faster find the same results, and no others."""

import pytest
import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tests.tools.fake_speed import fast_keys


@pytest.fixture(autouse=True)
def afresh():
    """The session has fast keys already, and its results must not be found here."""
    FakeTensorMode.cache_clear()
    yield
    FakeTensorMode.cache_clear()


def test_tensors_that_differ_have_keys_that_differ():
    with fast_keys(), FakeTensorMode() as mode:
        x = torch.empty(2, 3, 4, 5)
        given = [
            x, torch.empty(2, 3, 5, 4), torch.empty(6, 4, 5), x.double(), x.to("meta"), x.transpose(2, 3).contiguous(),
            x.to(memory_format=torch.channels_last), x[:, :, 1:], x[:, :, :3], x.clone().requires_grad_(),
            torch.empty(2, 3, 4, 5, dtype=torch.complex64).conj(), torch.empty(2, 3, 4, 5, dtype=torch.complex64),
        ]  # fmt: skip
        keys = []
        for tensor in given:
            keys.append([])
            fake_tensor.extract_tensor_metadata(tensor)._flatten_into(keys[-1], mode, None)
            same = []
            fake_tensor.extract_tensor_metadata(tensor.detach().requires_grad_(tensor.requires_grad))._flatten_into(
                same, mode, None
            )
            assert keys[-1] == same
    # A tensor and its transposed copy have the shapes of others.
    assert len({tuple(key) for key in keys}) == len(given) - 1


@pytest.mark.parametrize("symbolic", [False, True], ids=["numbers", "symbols"])
def test_results_of_ops_are_found_again(symbolic):
    """Each op is computed once for its shapes, also where sizes are symbols."""
    mode = FakeTensorMode(shape_env=ShapeEnv() if symbolic else None)
    shapes = []
    for size in (5, 5, 7):
        x = mode.from_tensor(torch.ones(2, size), static_shapes=not symbolic)
        y = torch.cat([x.t() @ x, x.t()], 1).relu()
        shapes.append((tuple(map(int, y.shape)), y.dtype))
    assert shapes == [((5, 7), torch.float32), ((5, 7), torch.float32), ((7, 9), torch.float32)]
    assert symbolic or FakeTensorMode.cache_info().hits > 0
