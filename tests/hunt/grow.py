"""How a program grows from a seed: each step runs in eager mode as soon as it is chosen.

So the steps that follow see real shapes and dtypes.  A step that raises is dropped.  The grower also knows which memory
autograd keeps: a write that autograd cannot see changes no gradient elsewhere.
"""

import contextlib
import random
import re
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from tests.hunt import prelude
from tests.hunt.program import Block, Node, Step, Steps

LARGEST = 20_000
# Writes are recognised by name: relu_(, add_(, inplace=True, out=, .data, iadd(, __setitem__.
WRITES = re.compile(
    r"[a-z]_\(|inplace=True|out=|\.data\b|\.i(?:add|sub|mul|truediv)\(|Dirty|\] = |np\.copyto|change\d*\("
)


class Rates:
    """How often a program takes each kind of step; drawn once for each program, so that programs differ in kind."""

    def __init__(self, rng: random.Random) -> None:
        self.mixed = rng.choice((0.0, 0.0, 0.15, 0.4))
        self.inplace = rng.choice((0.1, 0.3, 0.6))
        self.autocast = rng.choice((0.0, 0.0, 0.05, 0.15))
        self.odd = rng.choice((0.0, 0.0, 0.04, 0.15))
        self.blocks = rng.choice((0.05, 0.12, 0.2))
        self.keep_failing = rng.choice((0.0, 0.0, 0.3))
        self.write_kept = rng.choice((0.0, 0.0, 0.0, 0.1))


SHAPES = (
    (2, 4, 8, 8), (2, 4, 8, 8), (2, 4, 8, 8), (2, 4, 8, 8), (2, 4, 2, 2), (1, 4, 8, 8), (8, 6), (8, 6), (2, 4, 9),
    (1, 4, 4, 4, 4), (2, 4, 5, 7), (2, 8, 4, 4), (2, 4, 1, 1), (3, 6, 4), (0, 4, 8, 8),
)  # fmt: skip
LAYOUTS = ("dense", "dense", "dense", "strided", "transposed", "channels_last")
HALF = (torch.bfloat16, torch.float16)


