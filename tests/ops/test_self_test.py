"""The self-test of the kernels at their first use: when it runs, and what a failure does."""

import contextlib
import warnings

import pytest
import torch
from torch import nn

import fusedseg
from fusedseg import _backend, _torch
from fusedseg.ops.registry import FAMILIES, Result
from fusedseg.ops.self_test import cases, first_use
from tests.tools.stand_in import new_process
from tests.tools.stand_in import stand_in as stand_in
from tests.tools.threads import in_threads

pytest.importorskip("triton")

CPU = torch.device("cpu")


@pytest.fixture
def tested(monkeypatch):
    """Replaces the kernels' checks by ones that cost nothing: the list of what was tested, and faults by family.

    A fault is an error to raise, or a function that changes a result.
    """
    seen, faults = [], {}

    def check_of(family):
        def check(dtype, device):
            seen.append((family, dtype))
            fault = faults.get(family)
            if isinstance(fault, BaseException):
                raise fault
            expected = torch.ones(3, dtype=torch.float64)
            yield Result("z (contiguous)", fault(expected) if fault else expected, expected, 1e-5)

        return check

    for name, family in FAMILIES.items():
        monkeypatch.setitem(FAMILIES, name, family._replace(self_test=check_of(name)))
    return seen, faults


def serves(family="norm", dtype=torch.float32) -> bool:
    return _backend.use_triton(torch.empty(1, dtype=dtype), family)


def out_of_resources() -> Exception:
    from triton.runtime.errors import OutOfResources

    return OutOfResources(101376, 65536, "shared memory")


def compilation_error() -> Exception:
    from triton.compiler.errors import CompilationError

    return CompilationError("x = tl.dot(a, b)", None, "sizes must be at least 16")


def ptxas_error() -> Exception:
    from triton.runtime.errors import PTXASError

    return PTXASError("`ptxas` failed with error code 255")


# The kind of a failure -> (a fault, words of the warning).
FAILURES = {
    "compile": (compilation_error, r"compilation failed: CompilationError: .*sizes must be at least 16"),
    "ptxas": (ptxas_error, r"compilation failed: PTXASError: PTXAS error: `ptxas` failed with error code 255"),
    "shared memory": (
        out_of_resources,
        r"out of the GPU's resources: OutOfResources: out of resource: shared memory, Required: 101376, "
        "Hardware limit: 65536",
    ),
    "launch": (
        lambda: RuntimeError("Triton Error [CUDA]: invalid argument"),
        r"launch failed: RuntimeError: Triton Error \[CUDA\]: invalid argument",
    ),
    "wrong result": (
        lambda: lambda t: t * 1.001,
        r"wrong result: z \(contiguous\) is off by 1.0e-03 of its size, and 1e-05 is allowed",
    ),
    "not a number": (lambda: lambda t: t * torch.nan, "wrong result: z .* is off by nan"),
    "anything else": (lambda: OSError("no compiler"), "error: OSError: no compiler"),
}


@pytest.mark.parametrize(("fault", "words"), FAILURES.values(), ids=FAILURES)
def test_a_failure_leaves_the_family_to_aten_with_one_warning(stand_in, tested, fault, words):
    seen, faults = tested
    faults["norm"] = fault()
    with pytest.warns(RuntimeWarning, match=words) as warned:
        assert not serves()
    (text,) = {str(of.message) for of in warned}
    assert text.startswith("fusedseg: the Triton kernels of 'norm' in float32 failed their self-test on cpu")
    assert "`python -m fusedseg doctor --gpu` shows more and tests again" in text
    assert "attach the file that `python -m fusedseg doctor --gpu --json fusedseg.json` writes" in text
    assert "FUSEDSEG_SELF_TEST=0" in text
    # No other warning, no other test, and other families and dtypes are not affected.
    faults.clear()
    assert not serves()
    assert serves("pool")
    assert serves(dtype=torch.float16)
    assert seen == [("norm", torch.float32), ("pool", torch.float32), ("norm", torch.float16)]
    assert "self-test of its norm kernels in float32 failed" in _backend.why_not(torch.empty(1), "norm")


