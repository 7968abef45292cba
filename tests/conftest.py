"""Options and fixtures of all tests.

``pytest`` runs on a CPU, with the kernels in Triton's interpreter.  ``pytest --device cuda`` runs on a GPU, and
``pytest tests -m gpu --device cuda`` runs the tests that a GPU needs first.

PyTorch is imported inside functions: the process that only hands tests to others then starts in half of the time.

``pytest --ptx sm_80`` compiles the kernels for a GPU, and the machine of ``tests/ptx`` executes the compiled code.
"""

import atexit
import gc
import importlib.util
import os
import sys
from pathlib import Path

import pytest

# Files with the longest tests come first, so that at the end no process waits long for another one.  So do files that
# use a server of programs (tests/tools/warm.py, ranks.py): one process runs them, which starts each server once.
FIRST = (
    "bench/test_collection.py",
    "bench/test_counts.py",
    "bench/test_host.py",
    "cli/test_memory.py",
    "cli/test_output.py",
    "compiler/test_bits*.py",
    "compiler/test_claims.py",
    "compiler/test_distributed.py",
    "hunt/test_hunt.py",
    "integrations/test_nnunet_predictor.py",
    "integrations/test_two_processes.py",
    "kernels/test_*codegen.py",
    "kernels/test_branches.py",
    "kernels/test_ahead.py",
    "kernels/test_launcher.py",
    "kernels/test_predicted.py",
    "losses/test_nnunet.py",
    "planning/test_plan.py",
    "ptx/test_kernels.py",
    "test_doctor.py",
    "test_documentation.py",
    "test_import.py",
    "test_notebook.py",
    "test_private.py",
    "training/test_backends_differ.py",
    "training/test_compile.py",
    "training/test_distributed.py",
    "training/test_export.py",
    "training/test_low_bits.py",
    "training/test_sync.py",
)
# The tests' interpreter builds on that of Triton 3.6 and later, whose code has this name.
_TRITON = importlib.util.find_spec("triton")
_INTERPRETER = Path(_TRITON.origin).with_name("runtime") / "interpreter.py" if _TRITON and _TRITON.origin else None
HAS_TRITON = _INTERPRETER is not None and "_LangPatchScope" in _INTERPRETER.read_text()


def pytest_addoption(parser):
    parser.addoption("--part", metavar="K/N", help="run every Nth of the chosen tests, from the Kth on")
    parser.addoption("--ptx", choices=("sm_80", "sm_90"), help="execute what is compiled for this architecture")
    try:
        parser.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="where tensors live")
    except ValueError:
        # pytest has read bench/conftest.py first, which defines the same option.
        return


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """``-n auto`` starts one process for each core, up to 8, or up to 16 that share a GPU.

    On a GPU the processes spend their time with compilers, and each takes half a GiB of its memory.  With ``-s`` one
    process runs all tests, because workers print nothing.
    """
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    if config.getoption("capture") == "no" or cores() == 1:
        return 0
    return min(16 if config.getoption("--device") == "cuda" else 8, cores())