class Grower:
    def __init__(self, seed: int, choose: Callable[["Grower"], "Maker"]) -> None:
        self.rng, self.choose = random.Random(seed), choose
        self.rates = Rates(self.rng)
        self.shape: tuple[int, ...] = self.rng.choice(SHAPES)
        self.dtype = self.rng.choice((torch.float32,) * 8 + (torch.float64, torch.bfloat16))
        self.log = prelude.Log()
        self.space: dict = dict(vars(prelude)) | {"log": self.log}
        self.setup: list[Node] = []
        self.stack: list[list[Node]] = [[]]
        # The names of tensors, by function.
        self.frames: list[list[str]] = [[]]
        self.numbers = iter(range(1, 100_000))
        self.kept: list[Tensor] = []
        # The most values of a tensor, and the limit of their sizes.
        self.largest, self.most = LARGEST, 1e3

    # -- the present tensors

    def of(self, name: str) -> Tensor:
        return self.space[name]

    def new(self, letter: str = "t") -> str:
        return f"{letter}{next(self.numbers)}"

    def pick(self, wanted: Callable[[Tensor], bool] | None = None) -> str | None:
        """Picks a tensor, more often a recent one."""
        names = [n for n in self.frames[-1] if wanted is None or wanted(self.of(n))]
        if not names:
            return None
        return self.rng.choice(names[-4:] if self.rng.random() < 0.7 else names)

    def weighted(self, table: list[tuple[int, "Maker"]]) -> "Maker":
        weights, makers = zip(*table, strict=True)
        return self.rng.choices(makers, weights)[0]

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def keeps(self, t: Tensor) -> bool:
        """Whether autograd keeps this memory."""
        return any(_memory(k) == _memory(t) for k in self.kept)

    # -- new steps

    def leaf(self, shape: tuple[int, ...], dtype: torch.dtype, grad: bool = True, scale: float = 1.0) -> str:
        name = self.new("p")
        layout = self.rng.choice(LAYOUTS)
        if not shape or (layout == "channels_last" and len(shape) != 4):
            layout = "dense"
        options = "" if layout == "dense" else f", layout={layout!r}"
        options += "" if grad else ", grad=False"
        options += "" if scale == 1.0 else f", scale={scale}"
        self._set_up("leaf", f"{name} = log.leaf({name!r}, {self.rng.randrange(999)}, {shape}, {dtype}{options})")
        return name

    def module(self, expression: str) -> str:
        name = self.new("m")
        self._set_up("module", f"{name} = log.module({name!r}, {self.rng.randrange(999)}, {expression})")
        return name

    def _set_up(self, kind: str, code: str) -> None:
        exec(code, self.space)
        self.setup.append(Step(kind, code))

    def step(self, kind: str, expression: str, outs: int = 1) -> str | None:
        """Runs and adds ``t7 = expression``, or ``t7, t8 = …``; without outputs, runs and adds a statement.

        Returns the (last) name, or None if the step raises an error or its result is of no use to later steps.
        """
        writes = WRITES.search(expression) is not None
        # In a checkpoint autograd does not refuse the write, and eager mode computes with the new values.
        refused = len(self.frames) > 1 or not self.chance(self.rates.write_kept)
        if writes and refused and self._written_is_kept(expression):
            return None
        names = [self.new() for _ in range(outs)]
        code = f"{', '.join(names)} = {expression}" if outs else expression
        try:
            exec(code, self.space)
        except Exception:
            for name in names:
                self.space.pop(name, None)
            if "backward" not in kind and len(self.frames) == 1 and self.chance(self.rates.keep_failing):
                self.stack[-1].append(Block("attempt", "with log.attempt():", (Step(kind, expression),)))
            return None
        if not all(self._usable(self.space[name]) for name in names):
            for name in names:
                self.space.pop(name, None)
            return None
        self.stack[-1].append(Step(kind, code))
        self.frames[-1] += names
        return names[-1] if names else ""

    def _written_is_kept(self, expression: str) -> bool:
        """Whether autograd keeps the tensor that a step writes to, which is the first tensor that it names."""
        match = re.search(r"\b[tp]\d+\b", expression)
        return match is not None and self.keeps(self.of(match.group()))

    def _usable(self, value: object) -> bool:
        if not isinstance(value, Tensor) or value.numel() > self.largest or value.layout is not torch.strided:
            return False
        if value.device.type != "cpu" or value.is_nested:
            return False
        with torch.no_grad():
            return value.numel() == 0 or not (value.is_floating_point() and not value.abs().max().item() < self.most)

    @contextlib.contextmanager
    def block(self, kind: str, header: str) -> Iterator[None]:
        """Steps that are added inside stand below the header, ``with …:``, and run in its context."""
        context = eval(header.removeprefix("with ").removesuffix(":"), self.space)
        self.stack.append([])
        try:
            with context:
                yield
        finally:
            body = tuple(self.stack.pop())
            self.stack[-1].append(Block(kind, header, body))

    @contextlib.contextmanager
    def function(self, arguments: list[str]) -> Iterator[str]:
        """Steps that are added inside are the body of a new function, which returns its last tensor."""
        name = self.new("f")
        self.stack.append([])
        self.frames.append(list(arguments))
        try:
            yield name
        finally:
            frame, body = self.frames.pop(), self.stack.pop()
            result = next((n for n in reversed(frame) if self.of(n).is_floating_point()), arguments[0])
            body.append(Step("return", f"return {result}"))
            block = Block("function", f"def {name}({', '.join(arguments)}):", tuple(body))
            exec("\n".join(block.lines()), self.space)
            self.stack[-1].append(block)

    # -- the whole program

    def watch(self) -> contextlib.AbstractContextManager:
        """Notes the memory that autograd keeps."""

        def pack(t: Tensor) -> Tensor:
            with contextlib.suppress(Exception):
                self.kept.append(t.detach())
            return t

        return saved_tensors_hooks(pack, lambda t: t)


def _memory(t: Tensor) -> int:
    try:
        return t.untyped_storage().data_ptr()
    except Exception:
        return id(t)


# Adds a step, or several, to a program.
Maker = Callable[[Grower], None]


def floats(*dims: int) -> Callable[[Tensor], bool]:
    """What is true of floating tensors; with ``dims`` of those that have so many dimensions."""
    return lambda t: t.is_floating_point() and (not dims or t.dim() in dims)


def picking(wanted: Callable[[Tensor], bool]) -> Callable[[Callable[[Grower, str], None]], Maker]:
    """A maker gets the name of a tensor that is picked for it; without one it adds nothing."""

    def decorated(make: Callable[[Grower, str], None]) -> Maker:
        def maker(g: Grower) -> None:
            name = g.pick(wanted)
            if name is not None:
                make(g, name)

        return maker

    return decorated


@contextlib.contextmanager
def growing_network(g: Grower, shape: tuple[int, ...]) -> Iterator[None]:
    """Steps that are added inside are those of a network in float64, whose input is t0."""
    g.rates.mixed = g.rates.autocast = g.rates.odd = g.rates.keep_failing = g.rates.write_kept = 0.0
    g.shape, g.dtype = shape, torch.float64
    g.space["t0"] = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    g.frames[0].append("t0")
    before = torch.get_default_dtype()
    # In fp32 modules would raise, and a step that raises is dropped.
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def grown(seed: int) -> Steps:
    """The steps of the program of a seed: what makes its leaves and modules, and its function up to the loss."""
    from tests.hunt.blocks import chosen, grow

    torch.manual_seed(0)
    grower = Grower(seed, chosen)
    with grower.watch():
        grow(grower)
    return (*grower.setup, *grower.stack[0])
