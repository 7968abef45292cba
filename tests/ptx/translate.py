"""Turns each basic block of a PTX kernel into a Python function on numpy arrays, one element for each thread ("lane").

    def block3(W, R, idx)

takes the wave, the dict of registers, and the lanes that run the block (None: all of them).  Between blocks a register
is an array of unsigned integers or of bool; within a block it is a Python variable, which keeps the type that it was
computed in.  Lanes that do not run are left out of the arrays, so that what they would compute touches no memory.
"""

import numpy as np

from . import access, arithmetic, values
from .parse import Instruction, Kernel, Operand, Unsupported
from .shared import BASE
from .values import KINDS, NUMPY, UNSIGNED, size_of, unsigned

CONSTANT = ("int", "f32", "f64", "symbol")
SYMBOLS = {"global_smem": BASE, "__local_depot0": 0}
EFFECTS = ("st", "stmatrix", "fence", "cp", "bar", "barrier", "bra", "ret")


class Writer:
    """Writes the function of one block.  ``products`` are the registers that wgmma writes somewhere in the kernel."""

    def __init__(self, kernel: Kernel, number: int, products: set[str]) -> None:
        self.kernel, self.number, self.products = kernel, number, products
        self.lines: list[str] = []
        self.constants: dict[str, object] = {}
        # The types of the variables whose type differs from the type of their register.
        self.kinds: dict[str, str] = {}
        self.temporaries = 0
        # The registers of products that have certainly arrived.
        self.landed: set[str] = set()

    def register_kind(self, name: str) -> str:
        return KINDS[self.kernel.classes[name.rstrip("0123456789")]]

    def emit(self, text: str) -> None:
        self.lines.append(text)

    def temporary(self) -> str:
        self.temporaries += 1
        return f"t{self.temporaries}"

    def constant(self, value, kind: str) -> str:
        name = f"c{len(self.constants)}_{self.number}"
        self.constants[name] = NUMPY[kind](value)
        return name

    def value(self, operand: Operand, kind: str) -> str:
        """An expression of a numpy type: an array, or a scalar for a constant."""
        if operand.kind == "reg":
            return self._register(operand, kind)
        if operand.kind == "special":
            number = f"W.special({operand.value!r}, idx)"
            return {"u4": number, "i4": f"{number}.view(i4)"}.get(kind) or f"{number}.astype({kind})"
        if operand.kind == "symbol" and operand.value in SYMBOLS:
            return self.constant(SYMBOLS[operand.value], kind)
        if operand.kind == "int" and kind == "b":
            return self.constant(operand.value, kind)
        if operand.kind in ("int", "f32", "f64"):
            nbytes = {"int": size_of(kind), "f32": 4, "f64": 8}[operand.kind]
            if nbytes == size_of(kind):
                bits = np.array(operand.value & (1 << 8 * nbytes) - 1, NUMPY[UNSIGNED[nbytes]])
                return self.constant(bits.view(NUMPY[kind])[()], kind)
        raise Unsupported(f"{operand} as {kind}")

    def _register(self, operand: Operand, kind: str) -> str:
        name = operand.value
        have = self.kinds.get(name, self.register_kind(name))
        if have == kind:
            return f"~{name}" if operand.negated else name
        if "b" in (have, kind) or size_of(have) < size_of(kind):
            raise Unsupported(f"{name}, which is {have}, as {kind}")
        if size_of(have) > size_of(kind):
            name = f"{name}.astype({unsigned(kind)})"
        return name if kind == unsigned(kind) and size_of(have) > size_of(kind) else f"{name}.view({kind})"

    def array(self, operand: Operand, kind: str) -> str:
        value = self.value(operand, kind)
        return f"full(n, {value}, {kind})" if operand.kind in CONSTANT else value

    def given(self, sources, kind: str) -> list[str]:
        """The values of operands, of which numpy makes an array: one of them is an array."""
        constant = all(source.kind in CONSTANT for source in sources)
        return [(self.array if constant else self.value)(source, kind) for source in sources]

    def arrays(self, operand: Operand, kind: str) -> str:
        """A tuple of the elements of a vector, or of the operand itself."""
        parts = operand.value if operand.kind == "vector" else (operand,)
        return "(" + "".join(f"{self.array(part, kind)}, " for part in parts) + ")"

    def address(self, operand: Operand, kind: str) -> str:
        base = self.array(operand.value, kind)
        if not operand.offset:
            return base
        return f"{base} + {self.constant(np.array(operand.offset, np.int64).astype(NUMPY[kind])[()], kind)}"

    def assign(self, operand: Operand, expression: str, kind: str, guard: Operand | None = None) -> None:
        """A narrow value fills a wide register with zeros, or with its sign if the value is signed."""
        if operand.kind == "sink":
            return
        if operand.kind != "reg":
            raise Unsupported(f"the result {operand}")
        name, own = operand.value, self.register_kind(operand.value)
        if (kind == "b") != (own == "b") or size_of(kind) > size_of(own):
            raise Unsupported(f"{kind} into {name}")
        if size_of(kind) < size_of(own):
            kind = kind if kind[0] == "i" else unsigned(kind)
            expression, kind = f"({expression}).view({kind}).astype({kind[0]}{size_of(own)})", kind[0] + own[1]
        if guard is not None:
            expression = f"where({self.value(guard, 'b')}, {expression}, {self.value(operand, kind)})"
        self.emit(f"{name} = {expression}")
        self.kinds[name] = kind

    def instruction(self, i: Instruction) -> None:
        handler = arithmetic.HANDLERS.get(i.op) or access.HANDLERS.get(i.op)
        if handler is None:
            raise Unsupported("an unknown instruction")
        if i.op == "wgmma":
            self.landed = set()
        elif early := (uses(i) & self.products) - self.landed:
            self.emit(f"W.matrices.landed({sorted(early)}, idx, {i.line})")
            self.landed |= early
        handler(self, i)


