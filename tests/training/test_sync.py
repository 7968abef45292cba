"""InPlaceABNSync over several processes against InPlaceABN over their joint batch; and ``convert_sync``."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

import fusedseg
from tests.tools.ranks import on_ranks
from tests.training import jobs

CASES = {
    "two": ((2, 2), (4, 3), False, {}),
    "two, channels_last": ((2, 2), (4, 3), True, {}),
    "uneven": ((1, 3), (5,), False, {}),
    "three, one of them empty": ((2, 0, 1), (3, 3), False, {}),
    "one value a channel each": ((1, 1), (), False, {}),
    "3D, elu": ((2, 1), (2, 3, 4), False, {"activation": "elu", "activation_param": 1.2}),
    "cumulative": ((2, 1), (3,), False, {"momentum": None}),
    "large": ((1, 2), (160, 150), False, {}),
    "large, channels_last": ((2, 1), (160, 150), True, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_as_one_process(case):
    sizes, spatial, channels_last, options = CASES[case]
    x, dz = jobs.joint(sizes, spatial, channels_last=channels_last)
    expected = jobs.step(jobs.norm(fusedseg.InPlaceABN, **options), x, dz)
    results = on_ranks(len(sizes), jobs.sync_step, sizes, spatial, channels_last, options)
    close = {"rtol": 1e-12, "atol": 1e-12}
    for name in ("z", "dx"):
        torch.testing.assert_close(torch.cat([r[name] for r in results]), expected[name], **close)
    for name in ("dweight", "dbias"):
        torch.testing.assert_close(sum(r[name] for r in results), expected[name], **close)
    for r in results:
        for name in ("running_mean", "running_var", "batches"):
            torch.testing.assert_close(r[name], expected[name], **close)
            # the same bits on every process
            assert torch.equal(r[name], results[0][name])


def test_alone_warns_once_and_is_local():
    from fusedseg.nn import inplace_abn_sync

    inplace_abn_sync._warn_alone.cache_clear()
    made, local = (jobs.norm(cls) for cls in (fusedseg.InPlaceABNSync, fusedseg.InPlaceABN))
    x = torch.randn(3, jobs.CHANNELS, 4, dtype=torch.float64)
    with pytest.warns(UserWarning, match="torch.distributed is not initialised"):
        z = made(x.clone())
    torch.testing.assert_close(z, local(x.clone()))
    # an error if it warned again: the tests are run with warnings as errors too
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made(x.clone())
    local(x.clone())
    # no statistics of a batch, nothing to synchronise
    torch.testing.assert_close(made.eval()(x.clone()), local.eval()(x.clone()))


def test_convert_sync_keeps_what_is_there():
    net = nn.Sequential(fusedseg.ConvABN2d(2, 4, 3), fusedseg.InPlaceABN(4), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
    seen = []
    net[1].register_forward_hook(lambda *_: seen.append(1))
    net[1].weight.requires_grad_(False)
    net.eval()
    before, modules = copy.deepcopy(net.state_dict()), list(net.modules())
    x = torch.randn(1, 2, 6, 6)
    expected = net(x)
    assert fusedseg.convert_sync(net) is net
    assert list(net.modules()) == modules
    assert [type(m) for m in (net[0].norm, net[1], net[3])] == [
        fusedseg.InPlaceABNSync, fusedseg.InPlaceABNSync, nn.SyncBatchNorm,
    ]  # fmt: skip
    torch.testing.assert_close(net.state_dict(), before)
    assert not net[1].weight.requires_grad
    assert not net[1].training
    torch.testing.assert_close(net(x), expected)
    assert len(seen) == 2
    # again, and a copy of it, are the same
    fusedseg.convert_sync(net)
    torch.testing.assert_close(pickle.loads(pickle.dumps(net[0]))(x), net[0](x))
    with pytest.raises(TypeError, match=r"convert_sync: model must be an nn.Module, got str"):
        fusedseg.convert_sync("net")
