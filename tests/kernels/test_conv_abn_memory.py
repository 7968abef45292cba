"""Bytes that the convolution with BatchNorm moves, and tensors beyond 2**31 elements, in the interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from fusedseg.ops.layout import layout_of
from tests import reference
from tests.kernels.conv_abn_cases import LEAKY, Conv
from tests.kernels.sampled import first_and_last, first_middle_last, sampled
from tests.reference import FORWARD_TOLERANCE, relative_error
from tests.tools.tensors import empty

CONV = "conv_abn_fwd_kernel"
pytestmark = pytest.mark.usefixtures("only_in_the_interpreter")


class Forward:
    """Runs a launcher with a few programs of each launch, and counts the bytes that they move."""

    def __init__(self, conv, x, w, out, choose, training) -> None:
        from fusedseg.kernels.conv_abn import conv_abn_fwd

        self.out, K = out, w.shape[0]
        self.weight, self.bias = torch.linspace(0.6, 1.4, K), torch.linspace(-0.5, 0.5, K)
        self.running = torch.linspace(-1, 1, K), torch.linspace(0.5, 2, K)
        with sampled(choose) as (self.moved, self.shares):
            conv_abn_fwd(
                x, w, out, layout_of(x), layout_of(out), conv.geometry, None, self.weight, self.bias, *self.running,
                training, 0.1, 1e-5, LEAKY, None, False,
            )  # fmt: skip

    def passes(self, nbytes, kernel) -> float:
        """Bytes in units of ``out``, extrapolated from the programs that ran to all programs."""
        return float(nbytes * self.shares[kernel] / self.out.nbytes)


@pytest.fixture(params=[True, False], ids=["rows", "planes"])
def stage(request, monkeypatch, replanned):
    """A stage of a U-Net of 64 MiB in fp16, or 96 MiB in rows: its convolution reads x and writes y once.

    The number of multiprocessors divides the tiles evenly, so all programs of a launch do the same work.
    """
    from fusedseg.kernels import conv as blocks
    from fusedseg.kernels import launch

    for module in (blocks, launch):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 128)
    conv = Conv((8, 64, 384 if request.param else 256, 256), (64, 64, 1, 1))
    x, out = (empty(conv.x, torch.float16, request.param).zero_() for _ in range(2))
    return conv, x, torch.zeros(conv.w, dtype=torch.float16), out, first_middle_last


@pytest.mark.usefixtures("counted_once")
def test_training_reads_and_writes_y_once_more(stage, record_property):
    """The convolution writes y and partial results; one launch merges them, and one reads y and writes z over y."""
    step = Forward(*stage, training=True)
    moved = step.moved
    assert moved.launches == [CONV, "norm_merge_kernel", "norm_act_fwd_apply_kernel"]
    assert step.passes(moved.loaded(CONV, "x_ptr"), CONV) == 1
    assert step.passes(moved.stored(CONV, "out_ptr"), CONV) == 1
    more = step.passes(moved.loaded(CONV, "partial_ptr") + moved.stored(CONV, "partial_ptr"), CONV)
    for kernel in moved.launches[1:]:
        more += step.passes(moved.loaded(kernel) + moved.stored(kernel), kernel)
    record_property("passes beyond the convolution", more)
    # Besides y: each program writes 768 bytes of partial results (rows have 1024 programs of 4 tiles each).  One launch
    # reads and merges them, and all programs that normalise read the merged result.
    assert 2 <= more <= 2.04


@pytest.mark.usefixtures("counted_once")
def test_inference_is_the_convolution_alone(stage, record_property):
    step = Forward(*stage, training=False)
    moved = step.moved
    assert moved.launches == [CONV]
    assert step.passes(moved.loaded(CONV, "x_ptr"), CONV) == 1
    assert step.passes(moved.stored(CONV, "out_ptr"), CONV) == 1
    more = step.passes(moved.total, CONV) - step.passes(moved.loaded(CONV, "w_ptr"), CONV) - 2
    record_property("passes beyond the convolution", more)
    # 0.02 covers the 5 parameters of a channel, which every program loads.
    assert 0 < more <= 0.02


# All cases are bf16 and have more than 2**31 elements.
LARGE = {
    # x and out are large because of many groups.
    "rows-groups": (Conv((9, 1048576, 16, 16), (1048576, 16, 1, 3), padding=(0, 1), groups=65536), True),
    "planes-groups": (Conv((9, 1048576, 16, 16), (1048576, 16, 1, 1), groups=65536), False),
    # Only out is large.
    "rows-out": (Conv((9, 3, 16, 16), (1048576, 3, 1, 1)), True),
    # The channels of one sample pass 2**31 elements.
    "planes-one-sample": (Conv((1, 33, 8192, 8200), (33, 33, 1, 1)), False),
    "planes-one-sample-3x3": (Conv((1, 33, 8192, 8200), (3, 33, 3, 3), padding=1), False),
    # The taps of one position pass 2**31 elements.
    "rows-taps": (Conv((1, 64, 5, 4096, 4104), (3, 64, 3, 1, 1), dilation=(2, 1, 1)), True),
    # The number of positions fits in 32 bits, but not after it is rounded up to a whole tile.
    "positions-just-below": (Conv((1, 1, 2**31 - 5, 1), (1, 1, 1, 1)), False),
    "positions-just-below-3x1": (Conv((1, 1, 2**31 - 5, 1), (1, 1, 3, 1), padding=(1, 0)), True),
    "positions": (Conv((2, 1, 2**30 + 4096, 1), (1, 1, 1, 1)), False),
    "positions-3x1": (Conv((2, 1, 2**30 + 4096, 1), (1, 1, 3, 1), padding=(1, 0)), True),
    "positions-one-sample": (Conv((1, 1, 2**31 + 4096, 1), (1, 1, 1, 1)), True),
    "positions-one-sample-3x1": (Conv((1, 1, 2**31 + 4096, 1), (1, 1, 3, 1), padding=(1, 0)), False),
}


@pytest.mark.parametrize(("conv", "rows"), LARGE.values(), ids=LARGE)
def test_beyond_two_to_the_31_elements(conv, rows, monkeypatch, replanned, request):
    """The first and last programs compute the right first and last channels, and no access leaves the tensors."""
    from fusedseg.kernels.launch import DEFAULT_SMS

    from fusedseg.kernels import conv as blocks

    # Each program has one tile.  A GPU runs at most 65,535 programs along y, and its compiler relies on it.
    compiled = request.config.getoption("--ptx")
    monkeypatch.setattr(blocks, "PROGRAMS_PER_SM", 65535 // DEFAULT_SMS if compiled else 2**20)
    K, C, *_ = conv.w
    height, width = conv.x[-2:]
    # This number of image rows holds 64 positions and their neighbours, which all lie in one tile.
    height = min(height, max(16, 128 // width))
    x, out = (empty(shape, torch.bfloat16, rows) for shape in (conv.x, conv.out))
    w = empty(conv.w, torch.bfloat16, True)
    assert max(x.numel(), out.numel()) > 2**31 - 128
    ends = [
        (x[:1, :C, ..., :height, :], w[:1], out[0, 0].flatten()[:64], slice(0, 1)),
        (x[-1:, -C:, ..., -height:, :], w[-1:], out[-1, -1].flatten()[-64:], slice(K - 1, K)),
    ]
    for part, taps, *_ in ends:
        part.copy_(torch.randn(part.shape))
        taps.copy_(torch.randn(taps.shape))
    step = Forward(conv, x, w, out, first_and_last, training=False)

    for (part, taps, found, k), position in zip(ends, (slice(64), slice(-64, None)), strict=True):
        y = reference.convolve(part, taps, None, *conv[2:5])
        affine = (v[k] for v in (step.weight, step.bias, *step.running))
        expected = reference.norm_act(y, *affine, training=False).out.flatten()[position]
        assert relative_error(found, expected) <= FORWARD_TOLERANCE[out.dtype]