def pytest_configure(config):
    worker = hasattr(config, "workerinput")
    if worker:
        # Workers share the cores, and so do the processes that their tests start.
        share = max(1, cores() // config.workerinput["workercount"])
        os.environ.setdefault("OMP_NUM_THREADS", str(share))
        # A thread that waits for others leaves its core to other workers.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        # The workers keep the cores busy; by itself each of them would start a process for each core.
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        import torch

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if config.getoption("--device") == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise pytest.UsageError("--device cuda: torch sees no GPU")
        if os.environ.get("TRITON_INTERPRET", "0") != "0":
            raise pytest.UsageError("--device cuda: unset TRITON_INTERPRET, with which kernels run on the CPU")
        # Warnings of drivers and libraries that CI has never seen do not fail a test.
        config.addinivalue_line("filterwarnings", "default")
        # A kernel that was wrong at the size of a test fails it, although PyTorch's ops have replaced its result.
        config.addinivalue_line("filterwarnings", "error:fusedseg. its .* kernels:RuntimeWarning")
        from tests.tools.context import Context

        config.pluginmanager.register(Context(torch.cuda.synchronize, worker), "context")
        return
    if config.getoption("--ptx"):
        os.environ.pop("TRITON_INTERPRET", None)
        from tests.ptx.option import Plugin

        config.pluginmanager.register(Plugin(config.getoption("--ptx")), "ptx")
        return
    # Triton reads this when a kernel is defined.  fusedseg imports kernels lazily, and no conftest imports them.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_ignore_collect(collection_path, config):
    """With ``-m gpu``, only files that name the marker are imported.

    Importing all files takes ten seconds, and much longer in sixteen processes of slow cores.
    """
    if config.getoption("markexpr") != "gpu" or collection_path.suffix != ".py":
        return None
    text = collection_path.read_text()
    return None if collection_path.name == "conftest.py" or "mark.gpu" in text or "sanitized(" in text else True


def launches(item) -> bool:
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return "kernels" in item.path.parts or "triton" in str(params.get("backend"))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Chooses the tests to run, after ``-m`` and ``-k`` have chosen, and begins with the longest.

    ``--device cuda`` leaves out the tests that do not use ``device``, because they run nothing on the GPU.  ``--ptx``
    also leaves out tests that launch no kernel.  Without both options, the tests of compiled code are left out.
    """
    ptx = config.getoption("--ptx")
    # If pytest is given both folders, bench/conftest.py chooses the benches to run.
    here = Path(__file__).parent
    compiled = config.getoption("--device") == "cuda" or ptx

    def left_out(item) -> bool:
        if not compiled:
            return item.get_closest_marker("compiled") is not None
        return "device" not in item.fixturenames or (ptx and not launches(item))

    elsewhere = {item for item in items if here in item.path.parents and left_out(item)}
    if elsewhere:
        config.hook.pytest_deselected(items=list(elsewhere))
        items[:] = [item for item in items if item not in elsewhere]
    found = {name: {*here.glob(name)} for name in FIRST}
    assert all(found.values()), f"a file of FIRST was renamed: {[name for name in found if not found[name]]}"
    first = set().union(*found.values())
    items.sort(key=lambda item: item.path not in first)
    if config.getoption("--part"):
        number, parts = map(int, config.getoption("--part").split("/"))
        if not 1 <= number <= parts:
            raise pytest.UsageError(f"--part must be K/N with K from 1 to N, got {config.getoption('--part')}")
        # Neighbours, which take about the same time, go into different parts.
        chosen = items[number - 1 :: parts]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
        items[:] = chosen


def pytest_collection_finish(session):
    """The garbage collector leaves alone what exists now, and looks seldom at what comes.

    These are a million objects of PyTorch, of its compiler and of the collected tests; looking at them again and again
    took a twelfth of the time, and looking at every 700 new objects another 3 %.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 10)
    # Triton would report what is left at the end of the process as leaked.  Before the end, pytest collects five times.
    atexit.register(gc.unfreeze)


@pytest.fixture(scope="session")
def device(request):
    import torch

    return torch.device(request.config.getoption("--device"))


@pytest.fixture(params=["aten", "triton"])
def backend(request, monkeypatch) -> str:
    """Runs a test once on each backend, which is set while the test runs."""
    import fusedseg

    if request.param == "triton":
        request.getfixturevalue("needs_interpreter")
    monkeypatch.setattr(fusedseg, "backend", request.param)
    return request.param


@pytest.fixture
def needs_interpreter() -> None:
    """For a test that runs kernels without the fixture ``backend``."""
    if not HAS_TRITON:
        pytest.skip("there is no Triton 3.6 or later")


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
def only_in_the_interpreter(device):
    if device.type != "cpu":
        pytest.skip("counts, or runs chosen programs, in the interpreter")


@pytest.fixture
def only_on_a_gpu(device):
    if device.type != "cuda":
        pytest.skip("needs --device cuda")


