"""Compares the instructions that compute with plain Python or PyTorch."""

import math
import random
from fractions import Fraction

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.ptx.parse import Unsupported
from tests.ptx.small import each, run
from tests.ptx.values import from_float

RNG = random.Random(0)
WORDS = [0, 1, 2, 31, 32, 33, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x3F800000] + [RNG.getrandbits(32) for _ in range(54)]
OTHER = WORDS[::-1]
THIRD = [RNG.getrandbits(6) for _ in WORDS]
M32 = (1 << 32) - 1
FLOATS = [0.0, -0.0, 1.0, -1.5, 65504.0, 65520.0, 1e-8, 6e-8, 3.14, math.inf, -math.inf, math.nan, 1e-40, 3e38, 2051.0]
FLOATS += [RNG.uniform(-10, 10) * 10 ** RNG.randrange(-6, 6) for _ in range(49)]
FLOATS = np.array(FLOATS, np.float32)


def s32(v):
    return v - (1 << 32) if v >> 31 else v


def s16(v):
    v &= 0xFFFF
    return v - (1 << 16) if v >> 15 else v


def truncated(a, b):
    return math.trunc(Fraction(a, b))


INTEGERS = {
    "add.s32 %r19, %r10, %r11;": lambda a, b, c: a + b,
    "add.s16x2 %r19, %r10, %r11;": lambda a, b, c: (a + b) & 0xFFFF | ((a >> 16) + (b >> 16) & 0xFFFF) << 16,
    "sub.s32 %r19, %r10, %r11;": lambda a, b, c: a - b,
    "mul.lo.s32 %r19, %r10, %r11;": lambda a, b, c: a * b,
    "mul.hi.s32 %r19, %r10, %r11;": lambda a, b, c: s32(a) * s32(b) >> 32,
    "mul.hi.u32 %r19, %r10, %r11;": lambda a, b, c: a * b >> 32,
    "cvt.u16.u32 %rs1, %r10; mul.hi.u16 %rs2, %rs1, 21846; cvt.u32.u16 %r19, %rs2;":
        lambda a, b, c: (a & 0xFFFF) * 21846 >> 16,
    "cvt.u16.u32 %rs1, %r10; shl.b16 %rs4, %rs1, 3; cvt.u32.u16 %r19, %rs4;": lambda a, b, c: (a << 3) & 0xFFFF,
    "cvt.u16.u32 %rs1, %r10; shr.s16 %rs2, %rs1, 5; cvt.s32.s16 %r19, %rs2;": lambda a, b, c: s16(a) >> 5,
    "mul.wide.s32 %rd20, %r10, %r11; mul.hi.s64 %rd21, %rd20, %rd20; cvt.u32.u64 %r19, %rd21;":
        lambda a, b, c: (s32(a) * s32(b)) ** 2 >> 64,
    "mov.b64 %rd20, {%r10, %r11}; mov.b64 %rd21, {%r12, %r10}; mul.hi.u64 %rd22, %rd20, %rd21;"
    "cvt.u32.u64 %r19, %rd22;":
        lambda a, b, c: (b << 32 | a) * (a << 32 | c) >> 64,
    "cvt.u16.u32 %rs1, %r10; cvt.u16.u32 %rs2, %r11; setp.lt.s16 %p1, %rs1, %rs2; selp.b16 %rs3, -1, 7, %p1;"
    "cvt.u32.u16 %r19, %rs3;": lambda a, b, c: 0xFFFF if s16(a) < s16(b) else 7,
    "mad.lo.s32 %r19, %r10, %r11, %r12;": lambda a, b, c: a * b + c,
    "min.s32 %r19, %r10, %r11;": lambda a, b, c: min(s32(a), s32(b)),
    "max.u32 %r19, %r10, %r11;": lambda a, b, c: max(a, b),
    "div.s32 %r19, %r10, %r11;": lambda a, b, c: truncated(s32(a), s32(b)) if b else -1,
    "rem.s32 %r19, %r10, %r11;": lambda a, b, c: s32(a) - truncated(s32(a), s32(b)) * s32(b) if b else a,
    "div.u32 %r19, %r10, %r11;": lambda a, b, c: a // b if b else -1,
    "shl.b32 %r19, %r10, %r12;": lambda a, b, c: a << c if c < 32 else 0,
    "shr.u32 %r19, %r10, %r12;": lambda a, b, c: a >> c,
    "shr.s32 %r19, %r10, %r12;": lambda a, b, c: s32(a) >> c,
    "shr.s32 %r19, %r10, 31;": lambda a, b, c: s32(a) >> 31,
    "shf.l.wrap.b32 %r19, %r10, %r11, 5;": lambda a, b, c: b << 5 | a >> 27,
    "shf.l.wrap.b32 %r19, %r10, %r11, %r12;": lambda a, b, c: (b << 32 | a) << (c & 31) >> 32,
    "bfe.u32 %r19, %r10, 3, 5;": lambda a, b, c: a >> 3 & 31,
    "bfe.s32 %r19, %r10, 4, 1;": lambda a, b, c: -(a >> 4 & 1),
    "bfe.s32 %r19, %r10, 28, 8;": lambda a, b, c: s32(a) >> 28,
    "popc.b32 %r19, %r10;": lambda a, b, c: a.bit_count(),
    "prmt.b32 %r19, %r10, %r11, 0x5410U;": lambda a, b, c: a & 0xFFFF | (b & 0xFFFF) << 16,
    "prmt.b32 %r19, %r10, %r11, 0x7632U;": lambda a, b, c: a >> 16 | b >> 16 << 16,
    "prmt.b32 %r19, %r10, 0, 0x4140U;": lambda a, b, c: a & 255 | (a >> 8 & 255) << 16,
    "and.b32 %r1, %r10, %r11; xor.b32 %r19, %r1, 255;": lambda a, b, c: a & b ^ 255,
    "not.b32 %r19, %r10;": lambda a, b, c: ~a,
    "neg.s32 %r19, %r10;": lambda a, b, c: -a,
    "setp.lt.s32 %p1, %r10, %r11; selp.b32 %r19, 1, 2, %p1;": lambda a, b, c: 1 if s32(a) < s32(b) else 2,
    "setp.lt.u32 %p1, %r10, %r11; selp.b32 %r19, 1, 2, %p1;": lambda a, b, c: 1 if a < b else 2,
    "setp.ne.b32 %p1, %r10, 0; not.pred %p2, %p1; selp.b32 %r19, 1, 2, %p2;": lambda a, b, c: 1 if a == 0 else 2,
    "mov.b32 {%rs1, %rs2}, %r10; mov.b32 %r19, {%rs2, %rs1};": lambda a, b, c: a >> 16 | (a & 0xFFFF) << 16,
    "cvt.s64.s32 %rd20, %r10; shr.s64 %rd21, %rd20, 4; cvt.u32.u64 %r19, %rd21;": lambda a, b, c: s32(a) >> 4,
    "mul.wide.u32 %rd20, %r10, %r11; shr.u64 %rd21, %rd20, 32; cvt.u32.u64 %r19, %rd21;": lambda a, b, c: a * b >> 32,
    "mov.u32 %r19, 5; setp.gt.s32 %p1, %r10, %r11; @%p1 mov.u32 %r19, %r10; @!%p1 add.s32 %r19, %r19, 1;":
        lambda a, b, c: a if s32(a) > s32(b) else 6,
    "mov.b64 %rd20, {%r10, %r11}; add.s64 %rd21, %rd20, 1; mov.b64 {%r1, %r19}, %rd21;":
        lambda a, b, c: ((b << 32 | a) + 1) >> 32,
}  # fmt: skip


