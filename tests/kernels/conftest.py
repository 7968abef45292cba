import itertools

import pytest


@pytest.fixture
def replanned(monkeypatch):
    """For tests that set constants of launches to others: what was planned without them is forgotten, and with them."""
    from fusedseg.kernels.launcher import forget_plans

    forget_plans()
    yield forget_plans
    forget_plans()


@pytest.fixture
def orders(request):
    """Iterates over the orders of warps, and of lanes that store to one place, in which ``--ptx`` can run a launch.

    On a GPU, which has its own order, there are two turns.
    """
    plugin = request.config.pluginmanager.get_plugin("ptx")
    turns = list(itertools.product(("together", "first", "last"), (False, True))) if plugin else [None, None]

    def each_order():
        for turn in turns:
            if plugin:
                plugin.driver.options.schedule, plugin.driver.options.first_wins = turn
            yield turn

    yield each_order
    if plugin:
        plugin.driver.options.schedule, plugin.driver.options.first_wins = turns[0]
