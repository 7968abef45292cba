import json
import os

import pytest


@pytest.fixture
def replanned(monkeypatch):
    """Forgets all planned launches before and after a test that changes constants of launches."""
    from fusedseg.kernels.launcher import forget_plans

    forget_plans()
    yield forget_plans
    forget_plans()


@pytest.fixture
def always_split(monkeypatch, replanned):
    """No slab is small enough for one launch, so that a small tensor takes the path of large tensors."""
    from fusedseg.kernels import norm_act, norm_act_bwd

    monkeypatch.setattr(norm_act, "ONCHIP_FWD", 0)
    monkeypatch.setattr(norm_act_bwd, "ONCHIP_BWD", 0)


@pytest.fixture
def small_tiles(monkeypatch, always_split):
    """Several programs read a channel of a small tensor, as they do for large tensors, and partial results are merged.

    Tiles hold 128 values of fp32; in rows they hold 8 positions of each of 16 channels.
    """
    from fusedseg.kernels import launch, norm_stats

    monkeypatch.setattr(launch, "TILE_BYTES", 512)
    monkeypatch.setattr(norm_stats, "MAX_PARTIALS", 2)
    monkeypatch.setattr(norm_stats, "MAX_SPLITS", 2)


@pytest.fixture
def counted_once(request):
    """Skips a test as compiled code if it counts parameters: every lane loads those that it needs, and not one of them.

    A GPU serves such loads at once, but the machine of ``--ptx`` counts each of them.
    """
    if request.config.getoption("--ptx"):
        pytest.skip("every lane loads its parameters, which the interpreter loads once")


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """``compiled(module, cases, target)`` returns the report of the launches that are compiled for the target.

    Compiling takes minutes, so all processes of a run read the file that the first process writes.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        # This is the folder of the run, in which each worker has its own folder.
        folder = folder.parent
    known = {}

    def launches(module, cases, target):
        import fcntl

        from tests.tools.codegen import compile_launches

        name = f"{module}.{cases}.{target}"
        if name not in known:
            with (folder / f"{name}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                file = folder / f"{name}.json"
                if not file.exists():
                    file.write_text(json.dumps(compile_launches([target], module, cases)[target]))
                known[name] = json.loads(file.read_text())
        return known[name]

    return launches