def registers(*operands: Operand | None) -> set[str]:
    found: set[str] = set()
    for one in operands:
        if one is not None and one.kind == "reg":
            found.add(one.value)
        elif one is not None and one.kind in ("vector", "memory"):
            found |= registers(*(one.value if one.kind == "vector" else (one.value,)))
    return found


def results(i: Instruction) -> int:
    """Counts the operands that an instruction writes; they come first."""
    if i.op in EFFECTS or (i.op == "wgmma" and i.modifiers[0] != "mma_async"):
        return 0
    return 2 if len(i.operands) == {"shfl": 6, "setp": 4}.get(i.op) else 1


def uses(i: Instruction) -> set[str]:
    kept = i.operands[: results(i)] if (i.guard is not None or i.op == "wgmma") else ()
    return registers(i.guard, *kept, *i.operands[results(i) :])


def definitions(i: Instruction) -> set[str]:
    return registers(*i.operands[: results(i)])


def write_block(writer: Writer) -> list[str]:
    """The function takes the registers that the block reads first, and leaves all that it writes."""
    block = writer.kernel.blocks[writer.number]
    entering: set[str] = set()
    leaving: set[str] = set()
    for i in block.instructions:
        entering |= uses(i) - leaving
        leaving |= definitions(i)
        try:
            writer.instruction(i)
        except (KeyError, IndexError, ValueError, AttributeError, TypeError, Unsupported) as error:
            place = f"{writer.kernel.name}, PTX line {i.line} ({i.source}): {i.text}"
            raise Unsupported(f"{place}: {error if isinstance(error, Unsupported) else repr(error)}") from error
    result = writer.value(block.end[1], "b") if block.end[0] == "either" else "None"
    names = sorted(leaving)
    views = [f"{name} = {name}.view({writer.register_kind(name)})" for name in names
             if writer.kinds.get(name, writer.register_kind(name)) != writer.register_kind(name)]  # fmt: skip
    body = [
        "n = W.n if idx is None else len(idx)",
        *(f"{name} = R[{name!r}] if idx is None else R[{name!r}][idx]" for name in sorted(entering)),
        *writer.lines,
        *views,
        *(f"R[{name!r}] = {name} if idx is None else merge(R[{name!r}], idx, {name})" for name in names),
        f"return {result}",
    ]
    return [f"def block{writer.number}(W, R, idx):", *(f"    {line}" for line in body)]


def translate(kernel: Kernel) -> list:
    """Makes a function for each block; if the block ends in a conditional branch, it returns the lanes that branch."""
    products = {name for block in kernel.blocks for i in block.instructions if i.op == "wgmma"
                for name in definitions(i)}  # fmt: skip
    namespace, text = dict(vars(values)), []
    for b in range(len(kernel.blocks)):
        writer = Writer(kernel, b, products)
        text += write_block(writer)
        namespace.update(writer.constants)
    exec(compile("\n".join(text), f"<{kernel.name}>", "exec"), namespace)
    return [namespace[f"block{b}"] for b in range(len(kernel.blocks))]