@pytest.mark.parametrize("code", INTEGERS)
def test_integers(code):
    found = each(code, *(np.array(v, np.uint32) for v in (WORDS, OTHER, THIRD)))
    assert found.tolist() == [INTEGERS[code](*v) & M32 for v in zip(WORDS, OTHER, THIRD, strict=True)]


def same(found, expected):
    """Asserts that all bits are equal; NaN may have any of its many forms."""
    found, expected = np.asarray(found), np.asarray(expected)
    nan = np.isnan(expected)
    assert (np.isnan(found) == nan).all()
    assert (found[~nan] == expected[~nan]).all()
    assert (np.signbit(found[~nan]) == np.signbit(expected[~nan])).all()


def test_rounding_to_whole_numbers():
    same(each("cvt.rni.f32.f32 %r19, %r10;", FLOATS).view(np.float32), np.rint(FLOATS))


def test_rounding_to_half_precision():
    """Rounding to fp16 and bf16 gives PyTorch's values."""
    values = torch.from_numpy(FLOATS)
    found = each("cvt.rn.f16.f32 %rs19, %r10;", FLOATS, out="b16").view(np.float16)
    same(found.astype(np.float32), values.half().float().numpy())
    found = each("cvt.rn.bf16.f32 %rs19, %r10;", FLOATS, out="b16").astype(np.uint32) << 16
    same(found.view(np.float32), values.bfloat16().float().numpy())
    both = each("cvt.rn.bf16x2.f32 %r19, %r10, %r11;", FLOATS, FLOATS[::-1])
    same((both & 0xFFFF0000).view(np.float32), values.bfloat16().float().numpy())
    same((both << 16).view(np.float32), values.bfloat16().float().numpy()[::-1])


