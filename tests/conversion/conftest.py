"""Fixtures that the tests of ``convert`` share."""

import sys

import pytest
import torch


@pytest.fixture
def image():
    """The image that most models of these tests are converted with."""
    return torch.randn(3, 3, 16, 16, dtype=torch.float64)


@pytest.fixture
def uncounted(request, monkeypatch):
    """Leaves out the bytes of the report, which take more than half of the time of a conversion.

    A test that reads them, in a module that uses this fixture, asks for the fixture ``counted``.
    """
    if "counted" not in request.fixturenames:
        # `fusedseg.conversion.convert` is the function; the module of this name is found in sys.modules.
        monkeypatch.setattr(sys.modules["fusedseg.conversion.convert"], "_footprint", lambda model, inputs: None)


@pytest.fixture
def counted():
    """The report of a conversion has its bytes, as outside the tests."""
