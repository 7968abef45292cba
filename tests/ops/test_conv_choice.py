"""Which convolution the backend "auto" takes: the rule and the measurement."""

import contextlib
import math
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fusedseg
from fusedseg import _torch
from fusedseg.functional import conv_abn
from fusedseg.memory import allocator_peak
from fusedseg.ops.conv import choice as conv_choice
from fusedseg.ops.conv.choice import (
    MARGIN,
    ROUNDS,
    WARMUP,
    Record,
    choose,
    could_win,
    kind_of,
    kind_of_conv_abn,
    measure,
    tf32_allowed,
)
from fusedseg.ops.conv.geometry import Geometry
from tests.tools.precision import cudnn_set
from tests.tools.spy import spied
from tests.tools.tensors import channels_last

OP = "fusedseg.conv_abn"


@pytest.fixture(autouse=True)
def no_records():
    conv_choice._records.clear()
    yield
    conv_choice._records.clear()


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Lets tensors on the CPU take the path of tensors on a GPU."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    monkeypatch.setattr(conv_choice, "unfit", lambda x, positions: "")
    monkeypatch.setattr(conv_choice._backend, "use_triton", lambda x: True)


@pytest.fixture
def gpu_tensors(monkeypatch):
    """Makes tensors on the CPU report a GPU on which every call takes a second."""
    monkeypatch.setattr(conv_choice, "cuda_seconds", lambda run: run() is None or 1.0)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: True))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def convolution(C=32, K=32, kernel=3, size=16, dims=2, dtype=torch.bfloat16, rows=True, groups=1, **options):
    """x, w and the geometry; the tensors have no values."""
    x = torch.empty(2, C, *(size,) * dims, dtype=dtype)
    w = torch.empty(K, C // groups, *(kernel,) * dims, dtype=dtype)
    given = {"stride": 1, "padding": kernel // 2, "dilation": 1} | options
    of = {name: (value,) * dims for name, value in given.items()}
    return channels_last(x) if rows else x, w, Geometry(**of, groups=groups)


RULE = {
    "channels_last": ({}, True),
    "fp16": ({"dtype": torch.float16}, True),
    "3d": ({"dims": 3, "size": 4}, True),
    "stride and dilation": ({"stride": 2, "dilation": 2}, True),
    "float64": ({"dtype": torch.float64}, False),
    "contiguous, several taps": ({"rows": False}, False),
    "contiguous 1x1": ({"rows": False, "kernel": 1}, True),
    "contiguous 1x1 of planes of 15 x 15": ({"rows": False, "kernel": 1, "size": 15}, False),
    "contiguous 1x1 with a stride": ({"rows": False, "kernel": 1, "stride": 2}, False),
    "contiguous 1x1 with padding": ({"rows": False, "kernel": 1, "padding": 1}, False),
    "channels_last 1x1 with a stride": ({"kernel": 1, "stride": 2}, True),
    "groups": ({"groups": 2}, False),
    "8 channels": ({"C": 8}, False),
    "16 channels": ({"C": 16}, True),
    "rows of 36 bytes": ({"C": 18}, False),
    "128 channels": ({"C": 128}, True),
    "136 channels": ({"C": 136}, False),
    "136 channels 1x1": ({"C": 136, "kernel": 1}, True),
}


@pytest.mark.parametrize(("of", "expected"), RULE.values(), ids=RULE)
def test_rule(of, expected):
    x, w, g = convolution(**of)
    assert could_win(x, w, g) is expected


@pytest.mark.parametrize(("precision", "expected"), [("tf32", True), ("ieee", False)])
def test_rule_for_fp32_asks_for_tf32(precision, expected):
    x, w, g = convolution(dtype=torch.float32)
    with cudnn_set("fp32_precision", precision):
        assert tf32_allowed() is expected
        assert could_win(x, w, g) is expected


def test_rule_for_strides_of_neither_layout():
    x, w, g = convolution(size=16)
    assert not could_win(x[:, :, ::2], w, g)


class Clock:
    """Runs the function that it times, and reports ``seconds[name]``, or ten times that for a warm-up run."""

    def __init__(self, outputs, seconds):
        self.outputs, self.seconds, self.ran = outputs, seconds, []

    def forward(self, name):
        self.ran.append(name)
        return self.outputs[name]

    def __call__(self, run):
        run()
        name = self.ran[-1]
        # The first run of each convolution was for its result.
        return self.seconds[name] * (10 if self.ran.count(name) - 1 <= WARMUP else 1)


def clock(triton, aten, error=0.0):
    z = torch.randn(1000)
    off = torch.randn(1000) * error
    return Clock({"aten": z, "triton": z + off}, {"triton": triton, "aten": aten})


@pytest.mark.parametrize(
    ("triton", "expected"),
    [(0.5, "triton"), (MARGIN, "triton"), (MARGIN + 0.005, "aten"), (2.0, "aten")],
)
def test_measure_takes_triton_where_it_is_faster_by_a_margin(triton, expected):
    timer = clock(triton, 1.0)
    record = measure(torch.bfloat16, timer.forward, timer)
    assert record == Record(triton, 1.0, 0.0, True)
    assert record.choice == expected
    # The convolutions run in turn, so that a drifting clock is fair to both.
    assert timer.ran == ["aten", "triton"] + ["triton", "aten"] * (WARMUP + ROUNDS)


@pytest.mark.parametrize(
    ("dtype", "error", "agree"),
    [
        (torch.bfloat16, 1e-2, True),
        (torch.bfloat16, 5e-2, False),
        (torch.float16, 1e-3, True),
        (torch.float16, 1e-2, False),
        (torch.float32, 1e-2, False),
        (torch.float32, math.nan, False),
    ],
    ids=str,
)
def test_measure_compares_results(dtype, error, agree):
    timer = clock(0.1, 1.0, error)
    record = measure(dtype, timer.forward, timer)
    assert record.agree is agree
    assert record.choice == ("triton" if agree else "aten")
    if agree:
        assert record.difference == pytest.approx(error, rel=0.2)


def test_measure_of_zeros():
    """If all outputs were zero, 0 / 0 counted as a disagreement, and Triton was never chosen again."""
    timer = Clock({"aten": torch.zeros(9), "triton": torch.zeros(9)}, {"triton": 0.1, "aten": 1.0})
    assert measure(torch.bfloat16, timer.forward, timer) == Record(0.1, 1.0, 0.0, True)
    timer.outputs["triton"] = torch.ones(9)
    assert not measure(torch.bfloat16, timer.forward, timer).agree


def test_a_batch_without_a_finite_result_is_not_remembered(on_a_gpu, gpu_tensors, monkeypatch):
    """If the first call overflowed, Triton was never chosen again, and the backend "triton" raised an error."""
    names = []

    def overflown(name):
        names.append(name)
        return torch.tensor([1.0, math.nan])

    assert chosen(forward=overflown) == "aten"
    assert chosen("triton", forward=overflown) == "triton"
    # Every batch without a finite result was once timed in full.
    assert names == ["aten", "aten"]
    assert not conv_choice._records
    # NaN only in Triton's result is a disagreement.
    assert chosen(forward=lambda name: torch.ones(2) / (0 if name == "triton" else 1) * 0) == "aten"
    assert [record.agree for record in conv_choice._records.values()] == [False]


def chosen(conv_backend="auto", forward=None, training=True, **of):
    x, w, g = convolution(**of)
    return choose(OP, conv_backend, x, w, g, training, forward)


def remember(record, **of):
    """Stores a choice as if it had been measured."""
    x, w, g = convolution(**of)
    conv_choice._records[kind_of_conv_abn(x, w, g, True)] = record


FASTER, SLOWER, WRONG = (
    Record(0.5, 1.0, 1e-3, True),
    Record(1.0, 1.0, 1e-3, True),
    Record(0.5, 1.0, 0.7, False),
)


@pytest.mark.parametrize(
    ("record", "auto", "explicit"), [(FASTER, "triton", "triton"), (SLOWER, "aten", "triton"), (WRONG, "aten", None)]
)
def test_choice_follows_the_record(on_a_gpu, record, auto, explicit):
    remember(record)
    assert chosen() == auto
    assert chosen("aten") == "aten"
    if explicit:
        assert chosen("triton") == explicit
        return
    with pytest.raises(RuntimeError, match=r"fusedseg.conv_abn: conv_backend is 'triton', but .* a relative 7.0e-01"):
        chosen("triton")


@pytest.mark.parametrize("how", ["algorithms", "cuDNN"])
def test_results_that_must_repeat_take_aten(on_a_gpu, how, monkeypatch, request):
    """nnU-Net's deterministic mode sets cuDNN's flag alone, and results differed between runs by a choice by time."""
    remember(FASTER)
    if how == "algorithms":
        request.getfixturevalue("poison")
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", how == "cuDNN")
    assert chosen() == "aten"
    assert chosen("triton") == "triton"


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), OSError("invalid argument")], ids=str)
def test_a_measurement_that_fails_takes_the_vendors(on_a_gpu, gpu_tensors, error):
    """The first step ended with the error."""

    def forward(name):
        if name == "triton":
            raise error
        return torch.ones(3)

    with pytest.warns(RuntimeWarning, match=f"the vendor's is taken. {type(error).__name__}: {error}") as warned:
        assert chosen(forward=forward) == "aten"
    assert chosen(forward=forward) == "aten"
    assert len(warned) == 1
    # Who asks for the kernel gets it, and then its own error.
    assert chosen("triton", forward=forward) == "triton"


