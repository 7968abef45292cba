"""The 3x3x3 convolution of few channels in place of the vendor's: which are served, and when the kernel is taken."""

import pytest
import torch

from fusedseg.ops.conv import choice
from fusedseg.ops.conv import conv3d as op
from tests.tools.tensors import channels_last, empty

GEOMETRY = ((1, 1, 1), (1, 1, 1), (1, 1, 1), 1)
REST = ((1, 1, 1), (1, 1, 1), (1, 1, 1), False, (0, 0, 0), 1)
TOLERANCE = 2e-3


def inputs(C=32, K=32, size=(3, 5, 7), device="cpu", dtype=torch.float16, batch=2):
    x = channels_last(torch.randn(batch, C, *size, device=device).to(dtype))
    weight = (torch.randn(K, C, 3, 3, 3, device=device) / (27 * C) ** 0.5).to(dtype)
    return x, weight, torch.randn(K, device=device).to(dtype)


def assert_close(found, expected):
    assert ((found.double() - expected).norm() / expected.norm()).item() <= TOLERANCE


@pytest.fixture(autouse=True)
def no_records():
    choice._records.clear()
    yield
    choice._records.clear()


@pytest.fixture
def triton(monkeypatch, needs_interpreter):
    import fusedseg

    monkeypatch.setattr(fusedseg, "backend", "triton")


@pytest.fixture
def timed(monkeypatch, triton):
    """Tensors on the CPU report a GPU, on which each backend takes these seconds; the dict also lists what ran."""
    seconds = {"triton": 1.0, "aten": 2.0, "measured": []}

    def recorded(kind, x, run):
        if kind not in choice._records:
            seconds["measured"].append(kind)
            found, expected = run("triton"), run("aten")
            difference = ((found.double() - expected.double()).norm() / expected.double().norm()).item()
            agree = difference <= choice.AGREEMENT[x.dtype]
            choice._records[kind] = choice.Record(seconds["triton"], seconds["aten"], difference, agree)
        return choice._records[kind]

    monkeypatch.setattr(choice, "recorded", recorded)
    return seconds


@pytest.fixture
def launched(monkeypatch):
    seen, original = [], op._launch

    def launch(x, weight, bias, channels, backward):
        seen.append("input gradient" if backward else "forward")
        return original(x, weight, bias, channels, backward)

    monkeypatch.setattr(op, "_launch", launch)
    return seen


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
    given = {"x": x, "weight": weight, **dict(zip(("stride", "padding", "dilation", "groups"), GEOMETRY, strict=True))}
    assert op.serves(**given)
    assert not op.serves(**{**given, **case})


def test_only_hopper_is_served(triton, monkeypatch):
    monkeypatch.setattr(op._backend, "architecture", lambda device: "sm_90")
    assert op.runs_on(torch.device("cuda", 0))
    for other in ("sm_80", "sm_100"):
        monkeypatch.setattr(op._backend, "architecture", lambda device, other=other: other)
        assert not op.runs_on(torch.device("cuda", 0))


def test_nothing_is_served_by_aten(monkeypatch):
    import fusedseg

    monkeypatch.setattr(fusedseg, "backend", "aten")
    assert not op.serves(*inputs()[:2], *GEOMETRY)


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [(16, 32), (32, 64), (48, 48), (64, 16)], ids=str)
def test_values(channels, device, backend):
    if device.type == "cuda" and not op.runs_on(device):
        pytest.skip("the kernel is made for sm_90")
    x, weight, bias = inputs(*channels, device=device)
    dy = channels_last(torch.randn(2, channels[1], 3, 5, 7, device=device).half())
    if backend == "triton":
        y, dx = op.forward(x, weight, bias), op.input_gradient(dy, weight)
    else:
        y, dx = op.reference_forward(x, weight, bias), op.reference_input_gradient(dy, weight)
    assert_close(y, torch.nn.functional.conv3d(x.double(), weight.double(), bias.double(), padding=1))
    assert_close(dx, torch.nn.grad.conv3d_input(x.shape, weight.double(), dy.double(), padding=1))
    assert y.is_contiguous(memory_format=torch.channels_last_3d)
    assert dx.is_contiguous(memory_format=torch.channels_last_3d)


@pytest.mark.gpu
def test_equal_calls_give_equal_bits(device, triton):
    if device.type == "cuda" and not op.runs_on(device):
        pytest.skip("the kernel is made for sm_90")
    x, weight, bias = inputs(size=(9, 17, 33), device=device)
    first = op.forward(x, weight, bias)
    for _ in range(3 if device.type == "cuda" else 1):
        assert torch.equal(op.forward(x, weight, bias), first)


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


def test_every_shape_dtype_and_direction_is_measured(timed):
    for dtype in (torch.float16, torch.bfloat16):
        for size in ((3, 5, 7), (3, 5, 8)):
            x, weight, bias = inputs(size=size, dtype=dtype)
            op.convolution(x, weight, bias, *REST)
            op.convolution(x, weight, None, *REST)
            op.convolution_backward(x, x, weight, None, *REST, [True, False, False])
    assert len(set(timed["measured"])) == len(timed["measured"]) == 12


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
    op.convolution(x, weight, None, *GEOMETRY[:3], True, (0, 0, 0), 1)
    assert not launched
    assert not timed["measured"]


def test_deterministic_algorithms_take_the_vendor(timed, launched):
    x, weight, bias = inputs()
    torch.use_deterministic_algorithms(True)
    try:
        op.convolution(x, weight, bias, *REST)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not launched


def test_errors_are_those_of_aten(timed):
    x, _, _ = inputs(C=48)
    _, weight, bias = inputs()
    with pytest.raises(RuntimeError, match="to have 32 channels, but got 48 channels"):
        op.convolution(x, weight, bias, *REST)


@pytest.fixture
def hopper(device):
    if device.type != "cuda" or not op.runs_on(device):
        pytest.skip("measures on a GPU of sm_90")


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
        assert ((found.double() - wanted.double()).norm() / wanted.double().norm()).item() <= tolerance
        assert found.stride() == wanted.stride()
    assert dw.shape == weight.shape
    assert dbias.shape == bias.shape


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


@pytest.mark.usefixtures("compiled_afresh")
@pytest.mark.parametrize("faster", [True, False])
def test_a_graph_of_the_codegen_aten_calls_it(faster, timed, launched):
    timed["triton"] = 1.0 if faster else 3.0
    torch.manual_seed(0)
    exact = Two().half().double()
    model = Two().half()
    model.load_state_dict(exact.state_dict())
    x = inputs(16)[0]
    wide = x.double().requires_grad_()
    x.requires_grad_()
    z = torch.compile(model, backend="fusedseg", options={"codegen": "aten"})(x)
    dz = torch.randn_like(z)
    z.backward(dz)
    expected = exact(wide)
    expected.backward(dz.double())
    assert_close(z, expected)
    assert_close(x.grad, wide.grad)
    for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad)
    # With both measurements for each of two convolutions, and in the end their calls.
    assert launched.count("forward") == launched.count("input gradient") == (4 if faster else 2)
