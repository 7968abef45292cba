"""The image that most models of these tests are converted with."""

import pytest
import torch


@pytest.fixture
def image():
    return torch.randn(3, 3, 16, 16, dtype=torch.float64)
