"""The machine's threads, its memory, and the errors that it notices."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.ptx.memory import Misaligned, OutOfBounds
from tests.ptx.small import run

INTS = {"dtype": torch.int32}


def test_divergence_and_a_loop():
    """Each thread counts to its own number; odd threads take another branch, and all threads meet at a barrier."""
    out = torch.zeros(64, **INTS)
    code = """
	mov.u32 %r1, 0;
	mov.u32 %r2, 0;
$L__BB0_1:
	setp.ge.u32 %p1, %r1, %r0;
	@%p1 bra $L__BB0_3;
	add.s32 %r2, %r2, %r1;
	add.s32 %r1, %r1, 1;
	bra.uni $L__BB0_1;
$L__BB0_3:
	and.b32 %r3, %r0, 1;
	setp.eq.b32 %p2, %r3, 0;
	@%p2 bra $L__BB0_5;
	add.s32 %r2, %r2, 1000;
$L__BB0_5:
	bar.sync 0;
	mad.wide.u32 %rd10, %r0, 4, %rd0;
	st.global.b32 [%rd10], %r2;
"""
    assert not run(code, out, threads=64)
    assert out.tolist() == [t * (t - 1) // 2 + 1000 * (t % 2) for t in range(64)]


def test_matrix_products():
    """ldmatrix loads A and B from shared memory in the layout of the fragments of mma.sync."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype(np.float16) for shape in ((16, 16), (16, 8)))
    out = torch.zeros(16, 8)
    code = """
	mov.b32 %r1, global_smem;
	shl.b32 %r2, %r0, 4;
	add.s32 %r3, %r1, %r2;
	mad.wide.u32 %rd10, %r0, 16, %rd0;
	ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%rd10];
	st.shared.v4.b32 [%r3], {%r4, %r5, %r6, %r7};
	setp.lt.u32 %p1, %r0, 16;
	mad.wide.u32 %rd11, %r0, 16, %rd1;
	@%p1 ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%rd11];
	@%p1 st.shared.v4.b32 [%r3+512], {%r4, %r5, %r6, %r7};
	bar.sync 0;
	and.b32 %r8, %r0, 15;
	shl.b32 %r9, %r8, 5;
	shr.u32 %r10, %r0, 4;
	shl.b32 %r11, %r10, 4;
	add.s32 %r12, %r9, %r11;
	add.s32 %r13, %r1, %r12;
	ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r20, %r21, %r22, %r23}, [%r13];
	shl.b32 %r14, %r8, 4;
	add.s32 %r15, %r1, %r14;
	ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%r24, %r25}, [%r15+512];
	mov.b32 %r30, 0;
	mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r31, %r32, %r33, %r34}, {%r20, %r21, %r22, %r23}, {%r24, %r25}, {%r30, %r30, %r30, %r30};
	shr.u32 %r16, %r0, 2;
	and.b32 %r17, %r0, 3;
	shl.b32 %r18, %r16, 3;
	shl.b32 %r19, %r17, 1;
	add.s32 %r18, %r18, %r19;
	mad.wide.u32 %rd12, %r18, 4, %rd2;
	st.global.v2.b32 [%rd12], {%r31, %r32};
	st.global.v2.b32 [%rd12+256], {%r33, %r34};
"""  # noqa: E501
    assert not run(code, torch.from_numpy(a), torch.from_numpy(b), out)
    assert np.allclose(out.numpy(), a.astype(np.float32) @ b.astype(np.float32), atol=1e-6)


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


def test_local_memory():
    """LLVM stores a vector of predicates by bytes and loads it as numbers; every thread has its own."""
    out = torch.zeros(32, **INTS)
    code = """
	.local .align 2 .b8 __local_depot0[2];
	.reg .b64 %SP;
	.reg .b32 %SPL;
	mov.b32 %SPL, __local_depot0;
	cvt.u64.u32 %SP, %SPL;
	cvta.local.u64 %SP, %SP;
	cvt.u16.u32 %rs1, %r0;
	st.b8 [%SP], %rs1;
	st.b8 [%SP+1], 1;
	ld.b16 %rs2, [%SP];
	cvt.u32.u16 %r1, %rs2;
"""
    assert not run(code + STORE.replace("], %r0", "], %r1"), out)
    assert out.tolist() == [t + 256 for t in range(32)]


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


@pytest.mark.parametrize("schedule", ["together", "first", "last"])
def test_schedules(schedule):
    """Warps exchange data through shared memory, and the order of the warps does not matter."""
    out = torch.zeros(128, **INTS)
    assert not run(SHARE.format(barrier="bar.sync 0;", other=384), out, threads=128, schedule=schedule)
    assert out.tolist() == [t ^ 96 for t in range(128)]


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


def test_shuffles():
    out = torch.zeros(32, **INTS)
    code = "	shfl.sync.{kind}.b32 %r1, %r0, {by}, 31, -1;\n" + STORE.replace("], %r0", "], %r1")
    for kind, by, expected in (
        ("bfly", 4, [t ^ 4 for t in range(32)]),
        ("idx", 3, [3] * 32),
    ):
        assert not run(code.format(kind=kind, by=by), out)
        assert out.tolist() == expected
