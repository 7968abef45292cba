"""The preset networks: their parameters, their kept bytes, and that every encoder learns."""

from functools import partial

import pytest
import torch

from fusedseg.memory.fake import eager_step, fake_inputs, fake_mode, fake_model
from fusedseg.memory.meter import measure
from fusedseg.unet import UNet, lidar_optical_unet, unet3d_large, unet3d_small
from tests.tools.marks import slow

VOLUME = [(2, 1, 320, 150, 26)]
IMAGES = [(8, 5, 256, 256), (8, 3, 256, 256)]
# (kept, peak) in MiB: an upper bound for our network, and the plain twin's figures within 1 %, as in the table "What it
# saves" in docs/networks.md.
FOOTPRINTS = {
    "3D large, fp16": (unet3d_large, VOLUME, torch.float16, (1615, 1930), (4076, 4686)),
    "3D small, fp16": (unet3d_small, VOLUME, torch.float16, (1700, 2015), (4616, 5225)),
    "two encoders, fp16": (lidar_optical_unet, IMAGES, torch.float16, (1146, 1270), (3212, 3468)),
    "two encoders, fp32": (lidar_optical_unet, IMAGES, torch.float32, (2290, 2540), (6184, 6696)),
}
# In fp32, every tensor has twice the bytes that it has in fp16; the large network is the small one with more channels;
# ``test_real_tensors_of_a_smaller_size`` has two encoders.
IMPLIED = ("two encoders, fp32", "3D large, fp16", "two encoders, fp16")


def footprint(build, shapes, dtype):
    """(kept, peak) of a training step in MiB, at full size, on tensors without values; inputs are in neither."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with fake_mode():
            inputs = [torch.empty(shape) for shape in shapes]
            found = measure(build(), *inputs, owned=inputs)
    finally:
        torch.set_default_dtype(before)
    return found.saved / 2**20, found.peak / 2**20


@pytest.mark.parametrize(("make", "count"), [(unet3d_large, 40_158_853), (unet3d_small, 14_496_517)])
def test_parameters(make, count):
    with fake_mode():
        assert sum(p.numel() for p in make().parameters()) == count


@pytest.mark.parametrize("name", slow(FOOTPRINTS, *IMPLIED))
def test_footprint(name, record_property):
    make, shapes, dtype, bounds, eager = FOOTPRINTS[name]
    ours, plain = footprint(make, shapes, dtype), footprint(partial(make, plain=True), shapes, dtype)
    record_property("MiB kept, peak", {"ours": ours, "plain": plain})
    print(f"\nours {ours[0]:.0f} kept, {ours[1]:.0f} peak; plain {plain[0]:.0f}, {plain[1]:.0f}")
    assert all(got <= most for got, most in zip(ours, bounds, strict=True))
    assert plain == pytest.approx(eager, rel=0.01)


# The first network keeps the least in eager mode: 5.01 times of ours, the others 5.40 and 5.47 times.
@pytest.mark.parametrize(
    ("make", "shapes"),
    [
        pytest.param(unet3d_large, VOLUME, id="3D large"),
        pytest.param(lidar_optical_unet, IMAGES, marks=pytest.mark.slow, id="two encoders"),
    ],
)
def test_under_autocast_they_keep_a_fifth_of_fp32(make, shapes):
    """Autocast's copies of the weights are not kept."""
    with fake_mode():
        inputs = fake_inputs(shapes, torch.float32)
        eager = eager_step(fake_model(partial(make, plain=True), torch.float32), inputs)
        ours = eager_step(fake_model(make, torch.float32), inputs, autocast=torch.float16)
    # In fp32 the first convolution keeps the input itself, and under autocast a copy, which is counted.
    kept = eager.saved + sum(tensor.nbytes for tensor in inputs)
    print(f"\n{kept / ours.saved:.2f} times less")
    assert kept >= 5 * ours.saved


def test_two_encoders_keep_less_than_the_plain_network_of_one():
    single = partial(UNet, 8, 3, bias=True, plain=True)
    kept, _ = footprint(single, [(8, 8, 256, 256)], torch.float16)
    assert kept == pytest.approx(1614, rel=0.01)
    (ours, _) = FOOTPRINTS["two encoders, fp16"][3]
    assert ours <= 0.75 * kept


@pytest.mark.parametrize(
    ("make", "shapes", "widths"),
    [
        (lidar_optical_unet, [(2, 5, 32, 32), (2, 3, 32, 32)], {"widths": (8, 16, 16)}),
        (unet3d_large, [(1, 1, 20, 10, 6)], {"widths": (4, 8, 8), "up_widths": (8, 4)}),
        (unet3d_small, [(1, 1, 20, 10, 6)], {"widths": (4, 8, 8), "up_widths": (8, 4)}),
    ],
    ids=["two encoders", "3D large", "3D small"],
)
def test_real_tensors_of_a_smaller_size(make, shapes, widths):
    """The network equals its plain twin in values and gradients, in every encoder, and keeps fewer bytes."""
    ours, plain = make(**widths).double(), make(**widths, plain=True).double()
    ours.load_stock_state_dict(plain.state_dict())
    images = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    target = torch.randint(3, (shapes[0][0], *shapes[0][2:]))
    results = []
    for net in (ours, plain):
        logits = net(*images)
        loss = torch.nn.functional.cross_entropy(logits, target)
        results.append([logits, *torch.autograd.grad(loss, list(net.parameters()))])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)
    # The first convolution of each encoder must get a gradient.
    gradients = dict(zip([name for name, _ in ours.named_parameters()], results[0][1:], strict=True))
    assert all(gradients[f"incs.{i}.0.conv.weight"].abs().sum() > 0 for i in range(len(shapes)))
    kept = [measure(net, *images).saved for net in (ours, plain)]
    # The ratio is 0.4 at full size; vectors of parameters and odd sizes have a larger share here.
    assert kept[0] < 0.5 * kept[1]
