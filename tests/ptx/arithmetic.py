"""Translates the instructions that compute, each thread for itself."""

from .parse import Unsupported
from .values import KINDS, size_of, unsigned

# Instructions on fp32 and fp64 by the values of their operands.  Approximations are computed exactly and rounded.
FLOATS = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "{0} / {1}", "fma": "fma({0}, {1}, {2})",
    "neg": "-{0}", "abs": "absolute({0})", "sqrt": "sqrt({0})", "rcp": "(1.0 / {0}.astype(f8)).astype({kind})",
    "ex2": "exp2({0}.astype(f8)).astype({kind})", "rsqrt": "(1.0 / sqrt({0}.astype(f8))).astype({kind})",
    "lg2": "log2({0}.astype(f8)).astype({kind})", "min": "extreme(fmin, {0}, {1})", "max": "extreme(fmax, {0}, {1})",
}  # fmt: skip
NAN = {"min": "extreme(minimum, {0}, {1})", "max": "extreme(maximum, {0}, {1})"}
FLOAT_MODIFIERS = {"rn", "approx", "full", "ftz", "NaN", "f32", "f64"}
# Operations on integers that wrap around, signed or not; and operations for which the sign matters.
WRAPPING = {"add": "{0} + {1}", "sub": "{0} - {1}", "neg": "{kind}(0) - {0}", "mul.lo": "{0} * {1}",
            "mad.lo": "{0} * {1} + {2}"}  # fmt: skip
INTEGERS = {"mul.hi": "multiply_high({0}, {1}, {kind})", "div": "divide({0}, {1})", "rem": "remainder({0}, {1})",
            "min": "minimum({0}, {1})", "max": "maximum({0}, {1})", "abs": "absolute({0})"}  # fmt: skip
LOGIC = {"and": "&", "or": "|", "xor": "^"}
# Instructions whose operands have types of their own; an empty one is the type of the instruction.
OTHERS = {"shl": ("shift_left({0}, {1}, {kind})", ("", "u4")), "shr": ("shift_right({0}, {1}, {kind})", ("", "u4")),
          "bfe": ("field({0}, {1}, {2}, {kind})", ("", "u4", "u4")), "selp": ("where({2}, {0}, {1})", ("", "", "b")),
          "prmt": ("permute({0}, {1}, {2})", ("u4",) * 3), "shf": ("funnel({0}, {1}, {2})", ("u4",) * 3),
          "popc": ("ones({0})", ("u4",))}  # fmt: skip
COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


def compute(w, i) -> None:
    result, *sources = i.operands
    ptx = i.modifiers[-1]
    if ptx in ("f32", "f64"):
        floats(w, i, result, sources)
    elif ptx in ("f16", "bf16"):
        product_of_halves(w, i, result, sources)
    else:
        integers(w, i, result, sources)


def floats(w, i, result, sources) -> None:
    kind = KINDS[i.modifiers[-1]]
    if len(KINDS.keys() & set(i.modifiers)) > 1 or not set(i.modifiers) <= FLOAT_MODIFIERS:
        raise Unsupported("other modifiers")
    form = (NAN if "NaN" in i.modifiers else FLOATS)[i.op]
    given = w.given(sources, kind)
    if "ftz" in i.modifiers:
        form, given = f"flushed({form})", [f"flushed({value})" for value in given]
    w.assign(result, form.format(*given, kind=kind), kind, i.guard)


def product_of_halves(w, i, result, sources) -> None:
    """The product of two fp16 or bf16, which is exact in fp32, and rounded once."""
    *how, ptx = i.modifiers
    if i.op != "mul" or how not in ([], ["rn"]):
        raise Unsupported("only products of half precision")
    kind = KINDS[ptx]
    a, b = (f"to_float({ptx!r}, {value})" for value in w.given(sources, kind))
    w.assign(result, f"from_float({ptx!r}, {a} * {b})", kind, i.guard)


def integers(w, i, result, sources) -> None:
    *how, ptx = i.modifiers
    kind, name = KINDS[ptx], ".".join([i.op, *how])
    if ptx == "s16x2":
        a, b = (f"parts_of({w.array(source, kind)}, u2)" for source in sources)
        value = f"pack(n, u2, u4, *({WRAPPING[name].format(a, b)}))"
    elif name in ("mul.wide", "mad.wide"):
        wide = f"{kind[0]}{2 * size_of(kind)}"
        a, b = (f"{w.array(source, kind)}.astype({wide})" for source in sources[:2])
        value, kind = f"({a} * {b})", wide
        if name == "mad.wide":
            value, kind = f"{value}.view({unsigned(wide)}) + {w.value(sources[2], unsigned(wide))}", unsigned(wide)
    else:
        kind = unsigned(kind) if name in WRAPPING else kind
        form = WRAPPING.get(name) or INTEGERS[name]
        value = form.format(*w.given(sources, kind), kind=kind)
    w.assign(result, value, kind, i.guard)


