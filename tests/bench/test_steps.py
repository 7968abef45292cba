"""The bench of whole steps: its two parts on a CPU, its processes, and the kinds of kernels."""

import json
import sys
import time
import weakref

import pytest
import torch

from bench.gpu import steps, test_steps
from bench.gpu.kinds import Launches, by_kind, kind_of
from bench.gpu.steps import CASES, Case, Run
from bench.gpu.test_steps import Session, ended, pairs_of

CPU = torch.device("cpu")
UNET = next(case for case in CASES if case.fused)
STATIC = next(case for case in CASES if case.static)


def measured(part: str, case: Case, way: str, folder) -> dict:
    run = Run(case, way, True, CPU, folder)
    steps.measure(part, run)
    return steps.read(steps.file_of(folder, case, way, part))


def test_a_way_is_compared_with_eager_mode_and_timed(tmp_path):
    eager, fused = (measured("check", UNET, way, tmp_path) for way in ("eager", "fused"))
    assert eager["difference"] == 0
    assert 0 < fused["difference"] < 0.2
    assert fused["kept_bytes"] < 0.5 * eager["kept_bytes"]
    for found in (eager, fused):
        forward, backward = found["course"]
        assert max(len(forward), len(backward)) <= 200
        assert max(*forward, *backward) == pytest.approx(found["peak_bytes"], rel=0.02)
        assert forward[-1] >= 0.9 * found["kept_bytes"]
    # Three times the products of forward, but for the gradient of the image.
    assert eager["case"]["flop"] > 2.5 * 2 * 32 * 32 * 2 * 8 * 8 * 9
    times = measured("time", UNET, "fused", tmp_path)
    assert times.keys() == {"forward", "backward", "step", "host", "optimizer", "kernels", "benchmark"}
    assert times["benchmark"]["optimizer"]["median_ms"] > 0


def test_wrong_gradients_are_refused_and_not_counted(tmp_path, monkeypatch):
    measured("check", UNET, "eager", tmp_path)
    monkeypatch.setitem(steps.WAYS, "fused", lambda net, case: net.apply(scaled))
    found = measured("check", UNET, "fused", tmp_path)
    assert "gradients off by" in found["refused"]
    assert "kept_bytes" not in found


@torch.no_grad()
def scaled(module: torch.nn.Module) -> None:
    if isinstance(module, torch.nn.Conv2d):
        module.weight *= -2


def test_a_full_memory_is_waited_for_without_the_tensors_of_the_call(monkeypatch):
    """The handler of the error held the frames of the call, so that its memory stayed in use while it waited."""
    held, alive = [], []

    def call() -> str:
        if not held:
            x = torch.empty(1)
            held.append(weakref.ref(x))
            raise torch.OutOfMemoryError
        return "done"

    monkeypatch.setattr(steps.time, "sleep", lambda seconds: alive.append(held[0]() is not None))
    assert steps.again(call) == "done"
    assert alive == [False]


def test_masters_take_the_gradients_without_the_scale():
    pytest.importorskip("dynamic_network_architectures")
    job = steps.job_of(STATIC, "eager", True, CPU)
    trained = steps.training(job, static=True)
    weights = [param.clone() for param in job.params]
    job.loss(job.forward(job.prepare())).backward()
    expected = job.params[0].grad.float() / steps.LOSS_SCALE
    for param in job.params:
        param.grad = None
    trained.backward(trained.forward(trained.prepare()))
    assert torch.equal(trained.masters[0].grad, expected)
    assert expected.any()
    # The learning rate is zero.
    assert all(torch.equal(param, weight) for param, weight in zip(job.params, weights, strict=True))
    assert all(param.grad is None for param in job.params)


@pytest.fixture
def fake(monkeypatch):
    """Processes that stand for ``python -m bench.gpu.steps``.  The way "compiled" never ends, and "aten" fails."""
    code = """
import json, re, sys, time
from pathlib import Path
part, case, way, folder = sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[5])
if "--wait" in sys.argv:
    sys.stdin.readline()
if way == "compiled":
    time.sleep(60)
found = {"kept_bytes": 1} if part == "check" else {"step": {"median_ms": 2.0}}
if way == "aten":
    found = {"missing": "RuntimeError"}
name = re.sub("[^A-Za-z0-9]+", "-", f"{case} {way}")
(folder / f"{name}.{part}.json").write_text(json.dumps(found | {"began": time.monotonic()}))
"""
    monkeypatch.setattr(test_steps, "COMMAND", (sys.executable, "-c", code))
    monkeypatch.setitem(test_steps.LIMITS, "check", 0.8)


