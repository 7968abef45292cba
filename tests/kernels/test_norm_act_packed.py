"""Norm kernels that write a packed copy in forward, and read codes in backward, in the interpreter or on a GPU.

Everything is compared bit for bit with the storage op on aten and with the norm kernels on whole tensors.
"""

import pytest
import torch

pytest.importorskip("triton")

from fusedseg.ops.layout import layout_of
from fusedseg.ops.low_bit import aten
from fusedseg.ops.low_bit.kink import kink_of
from tests.tools.tensors import channels_last
from tests.tools.traffic import traffic

LEAKY, IDENTITY = ("leaky_relu", 0.01), ("identity", 0.0)
EPS = 1e-5


@pytest.fixture
def split(monkeypatch, replanned):
    """No slab, and tiles of 512 values of fp32, so that a tile holds several groups and a plane several tiles."""
    from fusedseg.kernels import launch, norm_act, norm_act_bwd

    monkeypatch.setattr(norm_act, "ONCHIP_FWD", 0)
    monkeypatch.setattr(norm_act_bwd, "ONCHIP_BWD", 0)
    monkeypatch.setattr(launch, "TILE_BYTES", 2048)


class Step:
    """Forward with a packed copy, and backward from its codes, beside the same from whole tensors."""

    def __init__(self, shape, dtype, rows, bits, packs, device, groups=None, act=LEAKY) -> None:
        from fusedseg.kernels.norm_act import norm_act_fwd

        from tests.kernels.norm_packed_launches import codes_of

        x, self.dz = ((torch.randn(shape, device=device) + 0.3).to(dtype) for _ in range(2))
        if rows:
            x, self.dz = channels_last(x), channels_last(self.dz)
        wide = torch.promote_types(dtype, torch.float32)
        weight, bias = (
            torch.linspace(*ends, shape[1], dtype=wide, device=device) for ends in ((1.4, 0.6), (-0.5, 0.5))
        )
        weight[1::2] *= -1
        self.affine, self.layout, self.act = (weight, bias), layout_of(x).by_sample(shape[0], groups), act
        self.codes, lines = codes_of(x, self.layout, bits, packs)
        self.z, z = torch.empty_like(x), torch.empty_like(x)
        given = self.layout, weight, bias, None, None, True, 0.1, EPS, act, None
        with traffic() as self.forward:
            mean, self.rstd, _ = norm_act_fwd(x, self.z, *given, codes=self.codes, packs=packs)
        norm_act_fwd(x, z, *given)
        # With packed rows there is no slab, so statistics may be added up in another order.
        torch.testing.assert_close(self.z, z, **({} if rows else {"rtol": 0, "atol": 0}))
        self.mean = mean if packs == "input" else None
        kept, kink = (x, self.codes.kink) if packs == "input" else (self.z, None)
        if kink is not None:
            each = shape[0] * shape[1] // mean.numel() if groups else 1
            of_channels = (v.repeat_interleave(each) for v in (mean, self.rstd))
            assert torch.equal(kink, kink_of(*of_channels, weight, bias, x.shape))
        flat = kept.as_strided((kept.numel(),), (1,))
        expected = aten.pack(flat, lines, bits, self.codes.key, kink)
        for found, wanted in zip(self.codes[:3], expected, strict=True):
            assert torch.equal(found, wanted)
        self.unpacked = torch.empty_like(x)
        aten.unpack(expected, kink, lines, bits, self.unpacked.as_strided((x.numel(),), (1,)))

    def gradients(self, saved, dresidual=None, residual=None):
        from fusedseg.kernels.norm_act_bwd import norm_act_bwd

        return norm_act_bwd(
            self.dz, saved, self.layout, *self.affine, self.rstd, None, None, True, self.act, self.affine[0].dtype,
            mean=self.mean, residual=residual, dresidual=dresidual,
        )  # fmt: skip

    def check_backward(self):
        with traffic() as self.backward:
            found = self.gradients(self.codes)
        for got, wanted in zip(found, self.gradients(self.unpacked), strict=True):
            assert torch.equal(got, wanted)
        if self.mean is not None:
            with traffic() as self.again:
                found = self.rebuilt(self.codes)
            assert torch.equal(found, self.rebuilt(self.unpacked))

    def rebuilt(self, x, residual=None):
        """z from x or its codes.  Of the same x, a slab gives the bits of the tiles."""
        from fusedseg.kernels.norm_act import norm_act_rebuild

        z = torch.empty_like(self.z)
        norm_act_rebuild(x, z, self.layout, *self.affine, self.mean, self.rstd, self.act, residual)
        return z


@pytest.fixture(autouse=True)
def only_on_a_cpu(device):
    if device.type != "cpu":
        pytest.skip("compares bits with aten on a CPU; the self-test compares on a GPU")


