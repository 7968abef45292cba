"""The 3x3x3 convolution of few channels in place of the vendor's: which are served, and when the kernel is taken."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fusedseg
from fusedseg import functional
from fusedseg.ops.conv import choice, convolutions
from fusedseg.ops.conv import conv3d as op
from tests.ops import conv_abn_cases
from tests.reference import relative_error
from tests.tools.spy import spied
from tests.tools.tensors import channels_last, empty

REST = ((1, 1, 1), (1, 1, 1), (1, 1, 1), False, (0, 0, 0), 1)
TOLERANCE = 2e-3
# bfloat16 has three digits fewer.
OF_BF16 = 8 * TOLERANCE


def inputs(C=32, K=32, size=(2, 3, 5), device="cpu", dtype=torch.float16, batch=2):
    x = channels_last(torch.randn(batch, C, *size, device=device).to(dtype))
    weight = (torch.randn(K, C, 3, 3, 3, device=device) / (27 * C) ** 0.5).to(dtype)
    return x, weight, torch.randn(K, device=device).to(dtype)


def assert_close(found, expected, tolerance=TOLERANCE):
    assert relative_error(found, expected) <= tolerance


@pytest.fixture(autouse=True)
def no_records():
    choice._records.clear()
    yield
    choice._records.clear()


@pytest.fixture
def timed(monkeypatch, triton):
    """Tensors on the CPU report a GPU, on which each backend takes these seconds; the dict also lists what ran.

    "with the norm" is the kernel of a convolution and its norm, of which ``conv_abn`` asks.
    """
    seconds = {"triton": 1.0, "aten": 2.0, "with the norm": 3.0, "measured": []}

    def recorded(kind, x, run):
        if kind not in choice._records:
            of_volumes = kind.what.startswith("conv3d")
            if of_volumes:
                seconds["measured"].append(kind)
            found, expected = run("triton"), run("aten")
            difference = relative_error(found, expected)
            agree = difference <= choice.AGREEMENT[x.dtype]
            ours = seconds["triton" if of_volumes else "with the norm"]
            choice._records[kind] = choice.Record(ours, seconds["aten"], difference, agree)
        return choice._records[kind]

    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    monkeypatch.setattr(choice, "recorded", recorded)
    return seconds


@pytest.fixture
def launched(monkeypatch):
    return spied(monkeypatch, op, "_launch", lambda y, *given, backward: "input gradient" if backward else "forward")


REFUSED = {
    "an image": {"x": torch.empty(2, 32, 5, 7, dtype=torch.float16)},
    "fp32": {"x": inputs(dtype=torch.float32)[0], "weight": inputs(dtype=torch.float32)[1]},
    "mixed dtypes": {"weight": inputs()[1].bfloat16()},
    "8 channels": dict(zip(("x", "weight"), inputs(C=8), strict=False)),
    "24 channels": dict(zip(("x", "weight"), inputs(C=24), strict=False)),
    "80 channels": dict(zip(("x", "weight"), inputs(C=80), strict=False)),
    "80 output channels": {"weight": inputs(K=80)[1]},
    "other channels than the weight's": {"x": inputs(C=48)[0]},
    "planes": {"x": inputs()[0].contiguous()},
    "a slice of channels": {"x": inputs(C=64)[0][:, :32]},
    "no sample": {"x": inputs(batch=0)[0]},
    "more samples than CUDA has programs along the last dimension of a grid": {
        **dict(zip(("x", "weight"), inputs(16, 16, (1, 1, 2), batch=2**16), strict=False))
    },
    "one position": {"x": inputs(size=(1, 1, 1))[0]},
    "1x1x1": {"weight": inputs()[1][:, :, :1, :1, :1]},
    "stride": {"stride": (1, 2, 2)},
    "padding": {"padding": (0, 1, 1)},
    "dilation": {"dilation": (2, 1, 1)},
    "groups": {"groups": 2},
    # The system never commits this memory.
    "a large sample": {"x": empty((1, 32, 512, 512, 256), torch.float16, True)},
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_refused(case, triton):
    x, weight, _ = inputs()
    assert op.PLAIN.served(x, weight)
    arguments = op.PLAIN._replace(**{name: value for name, value in case.items() if name not in ("x", "weight")})
    assert not arguments.served(case.get("x", x), case.get("weight", weight))


def test_only_hopper_is_served(triton, monkeypatch):
    monkeypatch.setattr(op._backend, "architecture", lambda device: "sm_90")
    assert op.runs_on(torch.device("cuda", 0))
    for other in ("sm_80", "sm_100"):
        monkeypatch.setattr(op._backend, "architecture", lambda device, other=other: other)
        assert not op.runs_on(torch.device("cuda", 0))


def test_nothing_is_served_by_aten(monkeypatch):
    monkeypatch.setattr(fusedseg, "backend", "aten")
    assert not op.PLAIN.served(*inputs()[:2])


def test_the_faster_one_computes_and_is_measured_once(timed, launched):
    x, weight, bias = inputs()
    dy = torch.randn_like(x)
    assert_close(op.convolution(x, weight, bias, *REST), op.reference_forward(x, weight, bias).double())
    expected = torch.ops.aten.convolution_backward(dy, x, weight, [32], *REST, [True, True, True])
    found = op.convolution_backward(dy, x, weight, [32], *REST, [True, True, True])
    assert_close(found[0], expected[0].double())
    assert torch.equal(found[1], expected[1])
    assert torch.equal(found[2], expected[2])
    # The measurement, and the call.
    assert launched == ["forward"] * 2 + ["input gradient"] * 2
    op.convolution(x, weight, bias, *REST)
    assert launched[4:] == ["forward"]
    assert len(timed["measured"]) == 2


def test_a_slower_one_is_not_taken(timed, launched):
    timed["triton"] = 1.99
    x, weight, bias = inputs()
    dy = torch.randn_like(x)
    assert torch.equal(op.convolution(x, weight, bias, *REST), op.reference_forward(x, weight, bias))
    found = op.convolution_backward(dy, x, weight, [32], *REST, [True, True, True])
    expected = torch.ops.aten.convolution_backward(dy, x, weight, [32], *REST, [True, True, True])
    assert all(map(torch.equal, found, expected))
    # The measurements alone.
    assert launched == ["forward", "input gradient"]


def test_every_kind_is_measured(timed):
    for size, dtype in (((1, 1, 2), torch.float16), ((1, 1, 3), torch.float16), ((1, 1, 2), torch.bfloat16)):
        x, weight, bias = inputs(size=size, dtype=dtype)
        op.convolution(x, weight, bias, *REST)
        op.convolution(x, weight, None, *REST)
        op.convolution_backward(x, x, weight, None, *REST, [True, False, False])
    assert len(set(timed["measured"])) == len(timed["measured"]) == 9


def test_the_vendor_computes_what_is_not_served(timed, launched):
    x, weight, bias = inputs()
    planes = x.contiguous()
    op.convolution(planes, weight, bias, *REST)
    op.convolution_backward(planes, planes, weight, None, *REST, [True, True, False])
    # The gradient of the output is not in channels_last.
    op.convolution_backward(planes, x, weight, None, *REST, [True, True, False])
    # Nobody asks for the gradient of the input.
    op.convolution_backward(x, x, weight, None, *REST, [False, True, False])
    # A transposed convolution.
    op.convolution(x, weight, None, *op.PLAIN._replace(transposed=True))
    assert not launched
    assert not timed["measured"]


def test_results_that_must_repeat_are_the_vendors(timed, launched, monkeypatch):
    monkeypatch.setattr(choice, "must_repeat", lambda: True)
    op.convolution(*inputs(), *REST)
    assert not launched


def test_sizes_of_one_power_of_two_are_measured_once(timed):
    """Each new size was measured by 28 convolutions."""
    for depth in (5, 8, 9):
        op.convolution(*inputs(size=(1, 1, depth)), *REST)
    assert [dict(kind.of)["log2_positions"] for kind in timed["measured"]] == [4, 5]


def test_errors_are_those_of_aten(timed):
    x, _, _ = inputs(C=48)
    _, weight, bias = inputs()
    with pytest.raises(RuntimeError, match="to have 32 channels, but got 48 channels"):
        op.convolution(x, weight, bias, *REST)


@pytest.fixture
def hopper(device, monkeypatch):
    if device.type != "cuda" or not op.runs_on(device):
        pytest.skip("measures on a GPU of sm_90")
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_gpu_measures_once_and_both_agree(device, hopper, dtype):
    x, weight, bias = inputs(size=(40, 64, 64), device=device, dtype=dtype)
    for _ in range(2):
        y = op.convolution(x, weight, bias, *REST)
        dx, dw, dbias = op.convolution_backward(y, x, weight, [32], *REST, [True, True, True])
    assert [record.agree for record in choice._records.values()] == [True, True]
    expected = torch.ops.aten.convolution_backward(y, x, weight, [32], *REST, [True, True, True])
    tolerance = choice.AGREEMENT[dtype]
    for found, wanted in zip((y, dx), (op.reference_forward(x, weight, bias), expected[0]), strict=True):
        assert_close(found, wanted, tolerance)
        assert found.stride() == wanted.stride()
    assert dw.shape == weight.shape
    assert dbias.shape == bias.shape


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_gpu_measures_a_convolution_with_its_norm(device, hopper, dtype):
    x, weight, _ = inputs(size=(40, 64, 64), device=device, dtype=dtype)
    dz = torch.randn_like(x)
    found = {}
    for conv_backend in ("aten", "auto"):
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        # Without a kink, at which a rounding changes a gradient by its whole size.
        z = functional.conv_abn(
            *leaves, None, None, None, padding=1, training=True, activation="identity", conv_backend=conv_backend
        )
        assert (not choice._records) == (conv_backend == "aten")
        found[conv_backend] = z.detach(), *torch.autograd.grad(z, leaves, dz)
    assert {kind.what for kind in choice._records} - {"conv_abn"} == {"conv3d", "conv3d input gradient"}
    assert all(record.agree for record in choice._records.values())
    for ours, vendors in zip(found["auto"], found["aten"], strict=True):
        assert relative_error(ours, vendors.double()) <= choice.AGREEMENT[dtype]


@pytest.mark.gpu
def test_a_captured_graph_measures_nothing(device, hopper, monkeypatch):
    x, weight, bias = inputs(size=(16, 32, 32), device=device)
    expected = op.forward(x, weight, bias)
    op.reference_forward(x, weight, bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = op.convolution(x, weight, bias, *REST)
    assert not choice._records
    graph.replay()
    assert_close(y, expected.double())
    # After a measurement, the graph takes the kernel that was found faster.
    monkeypatch.setattr(choice, "recorded", lambda kind, x, run: choice.Record(1.0, 2.0, 0.0, True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = op.convolution(x, weight, bias, *REST)
    graph.replay()
    assert torch.equal(y, expected)


class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Conv3d(16, 32, 3, padding=1)
        self.second = torch.nn.Conv3d(32, 48, 3, padding=1, bias=False)

    def forward(self, x):
        return self.second(torch.nn.functional.silu(self.first(x)))


@pytest.mark.usefixtures("compiled_afresh", "strides_of_a_gpu")
def test_a_graph_of_the_codegen_aten_calls_it(timed, launched):
    timed["triton"] = 1.0
    torch.manual_seed(0)
    exact = Two().bfloat16().double()
    model = Two().bfloat16()
    model.load_state_dict(exact.state_dict())
    x = inputs(16, dtype=torch.bfloat16)[0]
    wide = x.double().requires_grad_()
    x.requires_grad_()
    z = torch.compile(model, backend="fusedseg", options={"codegen": "aten"})(x)
    dz = torch.randn_like(z)
    z.backward(dz)
    expected = exact(wide)
    expected.backward(dz.double())
    assert_close(z, expected, OF_BF16)
    assert_close(x.grad, wide.grad, OF_BF16)
    for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad, OF_BF16)
    # With both measurements for each of two convolutions, and in the end their calls.
    assert launched.count("forward") == launched.count("input gradient") == 4


# Channels, odd and even sizes, one plane, and two sources of 48 channels in all.
FUSED = {
    "16 to 32": (conv_abn_cases.Conv((2, 16, 2, 3, 5), (32, 16, 3, 3, 3), padding=1), 1),
    "64 to 16, one plane": (conv_abn_cases.Conv((1, 64, 1, 5, 4), (16, 64, 3, 3, 3), padding="same"), 1),
    "two sources": (conv_abn_cases.Conv((2, 32, 2, 3, 5), (32, 32, 3, 3, 3), padding=1), 2),
}
FASTER = pytest.mark.parametrize("faster", [True, False], ids=["faster", "slower"])


@pytest.mark.parametrize(
    ("of", "dtype", "training", "faster"),
    [
        *zip(FUSED, (torch.float16, torch.bfloat16, torch.float16), (True,) * 3, (True,) * 3, strict=True),
        ("16 to 32", torch.bfloat16, True, False),
        ("two sources", torch.float16, False, True),
    ],
)
def test_a_convolution_with_its_norm_calls_it(of, dtype, training, faster, timed, launched):
    case, sources = FUSED[of]
    timed["triton"] = 1.0 if faster else 3.0
    z = conv_abn_cases.check(case, "auto", torch.device("cpu"), "channels_last", dtype, training, sources)
    # Each has one measurement.  If the kernel is faster, it is called as well, and competes with the one with the norm.
    assert launched.count("forward") == 1 + faster * (2 if sources == 1 else 1)
    assert launched.count("input gradient") == 1 + faster
    assert z.is_contiguous(memory_format=torch.channels_last_3d)


def with_the_norm(conv_backend):
    """The output of a convolution of 16 to 32 channels and its norm, and the inputs."""
    case, _ = FUSED["16 to 32"]
    given = conv_abn_cases.inputs(case, torch.float16, "cpu", "channels_last", params=torch.float32)
    return conv_abn_cases.fused(given, conv_backend, True, (None, None), case), given


@FASTER
def test_the_kernel_with_the_norm_competes_with_the_faster_one(faster, timed, launched):
    """Where the kernel with the norm is the fastest of three, it computes forward, and the gradient is chosen alone."""
    timed.update({"triton": 0.5, "with the norm": 0.4 if faster else 3.0, "aten": 1.0})
    for _ in range(2):
        z, given = with_the_norm("auto")
        torch.autograd.grad(z, given, torch.ones_like(z))
    # The vendor's side of the first measurement measures, and calls.
    assert launched.count("forward") == (2 if faster else 4)
    assert launched.count("input gradient") == 3
    assert len(timed["measured"]) == 2


def test_a_convolution_of_sources_calls_it(timed, launched, monkeypatch):
    """Sources that are convolved apart are calls of their own, whose weights are slices."""
    monkeypatch.setattr(convolutions, "FORMED_BYTES", 0)
    x, weight, bias = (t.requires_grad_() for t in inputs(C=48))
    y = functional.join_conv([channels_last(x[:, :32]), channels_last(x[:, 32:])], weight, bias, padding=1)
    dy = channels_last(torch.randn(y.shape).half())
    grads = torch.autograd.grad(y, (x, weight, bias), dy)
    wide = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    expected = torch.nn.functional.conv3d(*wide, padding=1)
    # The first source is rounded before the second is added.
    assert_close(y.detach(), expected.detach())
    for mine, theirs in zip(grads, torch.autograd.grad(expected, wide, dy.double()), strict=True):
        assert_close(mine, theirs)
    assert launched.count("forward") == launched.count("input gradient") == 4


def test_the_backend_aten_takes_the_vendor_forward_and_backward(timed, launched):
    z, given = with_the_norm("aten")
    torch.autograd.grad(z, given, torch.ones_like(z))
    assert not launched
    assert not timed["measured"]


def test_a_large_input_is_freed_before_its_gradient(timed, launched, monkeypatch):
    """The tensor that stands for the input then has its strides, so that the kernel serves it."""
    z, given = with_the_norm("auto")
    expected = torch.autograd.grad(z, given, torch.ones_like(z), retain_graph=True)
    before = launched.count("input gradient")
    monkeypatch.setattr(convolutions.reuse, "is_large", lambda x: True)
    assert all(map(torch.equal, torch.autograd.grad(z, given, torch.ones_like(z)), expected))
    assert launched.count("input gradient") == before + 1


def test_the_compiler_traces_the_stock_convolution(timed, launched):
    """A kernel call in a graph that another compiler traces would break the graph."""
    module = fusedseg.ConvABN3d(16, 32, 3, padding=1).half()
    torch.compile(module, backend="eager", fullgraph=True)(inputs(16)[0])
    assert not launched
    assert not timed["measured"]


def test_fake_tensors_on_a_gpu_ask_no_gpu():
    """A question about the GPU's architecture failed where the GPU of a fake tensor is not there."""
    with FakeTensorMode():
        x = torch.empty(2, 16, 3, 5, 7, dtype=torch.float16, device="cuda").to(memory_format=torch.channels_last_3d)
        w = torch.empty(32, 16, 3, 3, 3, dtype=torch.float16, device="cuda")
        assert not op.PLAIN.served(x, w)
