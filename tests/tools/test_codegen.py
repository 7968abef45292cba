"""Tests the reader of compiled code on lines that Triton 3.6 and 3.9 have written."""

import pytest

from tests.tools.codegen import access, pointer_origins, type_bytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("<4 x i32>", 16), ("<8 x half>", 16), ("i16", 2), ("bfloat", 2), ("v4i32", 16), ("f32", 4), ("v2f64", 16)],
)
def test_type_bytes(text, nbytes):
    assert type_bytes(text) == nbytes


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "%129 = tail call { i32, i32, i32, i32 } asm sideeffect "
            '"@$9 ld.global.v4.b32 { $0, $1, $2, $3 }, [ $8 + 0 ];", "=r,=r,=r,=r,0,1,2,3,l,b"'
            "(i32 0, i32 0, i32 0, i32 0, ptr addrspace(1) %127, i1 %125) #5",
            ("load", 16, "%127"),
        ),
        (
            'tail call void asm sideeffect "@$2 st.global.b32 [ $1 + 0 ], { $0 };", "r,l,b"(i32 %78, '
            "ptr addrspace(1) %75, i1 %79) #5",
            ("store", 4, "%75"),
        ),
        # Accesses with an eviction policy.
        (
            'tail call void asm sideeffect "st.global.L1::evict_first.L2::cache_hint.v4.b32 [ $4 + 0 ], '
            '{ $0, $1, $2, $3 }, $5;", "r,r,r,r,l,l"(i32 %1, i32 %2, i32 %3, i32 %4, '
            "ptr addrspace(1) %186, i64 %264) #5",
            ("store", 16, "%186"),
        ),
        (
            "%153 = tail call <4 x i32> @llvm.amdgcn.raw.ptr.buffer.load.v4i32(ptr addrspace(8) %123, i32 %152, i32 0)",
            ("load", 16, "%123"),
        ),
        (
            "tail call void @llvm.amdgcn.raw.ptr.buffer.store.f32(float %65, ptr addrspace(8) %93, i32 %92, i32 0)",
            ("store", 4, "%93"),
        ),
        (
            'tail call void asm sideeffect "cp.async.cg.shared.global [ $0 + 0 ], [ $1 + 0 ], 0x10, $2;", "r,l,r"'
            "(ptr addrspace(3) %257, ptr addrspace(1) %251, i32 %258) #4, !dbg !53",
            ("load", 16, "%251"),
        ),
        ("%34 = load <8 x half>, ptr addrspace(1) %33, align 16", ("load", 16, "%33")),
        ("store <4 x float> %110, ptr addrspace(1) %9, align 16", ("store", 16, "%9")),
        # Accesses to shared memory, and to implicit arguments.
        ("store <4 x float> %110, ptr addrspace(3) @global_smem, align 16", None),
        ("%.sink.i = load i32, ptr addrspace(4) %22, align 4", None),
    ],
)
def test_access(line, expected):
    assert access(line) == expected


def test_an_address_is_traced_to_its_argument_through_a_loop_but_not_through_what_was_loaded():
    lines = [
        "  %5 = phi ptr addrspace(1) [ %0, %entry ], [ %7, %loop ]",
        "  %6 = load i32, ptr addrspace(1) %1, align 4",
        "  %7 = getelementptr half, ptr addrspace(1) %5, i32 %6",
    ]
    assert pointer_origins(lines, {"%0": "x_ptr", "%1": "slot_ptr"})["%7"] == {"x_ptr"}
