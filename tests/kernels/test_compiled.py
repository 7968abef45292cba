"""Errors that only compiled code can have: run with ``--ptx sm_80``, ``--ptx sm_90`` or ``--device cuda``.

Such errors depend on vectors at unaligned addresses, or on the order of warps, programs and lanes.
"""

import pytest
import torch

pytest.importorskip("triton")

from fusedseg.ops.layout import layout_of
from tests import reference
from tests.kernels import conv_abn_cases as convs
from tests.kernels import test_concat as concats
from tests.kernels import test_max_pool as pools
from tests.kernels import test_norm_act as norms
from tests.kernels.conv_abn_cases import Conv, cut_off
from tests.kernels.test_sanitize import SHAPE, STATISTICS, by_statistics
from tests.reference import FORWARD_TOLERANCE, relative_error
from tests.tools.marks import by_layout
from tests.tools.tensors import placed

pytestmark = pytest.mark.compiled
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def apart(given, offset):
    return [None if t is None else placed(t, offset) for t in given]


# Each dtype runs with each of the other choices in turn.
@pytest.mark.usefixtures("poison")
@by_layout
@by_statistics
@pytest.mark.parametrize("path", ["onchip", "split"])
def test_addresses_and_dtypes(path, groups, rows, device, request):
    """All tensors begin one element after a multiple of 16 bytes."""
    if path == "split":
        request.getfixturevalue("small_tiles")
    number = 2 * list(STATISTICS.values()).index(groups) + rows + (path == "split")
    dtype, keep = DTYPES[number % 3], ("output", "input")[number // 3 % 2]
    norms.check(*apart(norms.inputs(SHAPE, rows, dtype, device), 1), groups, keep=keep)


@pytest.mark.usefixtures("poison")
@by_layout
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_max_pool_at_an_odd_address(dtype, rows, device, monkeypatch):
    launch = pools.launch
    monkeypatch.setattr(pools, "launch", lambda x, shape, dz, *rest: launch(placed(x, 1), shape, placed(dz, 1), *rest))
    case = pools.CASES["odd"]
    pools.check(torch.randn(case[0]).to(dtype), case, rows, device)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_concat_at_an_odd_address(dtype, device, monkeypatch):
    launch = concats.launch
    monkeypatch.setattr(
        concats,
        "launch",
        lambda sources, pitches, y: launch([placed(x, 1) for x in sources], pitches, placed(y, 1)),
    )
    concats.check(*concats.CASES["two"], device, dtype)


@by_layout
@pytest.mark.parametrize(("dtype", "tf32"), [(dtype, False) for dtype in DTYPES] + [(torch.float32, True)], ids=str)
def test_convolution_at_an_odd_address(dtype, tf32, rows, device):
    conv = Conv((2, 20, 7, 6), (12, 20, 3, 3), padding=1)
    given = convs.Inputs(*apart(convs.inputs(conv, dtype, device, rows), 1))
    out = placed(convs.output(conv, dtype, device, rows), 1)
    convs.check(conv, given, out, running=convs.running_statistics(conv, device), tf32=tf32)


@by_layout
def test_tf32_loses_what_is_cut_off_and_nothing_else(rows, device):
    """Each operand loses 3.5e-4 of its size on average, so sums lose 7e-4.

    A mean that is small beside its values may lose more: 1.02e-3 in ``test_configuration`` with 7 channels.
    """
    from fusedseg.kernels.conv_abn import launch_conv

    if device.type == "cuda":
        pytest.skip("a tensor core also cuts off in its sums, in an order that is not documented")
    conv = Conv((2, 64, 9, 8), (32, 64, 3, 3), padding=1)
    given = convs.inputs(conv, torch.float32, device, rows)
    exact, expected = (
        reference.convolve(*operands, None, *conv[2:])
        for operands in ((given.x, given.w), (cut_off(given.x), cut_off(given.w)))
    )
    out = convs.output(conv, torch.float32, device, rows)
    launch_conv(given.x, given.w, out, layout_of(given.x), layout_of(out), conv.geometry, "none", True)
    assert relative_error(out, expected) <= FORWARD_TOLERANCE[torch.float32]
    lost = 1 - (out * exact).sum() / exact.square().sum()
    assert 6e-4 <= lost <= 8e-4


SHAPES = {
    "small": ((3, 6, 7, 9), (None, 6, 2)),
    "split-planes": ((9, 2, 65, 65), (None,)),
    "tiny": ((3, 7, 2, 2), (7,)),
}


@by_layout
@pytest.mark.parametrize(
    ("shape", "groups"),
    [pytest.param(shape, of, id=f"{name}-{of}") for name, (shape, groups) in SHAPES.items() for of in groups],
)
@pytest.mark.parametrize("path", ["natural", "split"])
def test_z_rebuilt_is_z(shape, groups, rows, path, device, request):
    """The means of several lanes differed in the last bit and one lane stored its mean, so the rebuilt z was not z."""
    if path == "split":
        request.getfixturevalue("small_tiles")
    # `launch` compares the rebuilt z with z.
    norms.launch(*norms.inputs(shape, rows, torch.float32, device), groups, keep="input")


@pytest.fixture
def orders(request):
    """Iterates over the orders of warps for launches under ``--ptx``.

    A GPU has its own order, so the launch runs twice there.
    """
    plugin = request.config.pluginmanager.get_plugin("ptx")
    turns = ["together", "first", "last"] if plugin else [None, None]

    def each_order():
        for turn in turns:
            if plugin:
                plugin.driver.options.schedule = turn
            yield turn

    yield each_order
    if plugin:
        plugin.driver.options.schedule = turns[0]


@pytest.mark.usefixtures("small_tiles")
@by_layout
@by_statistics
def test_the_order_of_warps_does_not_matter(groups, rows, device, orders):
    """PTX does not specify which warp runs first."""
    given = norms.inputs((2, 6, 21, 23), rows, torch.float32, device)
    first, *others = (norms.launch(*given, groups) for _ in orders())
    for again in others:
        assert all(torch.equal(again[name], value) for name, value in first.items())


@pytest.mark.parametrize("path", ["onchip", "split"])
@by_layout
def test_one_thread_replaces_a_running_statistic(path, rows, device, orders, request):
    """If every warp stored it, a warp that comes later would read the new value and update it again."""
    if path == "split":
        request.getfixturevalue("small_tiles")
    x, dz, _, *affine = norms.inputs((4, 6, 21, 23), rows, torch.float32, device)
    for _ in orders():
        norms.check(x, dz, None, *affine, None, running=norms.start((4, 6), device))
