import pytest
import torch

from tests.tools.spy import spied


@pytest.fixture(autouse=True)
def afresh():
    # The imports stand here, because triton must not be imported before tests/conftest.py has configured it.
    from torch._dynamo import list_backends, register_backend

    from fusedseg.compiler import backend
    from fusedseg.ops.low_bit import graph

    # The entry point does this where the package is installed; a checkout may not be.
    if "fusedseg" not in list_backends():
        register_backend(name="fusedseg", compiler_fn=backend)
    torch._dynamo.reset()
    # Equal tests round alike, whichever ran before.
    graph._steps.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def codegen():
    """The codegen of tests that name no others (``BOTH`` and ``in_both`` of networks.py)."""
    return "aten"


@pytest.fixture
def interpreted(monkeypatch, needs_interpreter):
    """Triton's kernels run, in the interpreter."""
    import fusedseg

    monkeypatch.setattr(fusedseg, "backend", "triton")


@pytest.fixture
def packed(monkeypatch):
    """What can be packed is packed, also where the step of so small a network keeps less, or peaks lower, without."""
    from fusedseg.compiler.plan import choose

    monkeypatch.setattr(choose.StepBytes, "is_within", lambda cost, most: True)


@pytest.fixture
def norms_of_a_gpu():
    """Norms of captured graphs become the op on a CPU too."""
    from bench import supported

    with supported.norms_of_a_gpu():
        yield


@pytest.fixture
def emitted(monkeypatch):
    """The graphs that become code in a test, as the last pass leaves them."""
    from fusedseg.compiler.codegen import aten

    return spied(monkeypatch, aten, "emit", lambda run, module, inputs: module.graph)


@pytest.fixture
def sources(monkeypatch):
    """The code of the graphs that a test compiles."""
    from fusedseg.compiler.codegen import aten

    return spied(monkeypatch, aten, "emit", lambda run, module, inputs: run.source)
