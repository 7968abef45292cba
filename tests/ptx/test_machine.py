"""The errors that the machine notices: races, accesses outside, and misaligned ones.

``test_kernels.py`` has the values that it computes: the tests of the kernels compare them with float64.
"""

import pytest
import torch

pytest.importorskip("triton")

from tests.ptx.memory import Misaligned, OutOfBounds
from tests.ptx.small import run

INTS = {"dtype": torch.int32}


WGMMA = """
	mov.b32 %r1, global_smem;
	mad.lo.s32 %r2, %r0, 4, %r1;
	mov.b32 %r3, 0x3C003C00;
	st.shared.b32 [%r2], %r3;
	{barrier}
	fence.proxy.async.shared::cta;
	mov.b64 %rd10, 0xC000000000000040;
	mov.b32 %r20, 0;
	mov.b32 %r21, 0;
	mov.b32 %r22, 0;
	mov.b32 %r23, 0;
	wgmma.fence.sync.aligned;
	wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {{%r20, %r21, %r22, %r23}}, %rd10, %rd10, 1, 1, 1, 0, 0;
	wgmma.commit_group.sync.aligned;
	{between}
	wgmma.wait_group.sync.aligned {groups};
	mad.wide.u32 %rd11, %r0, 4, %rd0;
	st.global.b32 [%rd11], %r20;
"""


@pytest.mark.parametrize(
    ("barrier", "between", "groups", "kinds"),
    [
        ("bar.sync 0;", "", 0, []),
        ("", "", 0, ["shared-race"]),
        ("bar.sync 0;", "st.shared.b32 [%r2], %r0;", 0, ["shared-race"]),
        ("bar.sync 0;", "", 1, ["shared-race"]),
    ],
    ids=["right", "no barrier", "written while it is read", "read while it is written"],
)
def test_products_of_four_warps(barrier, between, groups, kinds):
    """All elements are 1, and 16 of them are summed.

    The descriptor says: address 1024, rows of 32 bytes, and every 8 rows at the same place.
    """
    out = torch.zeros(128)
    found = run(WGMMA.format(barrier=barrier, between=between, groups=groups), out, threads=128)
    assert sorted({f.kind for f in found}) == kinds
    assert kinds or out.tolist() == [16.0] * 128


STORE = "	mad.wide.u32 %rd10, %r0, 4, %rd0;\n	st.global.b32 [%rd10], %r0;\n"


def test_an_access_outside():
    assert not run(STORE, torch.zeros(32, **INTS))
    with pytest.raises(OutOfBounds, match="a0"):
        run(STORE, torch.zeros(31, **INTS))
    both = torch.zeros(64, **INTS)
    # Another argument lies behind the end of the first one.
    with pytest.raises(OutOfBounds, match="a0"):
        run(STORE, both[:31], both[31:])
    shared = "	shl.b32 %r1, %r0, 2;\n	st.shared.b32 [%r1+{offset}], %r0;\n"
    run(shared.format(offset=1024))
    for offset in (1020, 1024 + 1024 - 31 * 4):
        with pytest.raises(OutOfBounds, match="shared memory"):
            run(shared.format(offset=offset))


def test_a_misaligned_access():
    code = "	mad.wide.u32 %rd10, %r0, 16, %rd0;\n	ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd10];\n"
    assert not run(code, torch.zeros(132))
    with pytest.raises(Misaligned):
        run(code, torch.zeros(132)[1:])


SHARE = """
	mov.b32 %r1, global_smem;
	shl.b32 %r2, %r0, 2;
	add.s32 %r3, %r1, %r2;
	st.shared.b32 [%r3], %r0;
	{barrier}
	xor.b32 %r4, %r2, {other};
	add.s32 %r5, %r1, %r4;
	ld.shared.b32 %r6, [%r5];
	mad.wide.u32 %rd10, %r0, 4, %rd0;
	st.global.b32 [%rd10], %r6;
"""


@pytest.mark.parametrize(
    ("barrier", "other", "kinds"),
    [
        ("bar.sync 0;", 128, []),
        ("", 128, ["shared-race"]),
        ("", 4, ["warp-hazard"]),
        ("bar.warp.sync -1;", 4, []),
        ("bar.warp.sync -1;", 128, ["shared-race"]),
        ("", 0, []),
        ("bar.sync 0;", 256, ["shared-uninit"]),
    ],
)
def test_races_in_shared_memory(barrier, other, kinds):
    found = run(SHARE.format(barrier=barrier, other=other), torch.zeros(64, **INTS), threads=64)
    assert [f.kind for f in found] == kinds


def test_shared_memory_with_the_suffix_of_the_cta():
    """Triton 3.8 writes ``st.shared::cta``, which the machine did not know."""
    code = SHARE.format(barrier="", other=128).replace(".shared.", ".shared::cta.")
    assert [f.kind for f in run(code, torch.zeros(64, **INTS), threads=64)] == ["shared-race"]