# A group of 256 positions and a shorter one; planes of one group; a slab with a plane that does not exist; several
# planes in a slab; a volume.
CASES = {
    "batch": ((2, 4, 13, 23), None), "instance": ((2, 4, 16, 32), 4), "group": ((2, 4, 16, 32), 2),
    "group-of-three": ((2, 6, 8, 32), 2), "small-planes": ((3, 5, 8, 9), None), "volume": ((1, 3, 5, 9, 11), None),
}  # fmt: skip
PACKS = pytest.mark.parametrize("packs", ["output", "input"])


@pytest.mark.usefixtures("poison")
@PACKS
@pytest.mark.parametrize("name", CASES)
def test_on_chip(name, packs, device):
    shape, groups = CASES[name]
    Step(shape, torch.float16, False, 4, packs, device, groups).check_backward()


@pytest.mark.usefixtures("poison", "split")
@PACKS
@pytest.mark.parametrize("name", CASES)
def test_split(name, packs, device):
    shape, groups = CASES[name]
    Step(shape, torch.float32, False, 8, packs, device, groups).check_backward()


@pytest.mark.usefixtures("poison", "split")
@PACKS
@pytest.mark.parametrize(
    ("dtype", "bits"), [(torch.bfloat16, 4), (torch.float16, 8), (torch.float64, 4), (torch.float32, 2)], ids=str
)
def test_dtypes_and_bits(dtype, bits, packs, device):
    Step((2, 3, 10, 33), dtype, False, bits, packs, device).check_backward()


@pytest.mark.usefixtures("poison")
@PACKS
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("groups", [None, 8], ids=["batch", "instance"])
def test_rows(groups, dtype, packs, device):
    """channels_last: forward writes codes; backward takes the unpacked tensor.  37 channels are no whole block."""
    Step((2, 37, 13, 11) if groups is None else (2, 8, 16, 32), dtype, True, 4, packs, device, groups)


@pytest.mark.usefixtures("poison", "split")
def test_residual(device):
    """The first launch of backward writes g, and the second reads it beside the codes."""
    step = Step((2, 3, 10, 33), torch.float32, False, 4, "input", device)
    residual = torch.randn_like(step.dz)
    grads = [torch.empty_like(residual) for _ in range(2)]
    both = [step.gradients(of, g, residual) for of, g in zip((step.codes, step.unpacked), grads, strict=True)]
    for got, wanted in zip(*both, strict=True):
        assert torch.equal(got, wanted)
    assert torch.equal(*grads)
    assert torch.equal(*(step.rebuilt(of, residual) for of in (step.codes, step.unpacked)))


def passes(moved, step):
    """Bytes moved beside those of statistics, in units of the tensor, of each kernel."""
    return {
        name: (moved.loaded(name) + moved.stored(name)) / step.z.nbytes
        for name in dict.fromkeys(moved.launches)
        if name.startswith("norm_act")
    }


@pytest.fixture
def few_programs(monkeypatch, replanned):
    """So few that their parameters and partial results are small beside the tensor; and no slab."""
    from fusedseg.kernels import launch, norm_act, norm_act_bwd

    monkeypatch.setattr(launch, "multiprocessors", lambda device: 1)
    monkeypatch.setattr(norm_act, "ONCHIP_FWD", 0)
    monkeypatch.setattr(norm_act_bwd, "ONCHIP_BWD", 0)


@pytest.mark.usefixtures("counted_once", "few_programs")
@PACKS
def test_traffic_split(packs, device, record_property):
    """4 bits of fp16: the copy is 0.258 of the tensor."""
    step = Step((2, 2, 128, 128), torch.float16, False, 4, packs, device)
    step.check_backward()
    found = passes(step.forward, step) | passes(step.backward, step)
    record_property("passes", found)
    expected = {"fwd_apply": 2.258, "bwd_reduce": 1.258, "bwd_apply": 2.258}
    for name, count in expected.items():
        assert count - 0.001 <= found[f"norm_act_{name}_kernel"] <= count + 0.002
    if packs == "input":
        (again,) = passes(step.again, step).values()
        assert 1.257 <= again <= 1.26


@pytest.mark.usefixtures("counted_once")
@PACKS
def test_traffic_on_chip(packs, device, record_property):
    step = Step((2, 2, 64, 64), torch.float16, False, 4, packs, device)
    step.check_backward()
    found = passes(step.forward, step) | passes(step.backward, step)
    record_property("passes", found)
    assert 2.257 <= found["norm_act_fwd_onchip_kernel"] <= 2.28
    assert 2.257 <= found["norm_act_bwd_onchip_kernel"] <= 2.28


@pytest.mark.usefixtures("counted_once", "few_programs")
@PACKS
def test_traffic_of_rows(packs, device, record_property):
    step = Step((2, 16, 64, 64), torch.float16, True, 4, packs, device)
    found = passes(step.forward, step)
    record_property("passes", found)
    assert 2.257 <= found["norm_act_fwd_apply_kernel"] <= 2.28
