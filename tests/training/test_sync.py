"""Compares synchronised modules in several processes with local modules on the joint batch; tests ``convert_sync``."""

import copy
import functools
import pickle
import warnings

import pytest
import torch
from torch import nn

import fusedseg
from fusedseg.nn import sync
from tests.tools.ranks import on_ranks
from tests.training import jobs

# The module, batch sizes, spatial sizes, channels_last or not, with a residual or not, and options.
CASES = {
    "two, channels_last": ("InPlaceABN", (2, 2), (4, 3), True, False, {}),
    "residual": ("InPlaceABN", (1, 2), (4, 3), False, True, {}),
    "uneven": ("InPlaceABN", (1, 3), (5,), False, False, {}),
    "three, one of them empty": ("InPlaceABN", (2, 0, 1), (3, 3), False, False, {}),
    "one value a channel each": ("InPlaceABN", (1, 1), (), False, False, {}),
    "3D, elu": ("InPlaceABN", (2, 1), (2, 3, 4), False, False, {"activation": "elu", "activation_param": 1.2}),
    "cumulative": ("InPlaceABN", (2, 1), (3,), False, False, {"momentum": None}),
    "large, channels_last": ("InPlaceABN", (2, 1), (160, 150), True, False, {}),
    "exact, channels_last, residual": ("BatchNormAct", (1, 2), (4, 3), True, True, {"activation": "silu"}),
    "exact, three, one of them empty": ("BatchNormAct", (2, 0, 1), (3, 3), False, True, {"activation": "relu"}),
    "exact, identity": ("BatchNormAct", (1, 2), (3,), False, True, {"activation": "identity", "momentum": None}),
    "exact, prelu": ("BatchNormAct", (2, 1), (2, 3, 4), False, True, {"activation": "prelu", "num_slopes": 5}),
    "exact, large": ("BatchNormAct", (1, 3), (160, 150), False, False, {"activation": "leaky_relu"}),
    "convolution": ("ConvABN2d", (1, 2), (5, 4), False, False, {"padding": 1}),
    "convolution, three, one of them empty": ("ConvABN2d", (2, 0, 1), (5, 4), True, False, {"bias": False}),
    "convolution, 3D": ("ConvABN3d", (1, 2), (4, 3, 4), False, False, {}),
}


def check_as_joint(results, expected):
    close = {"rtol": 1e-12, "atol": 1e-12}
    for name, exact in expected["of_batch"].items():
        torch.testing.assert_close(torch.cat([r["of_batch"][name] for r in results]), exact, **close)
    for name, exact in expected["grads"].items():
        torch.testing.assert_close(sum(r["grads"][name] for r in results), exact, **close)
    for r in results:
        torch.testing.assert_close(r["buffers"], expected["buffers"], **close)
        # Every process has the same bits.
        torch.testing.assert_close(r["buffers"], results[0]["buffers"], rtol=0, atol=0)


# How a step is run, and the cases that run so.
WAYS = {
    "eager": CASES,
    # The forward with its collective runs twice on every process, and the running statistics move once.
    "checkpoint": ("residual", "three, one of them empty", "exact, prelu"),
    "aot_eager": ("residual", "exact, three, one of them empty"),
}


@functools.cache
def results(world, way):
    """The results of each process for each case of a way with this number of processes."""
    cases = [case for case in WAYS[way] if len(CASES[case][1]) == world]
    found = on_ranks(world, jobs.each, jobs.sync_step, [(*CASES[case], way) for case in cases])
    return dict(zip(cases, zip(*found, strict=True), strict=True))


@pytest.mark.parametrize(("case", "way"), [(case, way) for way, cases in WAYS.items() for case in cases])
def test_as_one_process(case, way):
    name, sizes, spatial, channels_last, residual, options = CASES[case]
    x, dz = jobs.joint(sizes, spatial, channels_last=channels_last)
    expected = jobs.step(jobs.module(name, **options), x, dz, residual)
    check_as_joint(results(len(sizes), way)[case], expected)


@pytest.mark.parametrize("name", ["InPlaceABN", "BatchNormAct"])
def test_alone_warns_once_and_is_local(name):
    sync._warn_alone.cache_clear()
    made, local = fusedseg.convert_sync(jobs.module(name)), jobs.module(name)
    x = torch.randn(3, jobs.CHANNELS, 4, dtype=torch.float64)
    with pytest.warns(UserWarning, match="torch.distributed is not initialised") as warned:
        z = made(x.clone())
    # The warning points to the caller of the module.
    assert warned[0].filename == __file__
    torch.testing.assert_close(z, local(x.clone()))
    # A second warning would be an error.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made(x.clone())
    local(x.clone())
    # Eval mode takes no batch statistics, so it synchronises nothing.
    torch.testing.assert_close(made.eval()(x.clone()), local.eval()(x.clone()))


def test_convert_sync_keeps_what_is_there():
    net = nn.Sequential(
        fusedseg.ConvABN2d(2, 4, 3), fusedseg.InPlaceABN(4), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4),
        fusedseg.BatchNormAct(4, activation="prelu"),
    )  # fmt: skip
    seen = []
    net[1].register_forward_hook(lambda *_: seen.append(1))
    net[1].weight.requires_grad_(False)
    net.eval()
    before, modules = copy.deepcopy(net.state_dict()), list(net.modules())
    x = torch.randn(1, 2, 6, 6)
    expected = net(x)
    assert fusedseg.convert_sync(net) is net
    assert list(net.modules()) == modules
    assert [type(m) for m in (net[0].norm, net[1], *net[3:])] == [
        fusedseg.InPlaceABNSync, fusedseg.InPlaceABNSync, nn.SyncBatchNorm, fusedseg.BatchNormActSync,
    ]  # fmt: skip
    torch.testing.assert_close(net.state_dict(), before)
    assert not net[1].weight.requires_grad
    assert not net[1].training
    torch.testing.assert_close(net(x), expected)
    assert len(seen) == 2
    # A second conversion changes nothing, and a pickled copy computes the same.
    fusedseg.convert_sync(net)
    torch.testing.assert_close(pickle.loads(pickle.dumps(net[0]))(x), net[0](x))
    with pytest.raises(TypeError, match=r"convert_sync: model must be an nn.Module, got str"):
        fusedseg.convert_sync("net")


def test_converted_network_is_synchronised():
    """``convert_sync`` replaces the norms of a converted block, which then runs its stock forward."""
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.PReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.LeakyReLU(0.1)
    )
    x = torch.randn(2, 2, 8, 8)
    fusedseg.convert(net)
    expected = net.eval()(x)
    fusedseg.convert_sync(net)
    assert sum(isinstance(module, nn.SyncBatchNorm) for module in net) == 2
    torch.testing.assert_close(net(x), expected)
