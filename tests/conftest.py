"""Where the tests run: ``pytest`` on a CPU, kernels in Triton's interpreter; ``pytest --device cuda`` on a GPU.

``pytest --ptx sm_80`` compiles the kernels for a GPU, and executes what was compiled in ``tests/ptx``.
"""

import importlib.util
import os
from pathlib import Path

import pytest
import torch

from tests.tools.threads import threads

HAS_TRITON = importlib.util.find_spec("triton") is not None


def pytest_addoption(parser):
    parser.addoption("--ptx", choices=("sm_80", "sm_90"), help="execute what is compiled for this architecture")
    try:
        parser.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="where tensors live")
    except ValueError:
        # bench/conftest.py came first and has defined the same option
        return


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """What ``-n auto`` stands for: a process for each core.

    One process runs all tests on a GPU, which they would share, and with ``-s``, since workers print nothing.
    """
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    alone = config.getoption("--device") == "cuda" or config.getoption("capture") == "no"
    return 0 if alone or cores() == 1 else cores()


def pytest_configure(config):
    if hasattr(config, "workerinput"):
        # Workers share the cores, and so do the processes that their tests start.
        share = max(1, cores() // config.workerinput["workercount"])
        os.environ.setdefault("OMP_NUM_THREADS", str(share))
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if config.getoption("--device") == "cuda":
        if not torch.cuda.is_available():
            raise pytest.UsageError("--device cuda: torch sees no GPU")
        if os.environ.get("TRITON_INTERPRET", "0") != "0":
            raise pytest.UsageError("--device cuda: unset TRITON_INTERPRET, with which kernels run on the CPU")
        # those of drivers and libraries that no CI has seen fail nothing
        config.addinivalue_line("filterwarnings", "default")
        return
    if config.getoption("--ptx"):
        os.environ.pop("TRITON_INTERPRET", None)
        from tests.ptx.option import Plugin

        config.pluginmanager.register(Plugin(config.getoption("--ptx")), "ptx")
        return
    # read when a kernel is defined: fusedseg imports them lazily, and no conftest does
    os.environ["TRITON_INTERPRET"] = "1"


def launches(item) -> bool:
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return "kernels" in item.path.parts or params.get("backend") == "triton"


def pytest_collection_modifyitems(config, items):
    """Kernels in the interpreter take twice as long while coverage looks on, which is of what lies outside them.

    With ``--device cuda`` the tests that do not ask for ``device`` are left out: they have nothing on the GPU.  With
    ``--ptx`` those that launch no kernel are left out as well; without either, those of compiled code.
    """
    ptx = config.getoption("--ptx")
    launching = {item for item in items if launches(item)}
    for item in launching:
        item.add_marker("no_cover")
    # the benches, where pytest is given both folders, choose for themselves
    here = Path(__file__).parent
    compiled = config.getoption("--device") == "cuda" or ptx

    def left_out(item) -> bool:
        if not compiled:
            return item.get_closest_marker("compiled") is not None
        return "device" not in item.fixturenames or (ptx and item not in launching)

    elsewhere = {item for item in items if here in item.path.parents and left_out(item)}
    if elsewhere:
        config.hook.pytest_deselected(items=list(elsewhere))
        items[:] = [item for item in items if item not in elsewhere]


@pytest.fixture(scope="session")
def device(request) -> torch.device:
    return torch.device(request.config.getoption("--device"))


@pytest.fixture(params=["aten", "triton"])
def backend(request, monkeypatch) -> str:
    """Runs a test once on each backend, set for its duration."""
    import fusedseg

    if request.param == "triton" and not HAS_TRITON:
        pytest.skip("triton is not installed")
    monkeypatch.setattr(fusedseg, "backend", request.param)
    return request.param


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def exact(request):
    """On a GPU, and where ``--ptx`` stands in for one, lets fp32 be computed in fp32, and cuDNN return the same bits.

    Tests that compare with float64, or one run with another, assume this.  A test about these settings sets its own.
    The settings end with the module, so that benches in the same process do not run under them.
    """
    if request.config.getoption("--device") != "cuda" and not request.config.getoption("--ptx"):
        yield
        return
    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark
    cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = False, True, False
    yield
    cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = before


@pytest.fixture(autouse=True, scope="session")
def interpreter(request):
    """Without a GPU: an interpreter that computes in bf16 as a GPU does, and faster."""
    # not of `device`, for which tests ask that have something on it
    if request.config.getoption("--device") != "cpu" or request.config.getoption("--ptx") or not HAS_TRITON:
        yield
        return
    from tests.tools.interpreter import true_bfloat16
    from tests.tools.interpreter_speed import fast

    with true_bfloat16(), fast():
        yield


@pytest.fixture
def poison():
    """New memory holds NaN, so that an element that nobody writes shows."""
    enabled, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


@pytest.fixture
def one_thread():
    """Tensors of a few kilobytes are not worth more."""
    with threads(1):
        yield
