"""Small defects of a source file: a swapped operator, another number, a condition turned round, a missing statement."""

import ast
from collections.abc import Iterator
from typing import NamedTuple

COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not", "is not": "is",
               "in": "not in", "not in": "in"}  # fmt: skip
ARITHMETIC = {"+": "-", "-": "+", "*": "+", "/": "*", "//": "*", "%": "*", "&": "|", "|": "&"}
SYMBOLS = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.Is: "is",
    ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in", ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/",
    ast.FloorDiv: "//", ast.Mod: "%", ast.BitAnd: "&", ast.BitOr: "|",
}  # fmt: skip
# Defects in these nodes change no result: types, and the texts of errors.
LEFT_OUT = (ast.JoinedStr, ast.Raise, ast.Assert, ast.Import, ast.ImportFrom)


class Mutant(NamedTuple):
    """A defect: ``text`` replaces the bytes from ``start`` to ``end``."""

    line: int
    what: str
    start: int
    end: int
    text: str

    def applied(self, source: str) -> str:
        raw = source.encode()
        return (raw[: self.start] + self.text.encode() + raw[self.end :]).decode()


class _Source:
    def __init__(self, text: str) -> None:
        self.raw = text.encode()
        self.starts = [0]
        for line in self.raw.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def start(self, node: ast.expr | ast.stmt) -> int:
        return self.starts[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr | ast.stmt) -> int:
        return self.starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.expr | ast.stmt) -> str:
        return self.raw[self.start(node) : self.end(node)].decode()

    def between(self, left: ast.expr, right: ast.expr, old: str, new: str) -> Mutant | None:
        """Replaces the operator between two operands."""
        first, last = self.end(left), self.start(right)
        at = self.raw[first:last].find(old.encode())
        if at < 0 or b"#" in self.raw[first:last]:
            return None
        return Mutant(left.end_lineno, f"{old} becomes {new}", first + at, first + at + len(old.encode()), new)

    def replaced(self, node: ast.expr | ast.stmt, text: str) -> Mutant:
        old = " ".join(self.text(node).split())
        return Mutant(node.lineno, f"{old[:60]} becomes {text[:66]}", self.start(node), self.end(node), text)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """The child nodes that run: annotations, decorators, docstrings and texts of errors are left out."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, LEFT_OUT):
                yield child


def _of_node(source: _Source, node: ast.AST) -> Iterator[Mutant | None]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        old = SYMBOLS[type(node.ops[0])]
        yield source.between(node.left, node.comparators[0], old, COMPARISONS[old])
    elif isinstance(node, ast.BinOp) and SYMBOLS.get(type(node.op)) in ARITHMETIC:
        old = SYMBOLS[type(node.op)]
        yield source.between(node.left, node.right, old, ARITHMETIC[old])
    elif isinstance(node, ast.BoolOp):
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        yield source.between(node.values[0], node.values[1], old, new)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield source.replaced(node, f"({source.text(node.operand)})")
    elif isinstance(node, (ast.If, ast.IfExp)):
        yield source.replaced(node.test, f"(not ({source.text(node.test)}))")
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield source.replaced(node, str(not node.value))
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        yield source.replaced(node, str(node.value + 1))
    elif isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield source.replaced(node, "pass")


def mutants(text: str) -> list[Mutant]:
    """All defects of a file, in the order of its lines."""
    source = _Source(text)
    found: list[Mutant] = []

    def visit(node: ast.AST) -> None:
        found.extend(mutant for mutant in _of_node(source, node) if mutant is not None)
        for child in _children(node):
            visit(child)

    visit(ast.parse(text))
    return sorted(found, key=lambda mutant: (mutant.start, -mutant.end))


def parses(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True
