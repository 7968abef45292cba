"""Where the tests run: ``pytest`` on a CPU, kernels in Triton's interpreter; ``pytest --device cuda`` on a GPU."""

import importlib.util
import os

import pytest
import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None


def pytest_addoption(parser):
    try:
        parser.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="where tensors live")
    except ValueError:
        # bench/conftest.py came first and has defined the same option
        return


def pytest_configure(config):
    if config.getoption("--device") == "cuda":
        if not torch.cuda.is_available():
            raise pytest.UsageError("--device cuda: torch sees no GPU")
        if os.environ.get("TRITON_INTERPRET", "0") != "0":
            raise pytest.UsageError("--device cuda: unset TRITON_INTERPRET, with which kernels run on the CPU")
        # those of drivers and libraries that no CI has seen fail nothing
        config.addinivalue_line("filterwarnings", "default")
        return
    # read when a kernel is defined: fusedseg imports them lazily, and no conftest does
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items):
    """Kernels in the interpreter take twice as long while coverage looks on, which is of what lies outside them."""
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if "kernels" in item.path.parts or params.get("backend") == "triton":
            item.add_marker("no_cover")


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


@pytest.fixture(autouse=True, scope="session")
def interpreter(device):
    """Without a GPU: an interpreter that computes in bf16 as a GPU does, and faster."""
    if device.type != "cpu" or not HAS_TRITON:
        yield
        return
    from tests.tools.interpreter import patch_language_once, true_bfloat16

    with true_bfloat16(), patch_language_once():
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
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