def test_few_kinds_are_measured(on_a_gpu, gpu_tensors):
    """Each new size of an image was measured anew, and remembered for ever."""
    x, measured = torch.ones(1), []
    for size in range(2 * conv_choice.MOST_RECORDS):
        kind = kind_of("op", x, size=size)
        conv_choice.recorded(kind, x, lambda name, size=size: measured.append(size) or torch.ones(1))
    assert len(set(measured)) == len(conv_choice._records) == conv_choice.MOST_RECORDS
    # Kinds of another op are counted apart.
    assert chosen(forward=lambda name: torch.ones(1)) == "aten"
    assert len(conv_choice._records) == conv_choice.MOST_RECORDS + 1


def test_a_record_does_not_overrule_the_rule(on_a_gpu):
    remember(FASTER, groups=2)
    assert chosen(groups=2) == "aten"


def test_fake_tensors_take_aten(on_a_gpu):
    remember(FASTER)
    with FakeTensorMode():
        assert chosen() == "aten"
        assert chosen("triton") == "aten"


def test_measured_once_for_each_kind(on_a_gpu, gpu_tensors, monkeypatch):
    """``Kind`` tells calls apart; sizes within the same power of two of positions are one kind."""
    seen = []

    def forward(name):
        seen.append(name)
        return torch.ones(4)

    for of, runs in (
        ({}, 2 * (1 + WARMUP + ROUNDS)),
        ({}, 0),
        ({"conv_backend": "triton"}, 0),
        ({"size": 15}, 0),
        ({"size": 17}, 2 * (1 + WARMUP + ROUNDS)),
        ({"training": False}, 2 * (1 + WARMUP + ROUNDS)),
        ({"K": 48}, 2 * (1 + WARMUP + ROUNDS)),
        ({"dtype": torch.float16}, 2 * (1 + WARMUP + ROUNDS)),
        ({"conv_backend": "aten", "K": 80}, 0),
        ({"groups": 4}, 0),
    ):
        seen.clear()
        chosen(forward=forward, **of)
        assert len(seen) == runs, of
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    seen.clear()
    assert chosen(forward=forward, K=96) == "aten"
    assert chosen("triton", forward=forward, K=96) == "triton"
    assert not seen