@pytest.fixture
def compiled_afresh():
    """For a test that compiles: no graph of an earlier test serves it, and none of it serves a later test."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def kernels_that_do_nothing(monkeypatch, compiled_afresh):
    """Inductor's C++ code is not compiled, which takes seconds, for a test that looks at code or bytes alone."""
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile

    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *given: lambda *arguments: None)
    # Nothing of it is remembered for a test that needs the values.
    with config.patch(fx_graph_cache=False):
        yield


@pytest.fixture(autouse=True, scope="session")
def seeds(request):
    """Without a GPU, ``torch.manual_seed`` seeds the CPU alone.

    It would also note the seed and the stack of this call for each kind of GPU, which takes a millisecond.
    """
    import torch

    with pytest.MonkeyPatch.context() as patch:
        if request.config.getoption("--device") == "cpu":
            for module in (torch.cuda, torch.mtia, torch.xpu):
                patch.setattr(module, "manual_seed_all", lambda seed: None, raising=False)
        yield


@pytest.fixture(autouse=True)
def seed(request, seeds):
    import torch

    if request.config.getoption("--device") == "cuda":
        torch.manual_seed(0)
    else:
        # ``torch.manual_seed`` would import the compiler.
        torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def exact(request):
    """On a GPU and with ``--ptx``, computes fp32 without TF32, and lets cuDNN return the same bits in every call.

    Tests that compare with float64, or that compare two runs, assume this.  A test about these settings sets its own.
    The settings end with the module, so that benches in the same process do not run under them.
    """
    if request.config.getoption("--device") != "cuda" and not request.config.getoption("--ptx"):
        yield
        return
    import torch

    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark
    cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = False, True, False
    yield
    cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = before


@pytest.fixture(autouse=True, scope="session")
def interpreter(request):
    """Without a GPU, the interpreter computes bf16 as a GPU does, and is faster than Triton's own."""
    # This fixture reads the option, because a test that uses the fixture `device` counts as a test of the GPU.
    if request.config.getoption("--device") != "cpu" or request.config.getoption("--ptx") or not HAS_TRITON:
        yield
        return
    from tests.tools.interpreter import true_bfloat16
    from tests.tools.interpreter_speed import fast

    with true_bfloat16(), fast():
        yield


@pytest.fixture(autouse=True, scope="session")
def unmeasured_guards():
    """The compiler does not measure how long the guards of a graph take, for which it empties the processor's caches.

    It would take 30 ms for each graph, for a line of a log.
    """
    import torch

    # The compiler is imported later, and takes the function from here, or has done so already.
    for module in (torch._C._dynamo.guards, sys.modules.get("torch._dynamo.guards")):
        if hasattr(module, "profile_guard_manager"):
            module.profile_guard_manager = lambda *args: 0.0


@pytest.fixture(autouse=True, scope="session")
def kept_shapes():
    """The compiler remembers from test to test which shapes PyTorch's own ops return.

    ``torch._dynamo.reset`` of PyTorch 2.14 forgets them, which takes a quarter of the time of a small compilation.
    What an op of this package returns on tensors without values is never remembered.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeTensorMode, "cache_clear", lambda *given: None)
        yield


@pytest.fixture
def poison():
    """Fills new memory with NaN, so that an element that is never written is found."""
    import torch

    enabled, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


@pytest.fixture
def one_thread():
    """Sets one thread, because more threads do not help with tensors of a few kilobytes."""
    from tests.tools.threads import threads

    with threads(1):
        yield


@pytest.fixture
def strides_of_a_gpu(request):
    """Convolutions return channels_last where a GPU does, whatever CPU and however many threads there are."""
    # This fixture reads the option, because a test that uses the fixture `device` counts as a test of the GPU.
    if request.config.getoption("--device") != "cpu":
        yield
        return
    from tests.tools.convolutions import strides_of_a_gpu

    with strides_of_a_gpu():
        yield
