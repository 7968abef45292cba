"""Translates the instructions that touch memory, or that several threads carry out together."""

import re

from .parse import Unsupported
from .values import KINDS, size_of, unsigned

# Cache policies do not change a value.
POLICIES = {"L1::evict_first", "L1::evict_last", "L1::evict_normal", "L1::no_allocate", "ca", "cg", "cs", "weak"}
# The object of a wave that serves a space, and the type of addresses there.
SPACES = {"global": ("W.memory", "u8"), "shared": ("W.shared", "u4"), "local": ("W.local", "u8")}
# mma.sync: the shape, and the types of D, A, B and C.
PRODUCTS = {
    ("m16n8k16", "row", "col", "f32", "f16", "f16", "f32"): "f16",
    ("m16n8k16", "row", "col", "f32", "bf16", "bf16", "f32"): "bf16",
    ("m16n8k8", "row", "col", "f32", "tf32", "tf32", "f32"): "tf32",
}


def guard_of(w, i) -> str:
    return "None" if i.guard is None else w.value(i.guard, "b")


def unguarded(i) -> None:
    if i.guard is not None:
        raise Unsupported("a guard")


def space_of(i) -> tuple[str, int, str]:
    """Returns the memory space of an access, the number of values that it moves, and their PTX type."""
    # Addresses that may lie in any space are those of local memory.
    space, *rest, kind = i.modifiers if len(i.modifiers) > 1 else ("local", *i.modifiers)
    count = 1
    for modifier in rest:
        if found := re.fullmatch(r"v([24])", modifier):
            count = int(found[1])
        elif modifier not in POLICIES:
            raise Unsupported(modifier)
    if space not in ("global", "shared", "local", "param"):
        raise Unsupported(space)
    return space, count, kind


def shared_bytes(i) -> int:
    """The bytes of a thread's access to shared memory; for other instructions 16, the most bytes of an access."""
    if i.op in ("ld", "st") and i.modifiers[0] == "shared":
        _, count, kind = space_of(i)
        return count * size_of(KINDS[kind])
    copies = i.op == "cp" and i.modifiers[1] in ("ca", "cg")
    return i.operands[2].value if copies else 16


def load(w, i) -> None:
    space, count, kind = space_of(i)
    result, source = i.operands
    if space == "param":
        number = list(w.kernel.parameters).index(source.value.value)
        size = w.kernel.parameters[source.value.value]
        if source.offset or count != 1 or unsigned(KINDS[kind]) != f"u{size}":
            raise Unsupported("a part of a parameter")
        unguarded(i)
        w.assign(result, f"full(n, W.parameters[{number}], u{size}).view({KINDS[kind]})", KINDS[kind])
        return
    targets = result.value if result.kind == "vector" else (result,)
    names = [w.temporary() for _ in targets]
    (where, wide), stored = SPACES[space], unsigned(KINDS[kind])
    address = w.address(source, wide)
    w.emit(f"{', '.join(names)}, = {where}.load({address}, {stored}, {count}, {guard_of(w, i)}, idx, {i.line})")
    for target, name in zip(targets, names, strict=True):
        w.assign(target, f"{name}.view({KINDS[kind]})", KINDS[kind], i.guard)


def store(w, i) -> None:
    space, count, kind = space_of(i)
    target, source = i.operands
    if len(source.value if source.kind == "vector" else (source,)) != count:
        raise Unsupported("the number of values")
    (where, wide), stored = SPACES[space], unsigned(KINDS[kind])
    address = w.address(target, wide)
    w.emit(f"{where}.store({address}, {stored}, {w.arrays(source, stored)}, {guard_of(w, i)}, idx, {i.line})")


def copy(w, i) -> None:
    """cp.async"""
    _, what, *rest = i.modifiers
    if what == "commit_group":
        w.emit("W.shared.commit(idx)")
    elif what in ("wait_group", "wait_all"):
        allowed = i.operands[0].value if what == "wait_group" else None
        w.emit(f"W.shared.wait({allowed}, idx, {i.line})")
    elif what in ("ca", "cg") and rest == ["shared", "global"]:
        to, source, size, *filled = i.operands
        given = w.value(filled[0], "u4") if filled else "None"
        to, source = w.address(to, "u4"), w.address(source, "u8")
        w.emit(f"W.shared.copy({to}, {source}, {size.value}, {given}, {guard_of(w, i)}, idx, {i.line})")
    else:
        raise Unsupported("a copy of another kind")


def matrix_count(i) -> int:
    unguarded(i)
    if i.modifiers[:3] != ("sync", "aligned", "m8n8") or i.modifiers[-1] != "b16":
        raise Unsupported("matrices of another shape")
    return int(i.modifiers[3][1:])


