import json
import os

import pytest


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

        from tests.tools import warm

        name = f"{module}.{cases}.{target}"
        if name not in known:
            with (folder / f"{name}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                file = folder / f"{name}.json"
                if not file.exists():
                    file.write_text(json.dumps(warm.json_of("tests.tools.codegen", target, module, cases)))
                known[name] = json.loads(file.read_text())
        return known[name]

    return launches