def move(w, i) -> None:
    """mov: it also splits a number into parts, or joins parts."""
    result, source = i.operands
    kind = KINDS[i.modifiers[-1]]
    whole = unsigned(kind)
    if result.kind == "vector":
        part = f"u{size_of(kind) // len(result.value)}"
        name = w.temporary()
        w.emit(f"{name} = parts_of({w.array(source, whole)}, {part})")
        for k, target in enumerate(result.value):
            w.assign(target, f"{name}[{k}]", part, i.guard)
    elif source.kind == "vector":
        part = f"u{size_of(kind) // len(source.value)}"
        given = ", ".join(w.value(one, part) for one in source.value)
        w.assign(result, f"pack(n, {part}, {whole}, {given})", whole, i.guard)
    else:
        w.assign(result, w.array(source, kind), kind, i.guard)


def logic(w, i) -> None:
    result, *sources = i.operands
    kind = unsigned(KINDS[i.modifiers[-1]])
    values = [f"({value})" for value in w.given(sources, kind)]
    value = f"~{values[0]}" if i.op == "not" else f" {LOGIC[i.op]} ".join(values)
    w.assign(result, value, kind, i.guard)


def other(w, i) -> None:
    form, kinds = OTHERS[i.op]
    result, *sources = i.operands
    kind = KINDS[i.modifiers[-1]]
    if (i.op in ("prmt", "popc") and i.modifiers != ("b32",)) or (
        i.op == "shf" and i.modifiers != ("l", "wrap", "b32")
    ):
        raise Unsupported("other modifiers")
    given = [w.array(source, of or kind) for source, of in zip(sources, kinds, strict=True)]
    w.assign(result, form.format(*given, kind=kind), kind, i.guard)


def compare_pairs(w, i) -> None:
    """setp.gt.f16x2 and its like have one result for each half of a register."""
    *results, a, b = i.operands
    how, ptx = i.modifiers
    x, y = (f"to_float({ptx[:-2]!r}, parts_of({w.array(source, 'u4')}, u2))" for source in (a, b))
    name = w.temporary()
    w.emit(f"{name} = unordered({x}, {y})" if how == "nan" else f"{name} = {x} {COMPARE[how]} {y}")
    for k, result in enumerate(results):
        w.assign(result, f"{name}[{k}]", "b", i.guard)


def compare(w, i) -> None:
    if i.modifiers[-1] in ("f16x2", "bf16x2"):
        compare_pairs(w, i)
        return
    result, a, b = i.operands
    how, ptx = (m for m in i.modifiers if m != "ftz")
    kind, floating = KINDS[ptx], ptx in ("f16", "bf16", "f32", "f64")
    x, y = w.given((a, b), kind)
    if ptx in ("f16", "bf16"):
        x, y = f"to_float({ptx!r}, {x})", f"to_float({ptx!r}, {y})"
    if "ftz" in i.modifiers:
        x, y = f"flushed({x})", f"flushed({y})"
    if how in ("nan", "num") and floating:
        value = f"{'~' if how == 'num' else ''}unordered({x}, {y})"
    elif how[-1] == "u" and floating:
        value = f"(({x} {COMPARE[how[:-1]]} {y}) | unordered({x}, {y}))"
    else:
        value = f"({x} {COMPARE[how]} {y})"
        if how == "ne" and floating:
            value = f"({value} & ~unordered({x}, {y}))"
    w.assign(result, value, "b", i.guard)


def convert(w, i) -> None:
    result, *sources = i.operands
    *how, to, source = i.modifiers
    flush = "ftz" in how
    how = [m for m in how if m != "ftz"]
    kind = KINDS[to]
    if to in ("f16x2", "bf16x2") and how == ["rn"]:
        high, low = (f"from_float({to[:-2]!r}, {w.array(one, 'f4')})" for one in sources)
        w.assign(result, f"pack(n, u2, u4, {low}, {high})", kind, i.guard)
        return
    x = w.array(sources[0], KINDS[source])
    if source in ("f16", "bf16"):
        x = f"to_float({source!r}, {x})"
    if flush:
        x = f"flushed({x})"
    whole, from_whole = to[0] in "su", source[0] in "su"
    if whole and from_whole and not how:
        # The source's type says how to extend it.
        value = f"{x}.astype({KINDS[source][0]}{size_of(kind)}).view({kind})"
    elif whole and len(how) == 1:
        value = f"to_integer({x}, {how[0]!r}, {kind})"
    elif to in ("f16", "bf16") and how == ["rn"]:
        value = f"from_float({to!r}, {f'{x}.astype(f8)' if from_whole else x})"
    elif to in ("f32", "f64") and how in ([], ["rn"], ["rni"]):
        value = f"rint({x})" if how == ["rni"] else f"{x}.astype({kind})"
    else:
        raise Unsupported("a conversion of another kind")
    w.assign(result, f"flushed({value})" if flush and kind == "f4" else value, kind, i.guard)


HANDLERS = {
    **dict.fromkeys([*FLOATS, "mad", "rem"], compute), **dict.fromkeys([*LOGIC, "not"], logic),
    "mov": move, "cvta": move, **dict.fromkeys(OTHERS, other), "setp": compare, "cvt": convert,
}  # fmt: skip