def test_what_the_vendor_may_do_is_measured_anew(on_a_gpu, gpu_tensors):
    """The vendor's time depends on whether it tries its algorithms, and in fp32 on TF32."""

    def measured(**of):
        before = len(conv_choice._records)
        chosen("triton", lambda name: torch.ones(4), **of)
        return len(conv_choice._records) > before

    assert measured()
    with torch.backends.cudnn.flags(benchmark=not torch.backends.cudnn.benchmark):
        assert measured()
    assert not measured()
    for precision in ("tf32", "ieee"):
        with cudnn_set("fp32_precision", precision):
            assert measured(dtype=torch.float32)
            assert not measured()


def test_times_are_of_the_device_of_x(on_a_gpu, gpu_tensors, monkeypatch):
    """Events were recorded on the current device: they timed nothing if the tensor was on another device."""
    inside = []

    @contextlib.contextmanager
    def device_of(x):
        inside.append(x)
        yield
        inside.pop()

    def timed(run):
        run()
        assert inside
        return 1.0

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: not inside)
    monkeypatch.setattr(conv_choice, "cuda_seconds", timed)
    assert chosen(forward=lambda name: torch.ones(4)) == "aten"
    assert len(conv_choice._records) == 1


def test_kernels_are_timed_without_the_latency_of_their_launches(monkeypatch):
    """For small tensors the time between events was Python's time, for which the device does not wait in training."""
    done = mock.Mock()
    done.start.elapsed_time.return_value = 5.0
    monkeypatch.setattr(torch.cuda, "Event", mock.Mock(side_effect=[done.start, done.end]))
    monkeypatch.setattr(_torch, "cuda_sleep", done.sleep)
    assert conv_choice.cuda_seconds(done.run) == 0.005
    expected = ["sleep", "start.record", "run", "end.record", "end.synchronize", "start.elapsed_time"]
    assert [name for name, *_ in done.mock_calls] == expected


def test_measuring_peaks_by_one_more_output(device):
    """The measurement compared copies in float32, which took seven times the output of a forward in half precision."""
    z = torch.randn(2**20, device=device).bfloat16()

    def step():
        measure(torch.bfloat16, lambda name: z + 0, lambda run: run() is None or 1.0)

    # The norm on a CPU makes a cast copy that is as large as two outputs.
    outputs = 4 if device.type == "cpu" else 2
    assert allocator_peak(step, device) <= (outputs + 0.1) * z.nbytes


def test_a_cpu_takes_aten_and_measures_nothing(backend, device, monkeypatch):
    if device.type != "cpu":
        pytest.skip("on a GPU it is measured")
    names = spied(monkeypatch, fusedseg.ops.conv.conv_abn, "_forward_with", lambda result, name, *rest: name)
    x = torch.randn(2, 16, 6, 6, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    conv_abn(x, torch.randn(16, 16, 3, 3, dtype=torch.bfloat16), None, None, None, training=True)
    assert names == ["aten"]
    assert not conv_choice._records
