"""Reads the text of one PTX kernel: its parameters, its registers, and basic blocks of instructions.

A block ends at a label, at a branch, at a return, or at a barrier of the whole CTA.  So a thread that waits at a
barrier stands between two blocks.
"""

import functools
import re
from typing import NamedTuple


class Unsupported(NotImplementedError):
    """An instruction, an operand or a directive that the machine does not know."""


class Operand(NamedTuple):
    """An operand of an instruction.

    ``kind`` says what ``value`` is: "reg", "special" and "symbol" a name; "int" a number; "f32" and "f64" the bits of a
    number; "vector" a tuple of operands; "memory" the operand of an address, which ``offset`` is added to; "sink" None.
    A predicate may be ``negated``.
    """

    kind: str
    value: object
    offset: int = 0
    negated: bool = False


class Instruction(NamedTuple):
    """``@guard op.modifiers operands;`` at a line of the PTX, which came from a line of Python."""

    op: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Operand | None
    text: str
    line: int
    source: str


class Block:
    """Straight-line code.

    ``end`` is ("next",), ("barrier",), ("branch", label), ("either", predicate, label) or ("return",).
    """

    def __init__(self) -> None:
        self.instructions: list[Instruction] = []
        self.end: tuple = ("next",)


SPECIAL = {f"%{of}.{axis}" for of in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"} | {"%laneid"}
# The spelling of an operand, and its kind and value.
FORMS = (
    (r"_", "sink", lambda found: None),
    (r"%([\w$]+)", "reg", lambda found: found[1]),
    (r"0[fF]([0-9a-fA-F]{8})", "f32", lambda found: int(found[1], 16)),
    (r"0[dD]([0-9a-fA-F]{16})", "f64", lambda found: int(found[1], 16)),
    (r"(-?(?:0[xX][0-9a-fA-F]+|\d+))U?", "int", lambda found: int(found[1], 0)),
    (r"[\w$]+", "symbol", lambda found: found[0]),
)


@functools.cache
def operand(text: str) -> Operand:
    text = text.strip()
    if text.startswith("{"):
        return Operand("vector", tuple(operand(part) for part in split(text[1:-1])))
    if text.startswith("!"):
        return operand(text[1:])._replace(negated=True)
    if found := re.fullmatch(r"\[\s*([^\s+]+)\s*(?:\+\s*(-?(?:0x[0-9a-fA-F]+|\d+)))?\s*\]", text):
        return Operand("memory", operand(found[1]), int(found[2] or "0", 0))
    if text in SPECIAL:
        return Operand("special", text[1:])
    for form, kind, value in FORMS:
        if found := re.fullmatch(form, text):
            return Operand(kind, value(found))
    raise Unsupported(f"operand {text!r}")


def split(text: str) -> list[str]:
    """Splits at the commas outside of braces and brackets."""
    parts, depth = [""], 0
    for ch in text:
        depth += (ch in "{[(") - (ch in "}])")
        if ch == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += ch
    return [part for part in parts if part.strip()]


def instruction(text: str, line: int, source: str) -> Instruction:
    guard, rest = None, text
    if rest.startswith("@"):
        guard_text, rest = rest.split(None, 1)
        guard = operand(guard_text[1:])
    name, _, arguments = rest.partition(" ")
    # Without a suffix, shared memory is that of the CTA; Triton 3.8 writes the suffix.
    op, *modifiers = name.replace(".shared::cta", ".shared").split(".")
    # "%r1|%p1" is two results, a value and a predicate.
    operands = tuple(operand(one) for part in split(arguments) for one in part.split("|"))
    return Instruction(op, tuple(modifiers), operands, guard, text, line, source)


class Kernel:
    """The entry point of a PTX module, which must have one, and no functions."""

    def __init__(self, text: str) -> None:
        # The size in bytes of each parameter.
        self.parameters: dict[str, int] = {}
        # The letters of a register's name, such as "rd", and the type of such registers, such as "b64".
        self.classes: dict[str, str] = {}
        self.blocks = [Block()]
        self.labels: dict[str, int] = {}
        # The threads of a CTA, and the bytes of local memory of a thread.
        self.name, self.threads, self.local = "", 0, 0
        self._source = ""
        # The registers that inline assembly declares, by its braces: their names there, and their names here.
        self._scopes: list[dict[str, str]] = []
        lines = text.splitlines()
        entries = [i for i, line in enumerate(lines) if ".entry" in line]
        if len(entries) != 1 or any(line.strip().startswith(".func") for line in lines):
            raise Unsupported("a module that is not one entry point without functions")
        body = next(i for i in range(entries[0], len(lines)) if lines[i].strip().startswith("{"))
        self._read_head(lines[entries[0] : body])
        self._read_body(lines, body + 1)

    def _read_head(self, lines: list[str]) -> None:
        self.name = re.search(r"\.entry\s+([\w$]+)", lines[0])[1]
        for line in lines:
            code = line.split("//")[0].strip()
            if code.startswith(".param"):
                words = code.rstrip(",").split()
                self.parameters[words[-1]] = int(words[1][2:]) // 8
            if code.startswith(".reqntid"):
                self.threads = int(code.split()[1].rstrip(","))

    def _read_body(self, lines: list[str], first: int) -> None:
        pending, began = "", 0
        for i in range(first, len(lines)):
            if lines[i].startswith("}"):
                return
            code, _, comment = map(str.strip, lines[i].partition("//"))
            if code.startswith((".loc\t", ".loc ")):
                if found := re.match(r"(\S+:\d+:\d+)", comment):
                    self._source = found[1]
                continue
            if not pending:
                began = i + 1
                if found := re.fullmatch(r"([\w$]+):", code):
                    self._label(found[1])
                    continue
                if code.startswith("{"):
                    self._scopes.append({})
                    code = code[1:].strip()
            pending = f"{pending} {code}".strip()
            closes = pending.count("}") > pending.count("{")
            if pending and not closes and not pending.endswith(";"):
                continue
            for statement in pending.removesuffix("}").split(";") if closes else pending.split(";"):
                if statement.strip():
                    self._statement(statement.strip(), began)
            if closes:
                self._scopes.pop()
            pending = ""

    def _label(self, name: str) -> None:
        # Other labels mark places for debuggers.
        if name.startswith("$L__BB"):
            self._cut(("next",))
            self.labels[name] = len(self.blocks) - 1

    def _cut(self, end: tuple) -> None:
        self.blocks[-1].end = end
        self.blocks.append(Block())

    def _statement(self, text: str, line: int) -> None:
        if text.startswith(".reg"):
            self._declare(text)
            return
        if text.startswith("."):
            if found := re.fullmatch(r"\.local\s+\.align \d+ \.b8\s+__local_depot0\[(\d+)\]", text):
                self.local = int(found[1])
            elif not text.startswith(".pragma"):
                raise Unsupported(text)
            return
        for scope in reversed(self._scopes):
            for name, made in scope.items():
                text = re.sub(rf"(?<![\w%.$]){re.escape(name)}(?![\w.$])", made, text)
        one = instruction(re.sub(r"\s+", " ", text), line, self._source)
        self.blocks[-1].instructions.append(one)
        if one.op == "bra":
            target = one.operands[0].value
            self._cut(("branch", target) if one.guard is None else ("either", one.guard, target))
        elif one.op in ("ret", "bar", "barrier") and "warp" not in one.modifiers:
            if one.guard is not None:
                raise Unsupported(text)
            self._cut(("return",) if one.op == "ret" else ("barrier",))

    def _declare(self, text: str) -> None:
        if found := re.fullmatch(r"\.reg\s+\.(\w+)\s+%(\w+<\d+>|SPL?)", text):
            self.classes[found[2].partition("<")[0]] = found[1]
        elif self._scopes and (found := re.fullmatch(r"\.reg\s+\.(\w+)\s+(%?\w+(?:\s*,\s*%?\w+)*)", text)):
            for name in re.split(r"\s*,\s*", found[2]):
                made = f"local_{len(self.classes)}_"
                self.classes[made] = found[1]
                self._scopes[-1][name] = f"%{made}"
        else:
            raise Unsupported(text)