@pytest.mark.parametrize(("barrier", "kinds"), [("bar.sync 0;", set()), ("", {"shared-race"})])
def test_a_warp_that_writes_what_another_read(barrier, kinds):
    again = f"	{barrier}\n	add.s32 %r7, %r0, 1;\n	st.shared.b32 [%r3], %r7;\n"
    found = run(SHARE.format(barrier="bar.sync 0;", other=128) + again, torch.zeros(64, **INTS), threads=64)
    assert {f.kind for f in found} == kinds


def test_lanes_that_store_different_values_to_one_place():
    code = "	mov.b32 %r1, global_smem;\n	st.shared.b32 [%r1], {value};\n"
    assert [f.kind for f in run(code.format(value="%r0"))] == ["shared-race"]
    assert not run(code.format(value="7"))


@pytest.mark.parametrize(
    ("wait", "size", "kinds"),
    [
        ("cp.async.wait_group 0;", 16, []),
        ("", 16, ["shared-race"]),
        ("cp.async.wait_group 1;", 16, ["shared-race"]),
        ("cp.async.wait_group 0;", 0, []),
    ],
)
def test_an_asynchronous_copy(wait, size, kinds):
    code = f"""
	mov.b32 %r1, global_smem;
	shl.b32 %r2, %r0, 4;
	add.s32 %r3, %r1, %r2;
	mad.wide.u32 %rd10, %r0, 16, %rd0;
	cp.async.cg.shared.global [%r3], [%rd10], 0x10, {size};
	cp.async.commit_group;
	{wait}
	ld.shared.b32 %r6, [%r3];
	mad.wide.u32 %rd11, %r0, 4, %rd1;
	st.global.b32 [%rd11], %r6;
"""
    x, out = torch.arange(128, **INTS), torch.zeros(32, **INTS)
    assert sorted({f.kind for f in run(code, x, out)}) == kinds
    if not kinds:
        assert out.tolist() == (list(range(0, 128, 4)) if size else [0] * 32)


def test_two_ctas_that_write_to_one_place():
    code = "	mov.u32 %r1, %ctaid.x;\n	mad.wide.u32 %rd10, %r0, 4, %rd0;\n	st.global.b32 [%rd10], {value};\n"
    for value, kinds in (("%r1", {"global-race"}), ("%r0", set())):
        found = run(code.format(value=value), torch.full((32,), 77, **INTS), grid=(3, 1, 1))
        assert {f.kind for f in found} == kinds


def test_a_cta_that_reads_what_another_writes():
    code = """
	mov.u32 %r1, %ctaid.x;
	mad.wide.u32 %rd10, %r0, 4, %rd0;
	ld.global.b32 %r2, [%rd10];
	add.s32 %r2, %r2, 1;
	mad.lo.s32 %r3, %r1, 32, %r0;
	mad.wide.u32 %rd11, %r3, 4, %rd0;
	st.global.b32 [%rd11], %r2;
"""
    for grid, kinds in ((1, set()), (2, {"global-race"})):
        assert {f.kind for f in run(code, torch.zeros(64, **INTS), grid=(grid, 1, 1))} == kinds


def test_two_warps_that_touch_one_place():
    """One thread replaces a value that all threads read."""
    code = """
	ld.global.b32 %r1, [%rd0];
	{barrier}
	setp.eq.u32 %p1, %r0, 0;
	@%p1 st.global.b32 [%rd0], 5;
"""
    for barrier, kinds in (("bar.sync 0;", set()), ("", {"global-order"})):
        assert {f.kind for f in run(code.format(barrier=barrier), torch.zeros(1, **INTS), threads=64)} == kinds


def test_a_shuffle_by_a_part_of_a_warp():
    code = """
	setp.lt.u32 %p1, %r0, 7;
	@%p1 bra $L__BB0_1;
	bra.uni $L__BB0_2;
$L__BB0_1:
	shfl.sync.bfly.b32 %r1, %r0, 1, 31, -1;
$L__BB0_2:
"""
    with pytest.raises(RuntimeError, match="part of a warp"):
        run(code)


@pytest.mark.parametrize(("kind", "expected"), [("add.s32", 496), ("max.s32", 31), ("min.u32", 0), ("or.b32", 31)])
def test_a_reduction_over_a_warp(kind, expected):
    found = torch.zeros(32, **INTS)
    code = f"""
	mov.b32 %r2, -1;
	redux.sync.{kind} %r1, %r0, %r2;
	mad.wide.u32 %rd1, %r0, 4, %rd0;
	st.global.b32 [%rd1], %r1;
"""
    assert not run(code, found)
    assert found.tolist() == [expected] * 32