def test_bfloat16_of_float64_is_rounded_once():
    tie = 1 + 2**-8
    assert from_float("bf16", np.array([tie + 2**-40, tie - 2**-40, tie])).tolist() == [0x3F81, 0x3F80, 0x3F80]


@np.errstate(all="ignore")
def fused(a, b):
    return np.float32(np.float64(a) * np.float64(b) + 1)


def truth(condition):
    return np.float32(condition)


CHOOSE = "selp.f32 %r19, 0f3F800000, 0f00000000, %p1;"
OPERATIONS = {
    "fma.rn.f32 %r19, %r10, %r11, 0f3F800000;": fused,
    "mul.f32 %r19, %r10, %r11;": lambda a, b: a * b,
    "div.full.f32 %r19, %r10, %r11;": lambda a, b: a / b,
    "sqrt.approx.ftz.f32 %r19, %r10;": lambda a, b: np.sqrt(a if abs(a) > 1e-38 or np.isnan(a) else a * 0),
    "mul.ftz.f32 %r19, %r10, 0f3F800000;": lambda a, b: a if not abs(a) < 2.0**-126 else np.copysign(np.float32(0), a),
    "min.NaN.f32 %r19, %r10, %r11;": lambda a, b: np.float32(torch.minimum(torch.tensor(a), torch.tensor(b)))
    if a != b else np.float32(math.copysign(abs(a), -1 if np.signbit(a) or np.signbit(b) else 1)) if a == 0 else a,
    "max.f32 %r19, %r10, %r11;": lambda a, b: np.fmax(a, b) if (a, b) != (0, 0) else np.float32(
        math.copysign(0, -1 if np.signbit(a) and np.signbit(b) else 1)),
    "neg.f32 %r19, %r10;": lambda a, b: -a,
    "abs.f32 %r19, %r10;": lambda a, b: np.abs(a),
    "setp.ne.f32 %p1, %r10, %r11; " + CHOOSE: lambda a, b: truth(a < b or a > b),
    "setp.neu.f32 %p1, %r10, %r11; " + CHOOSE: lambda a, b: truth(a != b),
    "setp.leu.f32 %p1, %r10, %r11; " + CHOOSE: lambda a, b: truth(not a > b),
    "setp.nan.f32 %p1, %r10, %r11; " + CHOOSE: lambda a, b: truth(np.isnan(a) or np.isnan(b)),
}  # fmt: skip


@pytest.mark.parametrize("code", OPERATIONS)
def test_floats(code):
    other = np.roll(FLOATS, -7)
    found = each(code, FLOATS, other).view(np.float32)
    with np.errstate(all="ignore"):
        same(found, np.array([OPERATIONS[code](a, b) for a, b in zip(FLOATS, other, strict=True)], np.float32))


def test_comparisons_of_pairs_have_two_results():
    a, b = (torch.from_numpy(v).half() for v in (FLOATS, np.roll(FLOATS, -3)))
    found = each("setp.gt.f16x2 %p1|%p2, %r10, %r11; selp.b32 %r1, 1, 0, %p1; selp.b32 %r2, 2, 0, %p2;"
                 "or.b32 %r19, %r1, %r2;", a.numpy(), b.numpy())  # fmt: skip
    low, high = (a > b).view(-1, 2).int().T
    assert found.tolist() == (low + 2 * high).tolist()


@np.errstate(all="ignore")
def test_conversions_between_numbers():
    found = each("cvt.rzi.s32.f32 %r19, %r10;", FLOATS).view(np.int32)
    for value, got in zip(FLOATS.tolist(), found.tolist(), strict=True):
        whole = 0 if math.isnan(value) else int(max(-(2.0**31), min(2.0**31 - 1, value)))
        assert got == whole
    words = np.array(WORDS, np.uint32)
    same(each("cvt.rn.f32.s32 %r19, %r10;", words).view(np.float32), words.view(np.int32).astype(np.float32))
    same(each("cvt.rn.f32.u32 %r19, %r10;", words).view(np.float32), words.astype(np.float32))


UNKNOWN = ("vote.sync.any.pred %p1, %p2, -1;", "add.sat.f32 %r1, %r2, %r3;", "mov.u32 %r1, %clock;")


@pytest.mark.parametrize("code", UNKNOWN)
def test_an_unknown_instruction_raises_with_its_text(code):
    with pytest.raises(Unsupported, match=code.split()[0]):
        run(f"	{code}\n")
