import sys

import pytest
import torch


@pytest.fixture(autouse=True)
def nothing_compiled():
    """PyTorch would run graphs that another test has compiled for a network of the same class."""
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