@pytest.mark.parametrize("is_failure", [True, False], ids=["failed", "without memory"])
def test_the_next_process_tests_again(stand_in, tested, is_failure):
    """No result is kept on disk, so that a repaired installation is used again.

    A test without memory is no failure: the kernels run in this process.
    """
    seen, faults = tested
    faults["norm"] = out_of_resources() if is_failure else torch.OutOfMemoryError("CUDA out of memory")
    warned = pytest.warns(RuntimeWarning, match="OutOfResources") if is_failure else contextlib.nullcontext()
    with warned:
        assert serves() is not is_failure
    new_process()
    faults.clear()
    assert serves()
    assert len(seen) == 2


def test_gpus_of_one_model_are_tested_once(stand_in, tested, monkeypatch):
    seen, _ = tested
    names = {0: "Card", 1: "Card", 2: "Other"}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names[device.index])
    monkeypatch.setattr(_backend, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(first_use, "can_test", lambda device: True)
    monkeypatch.setattr(first_use, "test_now", lambda *given: (seen.append(given), (first_use.SelfTestResult(), ""))[1])
    for index in names:
        assert first_use.first_use("norm", torch.float32, torch.device("cuda", index)) == ""
    assert [device.index for _, _, device in seen] == [0, 2]
    first_use.model_of.cache_clear()


def test_it_is_turned_off_by_a_variable(stand_in, tested, monkeypatch):
    seen, faults = tested
    faults["norm"] = out_of_resources()
    monkeypatch.setenv("FUSEDSEG_SELF_TEST", "0")
    assert serves()
    assert not seen
    monkeypatch.setenv("FUSEDSEG_SELF_TEST", "no")
    with pytest.raises(ValueError, match="FUSEDSEG_SELF_TEST must be 0 or 1, got 'no'"):
        serves("pool")


def test_who_asks_for_triton_gets_an_error(stand_in, tested, monkeypatch):
    _, faults = tested
    faults["norm"] = out_of_resources()
    monkeypatch.setattr(fusedseg, "backend", "triton")
    with (
        pytest.warns(RuntimeWarning, match="OutOfResources"),
        pytest.raises(RuntimeError, match=r"fusedseg.backend is 'triton', but .* self-test of its norm kernels"),
    ):
        serves()


def test_nothing_is_tested_now_and_aten_serves(stand_in, tested, monkeypatch):
    """While a graph is captured, aten serves what is not tested; afterwards it is tested."""
    seen, _ = tested
    with monkeypatch.context() as patch:
        patch.setattr(first_use, "can_test", lambda device: False)
        assert not serves()
    assert not seen
    assert serves()
    assert seen
    # A result that is known serves a captured graph too.
    _backend.forget()
    with monkeypatch.context() as patch:
        patch.setattr(first_use, "can_test", lambda device: False)
        assert serves()


def test_a_captured_graph_is_seen(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    for capturing in (True, False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing)
        assert first_use.can_test(torch.device("cuda", 0)) is not capturing


def test_transforms_and_the_compiler_are_seen(monkeypatch):
    found = []
    torch.func.grad(lambda x: (found.append(first_use.can_test(CPU)), x.sum())[1])(torch.ones(2))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    found.append(first_use.can_test(CPU))
    monkeypatch.undo()
    assert [*found, first_use.can_test(CPU)] == [False, False, True]


def test_fake_tensors_are_never_tested(stand_in, tested):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert not serves()
    assert not tested[0]


@pytest.mark.usefixtures("needs_interpreter")
def test_modes_of_the_caller_do_not_matter(stand_in):
    """The pool's real test runs in the interpreter under modes that would change or refuse its calls."""
    torch.use_deterministic_algorithms(True)
    try:
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
            assert _backend.use_triton(torch.empty(1, device="cpu"), "pool")
    finally:
        torch.use_deterministic_algorithms(False)
    assert first_use._known["pool", torch.float32, "cpu"].kind == ""


def test_a_device_that_no_longer_answers_ends_the_program(stand_in, tested, monkeypatch):
    """After an illegal access every call of the process fails, also aten's."""
    _, faults = tested
    faults["norm"] = RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
    monkeypatch.setattr(first_use, "answers", lambda device: False)
    with pytest.raises(RuntimeError, match=r"illegal memory access.*program again with FUSEDSEG_BACKEND=aten"):
        serves()
    monkeypatch.undo()
    assert first_use.answers(CPU)


def test_a_device_answers_in_a_fake_call():
    """A failed test in the call that lists a graph's kernels was a broken device, and was made twice."""
    with _torch.ListingMode():
        assert first_use.answers(CPU)


def test_threads_of_a_process_test_once(stand_in, tested):
    seen, _ = tested
    in_threads(*[serves] * 4)
    assert len(seen) == 1


def test_synchronisation_may_be_forbidden(stand_in, tested, monkeypatch):
    """``torch.cuda.set_sync_debug_mode("error")`` fails calls that wait for the GPU, and the test must wait."""
    modes = [2]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    result, _ = first_use.test_now("norm", torch.float32, torch.device("cuda", 0))
    assert (result.kind, modes) == ("", [2, 0, 2])


@pytest.mark.usefixtures("needs_interpreter")
@pytest.mark.parametrize(
    ("family", "dtype"), [(name, dtype) for name, family in FAMILIES.items() for dtype in family.dtypes], ids=str
)
def test_kernels_pass_in_every_dtype(family, dtype):
    first_use.compare(family, dtype, CPU)


def test_windows_of_the_check_have_one_maximum():
    """The reference gives the gradient to the first maximum, and would hide an error between equal values."""
    for dtype in FAMILIES["pool"].dtypes:
        x = cases.image(cases.SHAPE, dtype, CPU, "contiguous", 0)
        two = x.unfold(2, 2, 2).unfold(3, 2, 2).flatten(-2).sort(-1).values
        assert (two[..., -1] > two[..., -2]).float().mean() > 0.9


@pytest.mark.usefixtures("needs_interpreter")
@pytest.mark.parametrize("failing", ["norm", "pool"])
def test_training_with_a_failed_family_is_training_on_aten(stand_in, monkeypatch, failing):
    """A network is trained on the kernels that pass.  Pools are exact, so every loss is the same to the last bit."""

    def losses() -> list[float]:
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), fusedseg.InPlaceABN(4), fusedseg.MaxPool2d(2), nn.Conv2d(4, 4, 1),
            fusedseg.BatchNormAct(4), nn.Conv2d(4, 2, 1),
        )  # fmt: skip
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        x, target = torch.randn(2, 2, 8, 8), torch.randint(2, (2, 4, 4))
        found = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x), target)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    from fusedseg.kernels.launcher import Launcher

    from fusedseg.kernels import max_pool

    def broken(self, tensors, *floats):
        name = self._kernel.fn.__name__
        launched.add(name.partition("_")[0])
        call(self, tensors, *floats)
        if name.startswith("norm" if failing == "norm" else "max_pool_fwd"):
            tensors[1].flatten()[:3] = 7

    launched: set[str] = set()
    call = Launcher.__call__
    monkeypatch.setattr(Launcher, "__call__", broken)
    assert max_pool
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = losses()
    (text,) = (str(of.message) for of in warned)
    assert text.startswith(f"fusedseg: the Triton kernels of '{failing}' in float32 failed their self-test")
    assert launched == {"norm", "max"}
    monkeypatch.setattr(fusedseg, "backend", "aten")
    expected = losses()
    if failing == "norm":
        assert found == expected
    else:
        # The norms have run on Triton, whose sums have another order.
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