def load_matrix(w, i) -> None:
    count, (result, source) = matrix_count(i), i.operands
    names = [w.temporary() for _ in range(count)]
    arguments = f"{w.address(source, 'u4')}, {count}, {'trans' in i.modifiers}, idx, {i.line}"
    w.emit(f"{', '.join(names)}, = W.matrices.load({arguments})")
    for target, name in zip(result.value, names, strict=True):
        w.assign(target, name, "u4")


def store_matrix(w, i) -> None:
    count, (target, source) = matrix_count(i), i.operands
    if len(source.value) != count:
        raise Unsupported("the number of values")
    values = w.arrays(source, "u4")
    w.emit(f"W.matrices.store({w.address(target, 'u4')}, {values}, {'trans' in i.modifiers}, idx, {i.line})")


def product(w, i) -> None:
    unguarded(i)
    result, a, b, c = i.operands
    names = [w.temporary() for _ in result.value]
    operands = f"{w.arrays(a, 'u4')}, {w.arrays(b, 'u4')}, {w.arrays(c, 'f4')}"
    w.emit(f"{', '.join(names)}, = W.matrices.product({PRODUCTS[i.modifiers[2:]]!r}, {operands}, idx, {i.line})")
    for target, name in zip(result.value, names, strict=True):
        w.assign(target, name, "f4")


def group_product(w, i) -> None:
    unguarded(i)
    what = i.modifiers[0]
    if what == "commit_group":
        w.emit("W.matrices.commit(idx)")
    elif what == "wait_group":
        w.emit(f"W.matrices.wait({i.operands[0].value}, idx, {i.line})")
    elif what == "mma_async":
        _, _, _, shape, *kinds = i.modifiers
        result, a, b, accumulate, sign_a, sign_b, *transposed = i.operands
        columns, depth = re.fullmatch(r"m64n(\d+)k(\d+)", shape).groups()
        known = (int(depth), *kinds) in ((16, "f32", "f16", "f16"), (16, "f32", "bf16", "bf16"),
                                         (8, "f32", "tf32", "tf32"))  # fmt: skip
        if not known or a.kind != "reg" or (sign_a.value, sign_b.value) != (1, 1):
            raise Unsupported("a product of another kind")
        if 2 * len(result.value) != int(columns):
            raise Unsupported("the number of results")
        turned = [bool(t.value) for t in transposed] or [False, False]
        operands = f"{w.arrays(result, 'f4')}, {w.array(a, 'u8')}, {w.array(b, 'u8')}, {w.array(accumulate, 'b')}"
        name = w.temporary()
        w.emit(f"{name} = W.matrices.group_product({kinds[-1]!r}, {operands}, {turned}, idx, {i.line})")
        for k, target in enumerate(result.value):
            w.assign(target, f"{name}[{k}]", "f4")
        w.emit(f"W.matrices.fly({[target.value for target in result.value]}, idx)")
    elif what != "fence":
        raise Unsupported(what)


def shuffle(w, i) -> None:
    unguarded(i)
    result, *exists, source, by, bounds, members = i.operands
    if i.modifiers[0] != "sync" or i.modifiers[2:] != ("b32",) or members.value not in (-1, 0xFFFFFFFF):
        raise Unsupported("a shuffle of a part of a warp")
    names = w.temporary(), w.temporary()
    operands = f"{w.array(source, 'u4')}, {w.value(by, 'u4')}, {w.value(bounds, 'u4')}"
    w.emit(f"{names[0]}, {names[1]} = W.shuffle({i.modifiers[1]!r}, {operands}, idx, {i.line})")
    w.assign(result, names[0], "u4")
    for target in exists:
        w.assign(target, names[1], "b")


def reduction(w, i) -> None:
    unguarded(i)
    result, source, members = i.operands
    sync, by, kind = i.modifiers
    if sync != "sync":
        raise Unsupported("a reduction of another kind")
    name, kind = w.temporary(), KINDS[kind]
    w.emit(f"{name} = W.reduce({by!r}, {w.array(source, kind)}, {w.value(members, 'u4')}, idx, {i.line})")
    w.assign(result, name, kind)


def barrier(w, i) -> None:
    if i.modifiers == ("warp", "sync"):
        w.emit(f"W.sync_warps(idx, {i.line})")
    elif i.modifiers not in (("sync",), ("cta", "sync"), ("sync", "aligned")) or [o.value for o in i.operands] != [0]:
        raise Unsupported("a barrier of another kind")


HANDLERS = {
    "ld": load, "st": store, "cp": copy, "ldmatrix": load_matrix, "stmatrix": store_matrix, "mma": product,
    "wgmma": group_product, "shfl": shuffle, "redux": reduction, "bar": barrier, "barrier": barrier,
    # Branches and returns end a block, and barriers do the work of fences here.
    **dict.fromkeys(["bra", "ret", "fence"], lambda w, i: None),
}  # fmt: skip
