import pytest


@pytest.fixture
def replanned(monkeypatch):
    """For tests that set constants of launches to others: what was planned without them is forgotten, and with them."""
    from fusedseg.kernels.launcher import forget_plans

    forget_plans()
    yield forget_plans
    forget_plans()