def test_ways_that_fail_or_never_end_leave_the_others_alone(tmp_path, fake):
    written = []
    session = Session(CPU, tmp_path, True, lambda found: written.append(json.loads(json.dumps(found))))
    pairs = [(UNET, way) for way in ("eager", "compiled", "aten", "fused", "ours")]
    begin = time.monotonic()
    with ended(session):
        session.check(pairs, begin + 20)
        session.measure_times(pairs, begin + 20)
    ways = session.found[str(UNET)]["contenders"]
    assert ways["compiled"] == {"missing": "check: the process wrote nothing in its time"}
    assert ways["aten"]["missing"] == "RuntimeError"
    timed = [way for way, of in ways.items() if "step" in of]
    assert timed == ["eager", "fused", "ours"]
    # One process after the other, and the file is written after each one.
    assert sorted(timed, key=lambda way: ways[way]["began"]) == timed
    assert [sum("step" in of for of in found[str(UNET)]["contenders"].values()) for found in written][-4:] == [
        0,
        1,
        2,
        3,
    ]
    assert not session.running


def test_without_eager_mode_nothing_is_compared(tmp_path, fake):
    session = Session(CPU, tmp_path, True, lambda found: None)
    with ended(session):
        session.check([(UNET, "aten"), (UNET, "fused")], time.monotonic() + 20)
    assert not session.found


def interrupt(session: Session) -> None:
    with ended(session):
        raise KeyboardInterrupt


def test_no_process_outlives_an_interrupt(tmp_path, fake):
    session = Session(CPU, tmp_path, True, lambda found: None)
    process = session.start("check", UNET, "compiled")
    with pytest.raises(KeyboardInterrupt):
        interrupt(session)
    assert process.child.poll() is not None
    assert not session.running


def test_the_important_ways_come_first():
    pairs = pairs_of(CASES)
    first = [way in steps.FIRST for _, way in pairs]
    assert first == sorted(first, reverse=True)
    # The packages of some networks may be absent.
    here = next(case for case in CASES if case.is_here())
    assert [way for case, way in pairs if case is here][:2] == ["eager", "compiled"]
    assert len({str(case) for case in CASES}) == len(CASES)
    assert {way for case in CASES for way in case.ways} == set(steps.WAYS)


KINDS = {
    "sm90_xmma_wgrad_indexed_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc": "convolution or product",
    "void cudnn::engines_precompiled::nchwToNhwcKernel<__half, __half, float, false, true>": "layout of convolutions",
    "norm_act_bwd_reduce_kernel": "norm and activation",
    "void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda(at::TensorIteratorBase&)>": "copy or cast",
    "void at::native::elementwise_kernel<128, 4, at::native::CUDAFunctor_add<c10::Half> >": "addition",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<c10::Half>>": "sum",
    "void at::native::CatArrayBatchedCopy_alignedK_contig<>": "concatenation",
    # The compiler names a kernel after its ops, of which "convolution" is the next reader of a cast.
    "triton_poi_fused__to_copy_convolution_3": "copy or cast",
    "triton_poi_fused__to_copy_cat_convolution_leaky_relu_69": "concatenation",
    "triton_poi_fused__to_copy__unsafe_index_put_add_mul_neg_new_zeros_5": "upsampling",
    "triton_red_fused_convolution_backward_12": "sum",
    "triton_red_fused__native_batch_norm_legit_functional_2": "norm and activation",
    "roll_cuda_kernel": "rest",
}


@pytest.mark.parametrize(("name", "kind"), KINDS.items())
def test_kinds_of_kernels(name, kind):
    assert kind_of(name) == kind


def test_kinds_are_sums():
    kernels = [Launches("norm_stats_kernel", 2, 1.0), Launches("norm_merge_kernel", 3, 0.5), Launches("nvjet", 1, 4.0)]
    assert list(by_kind(kernels).items()) == [
        ("convolution or product", {"ms": 4.0, "launches": 1}),
        ("norm and activation", {"ms": 1.5, "launches": 5}),
    ]
