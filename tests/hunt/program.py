"""A program as data, and the code that it prints."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from tests.hunt import prelude

# Names of tensors, leaves, modules, memory of numpy's, and functions.
NAME = re.compile(r"\b[tpmbf]\d+\b")


@dataclass(frozen=True)
class Step:
    """One statement.  ``kind`` says which entry of the catalogue made it."""

    kind: str
    code: str

    def lines(self) -> list[str]:
        return [self.code]


@dataclass(frozen=True)
class Block:
    """A header, such as ``with torch.no_grad():`` or ``def f3(t1):``, and the steps below it."""

    kind: str
    header: str
    body: tuple["Step | Block", ...]

    def lines(self) -> list[str]:
        inner = [line for node in self.body for line in node.lines()]
        return [self.header, *(f"    {line}" for line in inner or ["pass"])]


Node = Step | Block
Steps = tuple[Node, ...]


def names_in(node: Node) -> list[str]:
    """The names in a node's own line."""
    return NAME.findall(node.header if isinstance(node, Block) else node.code)


def defined(node: Node) -> list[str]:
    """The names that a node gives to its results."""
    if isinstance(node, Block):
        name = re.match(r"def (\w+)", node.header)
        return [name.group(1)] if name else [n for inner in node.body for n in defined(inner)]
    target, equals, _ = node.code.partition(" = ")
    return NAME.findall(target) if equals and re.fullmatch(r"[\w, ]+", target) else []


class Network(NamedTuple):
    """A module: the steps of its ``__init__`` and its ``forward``, in ``parts``."""

    seed: int
    parts: tuple[Steps, ...]
    shape: tuple[int, ...]
    options: dict

    def functions(self) -> str:
        lines = [line for node in self.parts[0] for line in node.lines()]
        made = [line for line in lines if re.match(r"[pm]\d+ = log", line)]
        rest = [OF_MODULE.sub(r"self.\1", line) for line in lines if line not in made]
        first = [f"        {_member(line)}" for line in made]
        init = "\n".join(["    def __init__(self):", "        super().__init__()", *first])
        forward = "\n".join(["    def forward(self, t0):", *(f"        {line}" for line in rest)])
        return f"class Network(nn.Module):\n{init}\n\n{forward}\n"

    def make(self):
        """What makes the module."""
        namespace = dict(vars(prelude))
        exec(compile(self.functions(), f"<network {self.seed}>", "exec"), namespace)
        return lambda: prelude.seeded(namespace["Network"](), self.seed)

    def __str__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        call = f"network_difference(lambda: seeded(Network(), {self.seed}), {self.shape}{options})"
        return script(f"network {self.seed}", self.functions(), call)


OF_MODULE = re.compile(r"\b([pm]\d+)\b")


def _member(line: str) -> str:
    """The line of a leaf or a module, as one of ``__init__``."""
    name, _, made = line.partition(" = ")
    if made.startswith("log.module"):
        return f"self.{name} = {made.split(', ', 2)[2][:-1]}"
    leaf = f"data({made.split(', ', 1)[1]}"
    trained = "grad=False" not in leaf and not re.search(r"torch\.(u?int|bool)", leaf)
    return f"self.{name} = nn.Parameter({leaf})" if trained else f"self.register_buffer({name!r}, {leaf})"


def script(name: str, functions: str, call: str) -> str:
    """Code that runs in a checkout, and raises an AssertionError that says what ``call`` has found."""
    head = f"from tests.hunt.prelude import *\n\n# {name} of the hunt\ntorch.set_num_threads(1)"
    return f"{head}\n\n\n{functions}\n\nfound = {call}\nassert found is None, found\n"


def nodes(steps: Steps, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], Node]]:
    """Each node with its path, later ones first."""
    for i in range(len(steps) - 1, -1, -1):
        node = steps[i]
        yield (*path, i), node
        if isinstance(node, Block):
            yield from nodes(node.body, (*path, i))


def edited(steps: Steps, path: tuple[int, ...], new: Steps) -> Steps:
    """The steps with the node at a path replaced by others, or dropped."""
    i = path[0]
    if len(path) == 1:
        return (*steps[:i], *new, *steps[i + 1 :])
    block = steps[i]
    assert isinstance(block, Block)
    return (*steps[:i], replace(block, body=edited(block.body, path[1:], new)), *steps[i + 1 :])


def renamed(steps: Steps, old: str, new: str) -> Steps:
    pattern = re.compile(rf"\b{old}\b")
    out: list[Node] = []
    for node in steps:
        if isinstance(node, Step):
            out.append(replace(node, code=pattern.sub(new, node.code)))
        else:
            # The parameters of a function keep distinct names.
            header = (
                node.header if f"{new}," in node.header or f"{new})" in node.header else pattern.sub(new, node.header)
            )
            out.append(replace(node, header=header, body=renamed(node.body, old, new)))
    return tuple(out)


def without(steps: Steps, names: set[str]) -> Steps:
    """The steps that do not need any of the names, directly or through others' results."""
    out: list[Node] = []
    for node in steps:
        if isinstance(node, Step):
            if names & set(names_in(node)):
                names |= set(defined(node))
                continue
            out.append(node)
        else:
            if names & set(NAME.findall(node.header)) and node.header.startswith("def"):
                names |= set(defined(node))
                continue
            out.append(replace(node, body=without(node.body, names)))
    return tuple(out)
